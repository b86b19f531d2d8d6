"""Chunks that a REQUEST_LEVEL tier is owed and that are still being written to the primary tier (L5).

A request's chunk may be on its way into the primary tier through another's store or a promotion. The offer is parked
until that write resolves: then it becomes a cascade, or nothing. A request with a parked offer is not over for the
tiers behind (L3).
"""

from collections.abc import Iterable

from vllm_tiered_offload.contract.keys import OffloadKey


class ParkedOffers:
    """Who waits for which key. A request is named by an identity of the caller's own."""

    def __init__(self) -> None:
        self._waiting: dict[OffloadKey, list[int]] = {}  # no empty lists
        self._count: dict[int, int] = {}  # parked offers by request, all > 0; the sum of the lists above

    def __len__(self) -> int:
        return len(self._waiting)

    def has(self, request: int) -> bool:
        """Whether the request waits for anything."""
        return request in self._count

    def park(self, key: OffloadKey, request: int) -> None:
        """The request's offer of `key` waits."""
        waiting = self._waiting.setdefault(key, [])
        if request not in waiting:
            waiting.append(request)
            self._count[request] = self._count.get(request, 0) + 1

    def resolve(self, keys: Iterable[OffloadKey]) -> dict[int, list[OffloadKey]]:
        """The write of `keys` ended: the requests that waited, with their keys in the order given."""
        resolved: dict[int, list[OffloadKey]] = {}
        for key in keys if self._waiting else ():
            for request in self._waiting.pop(key, ()):
                resolved.setdefault(request, []).append(key)
                self._count[request] -= 1
                if not self._count[request]:
                    del self._count[request]
        return resolved

    def clear(self) -> None:
        """Nobody waits any more."""
        self._waiting.clear()
        self._count.clear()
