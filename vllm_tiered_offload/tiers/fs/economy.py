"""What is not worth a write: chunks that were seen too seldom, and bytes beyond what the device shall endure."""

from collections import OrderedDict

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.seams import Clock

SIGHTINGS_KEPT = 1 << 18  # keys; the one that was seen longest ago is forgotten first

_DAY = 86_400.0
_BURSTS_A_DAY = 24


class Sightings:
    """How often a chunk was offered, until it has been offered often enough."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        # Key -> offers so far, below the threshold; last seen last.
        self._seen: OrderedDict[OffloadKey, int] = OrderedDict()

    def enough(self, key: OffloadKey) -> bool:
        """Count one more offer of it; whether it may be stored now."""
        count = self._seen.pop(key, 0) + 1
        if count >= self._threshold:
            return True
        self._seen[key] = count
        if len(self._seen) > SIGHTINGS_KEPT:
            self._seen.popitem(last=False)
        return False

    def __len__(self) -> int:
        return len(self._seen)


class WriteBudget:
    """Bytes that may be written, so many a day: they accrue evenly, and at most an hour's share is saved up.

    So a day never has more than 25 hours' share, a restart has one more, and a burst is what an hour allows.
    """

    def __init__(self, bytes_per_day: int, clock: Clock) -> None:
        self._rate = bytes_per_day / _DAY
        self._most = bytes_per_day / _BURSTS_A_DAY
        self._left = self._most
        self._clock = clock
        self._as_of = clock()

    def take(self, size: int) -> bool:
        """Spend that many bytes, if they are there."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._as_of) * self._rate)
        self._as_of = now
        if size > self._left:
            return False
        self._left -= size
        return True

    def give_back(self, size: int) -> None:
        """They were not written after all."""
        self._left = min(self._most, self._left + size)


class Economy:
    """Both, as far as they are asked for."""

    def __init__(self, threshold: int, bytes_per_day: int | None, clock: Clock) -> None:
        self._sightings = Sightings(threshold) if threshold > 1 else None
        self._budget = None if bytes_per_day is None else WriteBudget(bytes_per_day, clock)

    @property
    def is_asked_for(self) -> bool:
        """Whether anything is ever declined."""
        return self._sightings is not None or self._budget is not None

    def declines(self, key: OffloadKey, size: int) -> str | None:
        """Why this chunk, offered once more, is not stored now; None when it is, and then its `size` is paid for."""
        if self._sightings is not None and not self._sightings.enough(key):
            return "threshold"
        if self._budget is not None and not self._budget.take(size):
            return "budget"
        return None

    def give_back(self, size: int) -> None:
        """Bytes that were paid for and not written."""
        if self._budget is not None:
            self._budget.give_back(size)
