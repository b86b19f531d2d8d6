"""The example tier, in trouble when it is told to be.

An order is {"tier": trouble}; what can be ordered is what this module compares it with, and "NAME raises" for each of
the CALLS.
"""

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from compressed_tier import CompressedTier, CompressedTierSettings

from troublemaker.orders import Orders
from vllm_tiered_offload import JobMetadata, JobResult, LookupResult, OffloadKey, ReqContext

CALLS = [
    "on_new_request",
    "lookup",
    "touch",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "on_schedule_end",
    "on_request_finished",
    "take_events",
    "get_stats",
]
RUBBISH = 0xD3  # what a row holds whose load failed


class StuckQueue(queue.SimpleQueue):
    """Tasks do not come out of it while the medium hangs."""

    def __init__(self, orders: Orders) -> None:
        super().__init__()
        self._orders = orders

    def get(self, *args: Any) -> Any:
        task = super().get(*args)
        while self._orders.now.get("tier") == "medium hangs":
            time.sleep(0.01)
        return task


class TroubledTier(CompressedTier):
    def __init__(self, settings: CompressedTierSettings) -> None:
        super().__init__(settings)
        self._orders = Orders("tier")
        self._tasks = StuckQueue(self._orders)

    @property
    def trouble(self) -> str | None:
        return self._orders.now.get("tier")

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        if self.trouble == "lookup is short":
            return []
        if self.trouble == "lookup never knows":
            return [LookupResult.RETRY] * len(keys)
        if self.trouble == "lookup lies":
            self._chunks, self._used = {}, 0
            return [LookupResult.HIT] * len(keys)
        return super().lookup(keys, req_context)

    def submit_load(self, job: JobMetadata) -> None:
        for key in job.keys:
            half = len(self._chunks.get(key, b"")) // 2
            if self.trouble == "chunks are truncated":
                self._chunks[key] = self._chunks[key][:half]
            if self.trouble == "chunks are corrupt":
                chunk = self._chunks[key]
                self._chunks[key] = chunk[:half] + bytes([chunk[half] ^ 1]) + chunk[half + 1 :]
        super().submit_load(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        nonsense: list[Any] = [JobResult(-1, True, ()), "nonsense"] if self.trouble == "results are nonsense" else []
        return [*super().get_finished_jobs(), *nonsense]

    def _end(self, task: Any) -> None:
        """A job is over: as many of its keys failed as is wanted, and their rows hold rubbish."""
        if task.job.is_promotion:
            keep = {"load fails": 0, "half of each load fails": len(task.good) // 2}.get(self.trouble, len(task.good))
            del task.good[keep:]
            for key, row in zip(task.job.keys, task.job.block_ids, strict=True):
                if key not in task.good:
                    self._rows[row][:] = bytes([RUBBISH]) * len(self._rows[row])
        super()._end(task)


def raising(name: str) -> Callable[..., Any]:
    """The tier's method of that name, which raises when it is told to."""
    method = getattr(TroubledTier, name)

    def call(self: TroubledTier, *args: Any) -> Any:
        if self.trouble in (f"{name} raises", "every call raises"):
            raise OSError(f"{name} was told to raise")
        return method(self, *args)

    return call


for name in CALLS:
    setattr(TroubledTier, name, raising(name))
