"""What a tier believes of a key for a while: that it is not there, or not worth another try."""

from collections.abc import Iterable, Sequence

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.seams import Clock


class ExpiringKeys:
    """Keys that are in it until the first `purge` that comes `ttl` seconds after their `add`."""

    def __init__(self, ttl: float, clock: Clock) -> None:
        self._ttl = ttl
        self._clock = clock
        # Key -> when it ends; ends never decrease in iteration order.
        self._until: dict[OffloadKey, float] = {}

    def add(self, keys: Iterable[OffloadKey]) -> None:
        new = dict.fromkeys(keys, self._clock() + self._ttl)
        if not self._until.keys().isdisjoint(new):
            for key in self._until.keys() & new.keys():
                del self._until[key]
        self._until.update(new)

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        if self._until:
            for key in keys:
                self._until.pop(key, None)

    def purge(self) -> None:
        """Forget what has ended."""
        now, ended = self._clock(), []
        for key, end in self._until.items():
            if end > now:
                break
            ended.append(key)
        for key in ended:
            del self._until[key]

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._until

    def has_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether each of them is in it."""
        return all(map(self._until.__contains__, keys))

    def has_none(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether none of them is in it."""
        return self._until.keys().isdisjoint(keys)

    def __len__(self) -> int:
        return len(self._until)

    def clear(self) -> None:
        self._until.clear()
