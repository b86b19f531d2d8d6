"""The workers of one engine, as far as the host region must be agreed among them.

vLLM's world group can span data-parallel replicas, so ranks are counted over the tensor-parallel and pipeline-parallel
groups of this engine alone: rank = pp_rank * tp_size + tp_rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class RankGroup(Protocol):
    """Collective calls: every rank of the group makes them in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, obj: Any) -> list[Any]:
        """Every rank's object, by rank."""
        ...


class VllmRankGroup:
    """The tensor-parallel x pipeline-parallel ranks of this worker process's engine."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        self._tp = get_tp_group()
        self._pp = get_pp_group()

    @property
    def rank(self) -> int:
        return self._pp.rank_in_group * self._tp.world_size + self._tp.rank_in_group

    @property
    def size(self) -> int:
        return self._pp.world_size * self._tp.world_size

    def all_gather(self, obj: Any) -> list[Any]:
        stage = _gather(self._tp, obj)
        return [item for items in _gather(self._pp, stage) for item in items]


def _gather(group: Any, obj: Any) -> list[Any]:
    if group.world_size == 1:
        return [obj]
    import torch.distributed

    gathered: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(gathered, obj, group=group.cpu_group)
    return gathered


_override: list[RankGroup] = []  # innermost last; empty outside tests


@contextmanager
def use_rank_group(group: RankGroup) -> Iterator[None]:
    """Workers made inside this context belong to `group` (in-process ranks of the simulator)."""
    _override.append(group)
    try:
        yield
    finally:
        _override.remove(group)


def current_rank_group() -> RankGroup:
    """The group that a worker half made now belongs to."""
    return _override[-1] if _override else VllmRankGroup()
