"""What the scheduler thread knows of the directory, from memory alone.

    key:  unknown --lookup--> asked --answer--> present | absent
          absent --share_refresh--> unknown                (another engine may have stored it)
          any but present --submit_store--> writing --> present | unknown
          present --evicted--> leaving --> unknown;   present --a read finds it gone or bad--> absent | shunned

One thread owns it; no locks. Sizes are bytes on disk, frame included.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import TypeAlias

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.seams import Clock

Victims: TypeAlias = Sequence[tuple[OffloadKey, int]]
"""Keys and bytes of files that are to be unlinked."""

_CANDIDATES = 1024


class ExpiringKeys:
    """Keys that are in it for `ttl` seconds after `add`."""

    def __init__(self, ttl: float, clock: Clock) -> None:
        self._ttl = ttl
        self._clock = clock
        # Key -> when it ends; ends never decrease in iteration order.
        self._until: dict[OffloadKey, float] = {}

    def add(self, keys: Iterable[OffloadKey]) -> None:
        new = dict.fromkeys(keys, self._clock() + self._ttl)
        for key in self._until.keys() & new.keys():
            del self._until[key]
        self._until.update(new)

    def discard(self, key: OffloadKey) -> None:
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


class KeyIndex:
    """Present keys in order of use, and the bytes they take. `capacity` None means no bound."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        # Key -> bytes, least recently used first. Equal sizes share one int object (`_sizes`): 10^6 keys count.
        self.present: dict[OffloadKey, int] = {}
        self._sizes: dict[int, int] = {}
        # Victims that are not unlinked yet -> bytes. Disjoint from `present`.
        self.leaving: dict[OffloadKey, int] = {}
        # Loads in flight by key, none 0: these are not evicted.
        self._reads: dict[OffloadKey, int] = {}
        # Bytes: of `present` and of reservations. Never above the capacity by our own doing.
        self.used = 0
        self._reserved = 0
        self.num_reservations = 0
        self.evictions = 0
        # The next victims, oldest first, as of the last look; who was touched or came again since is in `_touched`.
        self._candidates: deque[OffloadKey] = deque()
        self._touched: set[OffloadKey] = set()

    def has_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether each of them is present."""
        return all(map(self.present.__contains__, keys))

    def has_none(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether none of them is present."""
        return self.present.keys().isdisjoint(keys)

    def add(self, key: OffloadKey, size: int) -> bool:
        """The file is there; whether that is news. A key on its way out stays so."""
        if key in self.present or key in self.leaving:
            return False
        self.present[key] = self._sizes.setdefault(size, size)
        self._note_use(key)
        self.used += size
        return True

    def remove(self, key: OffloadKey) -> bool:
        """The file is gone; whether that is news."""
        size = self.present.pop(key, None)
        if size is None:
            return False
        self.used -= size
        return True

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Used now: the tail of the prefix becomes older than its head."""
        present = self.present
        for key in reversed(keys):
            size = present.pop(key, None)
            if size is not None:
                present[key] = size
                self._note_use(key)

    def begin_reads(self, keys: Iterable[OffloadKey]) -> None:
        """These are not evicted before as many `end_reads`."""
        reads = self._reads
        for key in keys:
            reads[key] = reads.get(key, 0) + 1

    def end_reads(self, keys: Iterable[OffloadKey]) -> None:
        reads = self._reads
        for key in keys:
            left = reads.pop(key) - 1
            if left:
                reads[key] = left

    def reserve(self, sizes: Sequence[int]) -> list[Victims]:
        """Room for as many of these files, in order, as can be had: for each the victims that must go before it.

        The least recently used go first. Of several files each has its own victims, so any may be written first.
        """
        if self.capacity is None or self.used + sum(sizes) <= self.capacity:
            self._hold(sum(sizes))
            self.num_reservations += len(sizes)
            return [()] * len(sizes)
        reserved: list[Victims] = []
        for size in sizes:
            victims = self._choose(self.used + size - self.capacity)
            if victims is None:
                break
            reserved.append(self._make_leave(victims))
            self._hold(max(size, _bytes_of(reserved[-1])))
            self.num_reservations += 1
        return reserved

    def settle(
        self, key: OffloadKey, size: int, victims: Victims, *, written: bool, kept: Collection[OffloadKey] = ()
    ) -> None:
        """The write of one file ended. `kept` are victims that could not be unlinked: they are present again."""
        self._hold(-max(size, _bytes_of(victims)) if victims else -size)
        self.num_reservations -= 1
        for victim, victim_size in victims:
            del self.leaving[victim]
            if victim in kept:
                self.add(victim, victim_size)
        self.evictions -= len(kept)
        if written:
            self.add(key, size)

    @property
    def num_reads(self) -> int:
        """Keys that are being read."""
        return len(self._reads)

    def check(self) -> None:
        """Assert the invariants beside the declarations. O(keys): for tests."""
        assert self.present.keys().isdisjoint(self.leaving), "a key is present and on its way out"
        assert self.used == sum(self.present.values()) + self._reserved, "used bytes are not those held and reserved"
        assert self._reserved >= 0
        assert self.num_reservations or not self._reserved, "bytes are reserved for nobody"
        assert all(count > 0 for count in self._reads.values())

    def _make_leave(self, victims: Sequence[OffloadKey]) -> Victims:
        sizes = [(victim, self.present.pop(victim)) for victim in victims]
        self.leaving.update(sizes)
        self.used -= _bytes_of(sizes)
        self.evictions += len(sizes)
        return sizes

    def _hold(self, size: int) -> None:
        """Bytes of a reservation. Victims that are more than the need count as used until they are really gone."""
        self.used += size
        self._reserved += size

    def _choose(self, lacking: int) -> list[OffloadKey] | None:
        """The oldest keys of at least `lacking` bytes that nobody reads; None when there are not enough."""
        victims: list[OffloadKey] = []
        looked_at: dict[OffloadKey, None] = {}
        while lacking > 0:
            key = self._next_candidate(looked_at)
            if key is None:
                self._candidates.extendleft(reversed(looked_at))
                return None
            looked_at[key] = None
            if key not in self._reads:
                victims.append(key)
                lacking -= self.present[key]
        chosen = set(victims)
        self._candidates.extendleft(key for key in reversed(looked_at) if key not in chosen)
        return victims

    def _next_candidate(self, looked_at: Collection[OffloadKey]) -> OffloadKey | None:
        """The oldest key beside those.

        A dict whose front was emptied is slow to start iterating, so victims are taken from it by the thousand.
        """
        for _ in range(2):
            while self._candidates:
                key = self._candidates.popleft()
                if key in self.present and key not in self._touched and key not in looked_at:
                    return key
            self._touched.clear()
            untouched = (key for key in self.present if key not in looked_at)
            self._candidates.extend(islice(untouched, _CANDIDATES))
        return None

    def _note_use(self, key: OffloadKey) -> None:
        if not self._candidates:
            return
        self._touched.add(key)
        if len(self._touched) > 8 * _CANDIDATES:
            self._candidates.clear()
            self._touched.clear()


def _bytes_of(victims: Victims) -> int:
    return sum(size for _, size in victims)
