"""Least recently used, by request."""

from collections.abc import Callable, Iterable, Sequence

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.cpu.policies.base import EvictionPolicy
from vllm_tiered_offload.tiers.cpu.policies.recency import RecencyOrder


class LruPolicy(EvictionPolicy):
    """Evicts what the request that is longest ago used last, its tail first."""

    def __init__(self, capacity: int) -> None:  # noqa: ARG002 - recency alone does not depend on it
        self._order = RecencyOrder()

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def open(self, access: int) -> None:
        self._order.open(access)

    def close(self, access: int) -> None:
        self._order.close(access)

    def insert(self, keys: Sequence[OffloadKey], access: int) -> None:
        self._order.insert(keys, access)

    def touch(self, keys: Sequence[OffloadKey], access: int) -> None:
        self._order.touch(keys, access)

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        order = self._order
        for key in keys:
            if key in order:
                order.remove(key)

    def access_of(self, key: OffloadKey) -> int | None:
        return self._order.access_of(key)

    def evict(self, count: int, is_pinned: Callable[[OffloadKey], bool]) -> list[OffloadKey]:
        return self._order.pop_victims(count, is_pinned)

    def unpinned(self, keys: Iterable[OffloadKey]) -> None:
        self._order.unpinned(keys)

    def clear(self) -> None:
        self._order = RecencyOrder()
