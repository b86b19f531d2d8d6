"""The host copy engine, failing on one rank in one direction when it is told to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.distributed import get_tensor_model_parallel_rank

from troublemaker.orders import Orders
from vllm_tiered_offload.worker.copy_engines.base import ComputeEvent, CopyResult, Direction
from vllm_tiered_offload.worker.copy_engines.host import HostCopyEngine
from vllm_tiered_offload.worker.copy_plan import CopyPlan


class TroubledCopyEngine(HostCopyEngine):
    """Obeys {"copies": trouble, "rank": rank, "direction": "load" or "store", "min_blocks": of jobs it concerns}."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rank = get_tensor_model_parallel_rank()
        self._orders = Orders(f"rank{self._rank}")
        self._spoilt: set[int] = set()  # jobs that end as failed

    def submit(
        self, job_id: int, direction: Direction, plans: Sequence[CopyPlan], after: ComputeEvent | None = None
    ) -> None:
        order = self._orders.now
        concerned = order.get("direction") == direction.value and order.get("rank") == self._rank
        if concerned and sum(plan.num_blocks for plan in plans) >= order.get("min_blocks", 0):
            if order.get("copies") == "submit raises":
                raise RuntimeError("submit was told to raise")
            if order.get("copies") == "copy fails":
                self._spoilt.add(job_id)
                # Blocks in the wrong places: were they taken for good, the answer would show it.
                plans = [replace(plan, rows=plan.rows[::-1].copy()) for plan in plans]
        super().submit(job_id, direction, plans, after)

    def poll(self) -> list[CopyResult]:
        if self._orders.now.get("copies") == "poll raises" and self._orders.now.get("rank") == self._rank:
            raise RuntimeError("poll was told to raise")
        return [
            replace(result, error="the copy was told to fail") if result.job_id in self._spoilt else result
            for result in super().poll()
        ]
