"""What the scheduler thread knows of the directory, from memory alone.

    key:  unknown --submit_store--> writing --> present | unknown
          unknown --answer, load, scan--> present --load, scan--> unknown
          present --evicted--> leaving --> unknown

What is known of keys that are not there is a matter of lookups.py.

One thread owns it; no locks. Sizes are bytes on disk, frame included.

The order of eviction is a policy's, the same that the CPU tier can have (tiers/cpu/policies). Its accesses are our
requests: what a request stores is put into it when the job is submitted, in prefix order, so that tails go before
heads whatever the order in which the writes end. What nobody's request brought (a scan, a question) is an access of
its own.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.cpu.policies.base import EvictionPolicy
from vllm_tiered_offload.tiers.fs.faults import Fault
from vllm_tiered_offload.tiers.fs.jobs import Job

Victims: TypeAlias = Sequence[tuple[OffloadKey, int]]
"""Keys and bytes of files that are to be unlinked."""


@dataclass(slots=True, eq=False)
class Write:
    """One file of `size` bytes to be written: from `row`, after the `victims` (key, bytes) have made room.

    `waiters` are the (job, part) that asked for the key, not empty, the scheduler thread's. `held` are the bytes that
    count as used for it: victims that are more than the need do until they are really gone. What became of it: with
    `fault` None the file is there; `moved` bytes were written for it (none, if it had been there before); `kept` are
    victims that are still on disk; `problem` is a line for the user, if there is one.
    """

    key: OffloadKey
    row: memoryview
    size: int
    waiters: list[tuple[Job, int]]
    victims: Victims = ()
    held: int = 0
    fault: Fault | None = None
    moved: int = 0
    kept: Sequence[OffloadKey] = ()
    problem: str | None = None


class KeyIndex:
    """Present keys, the bytes they take and the order in which they would go.

    `frame_bytes` is the size of nearly every file. Two bounds, either of which may be None: `capacity` is the user's,
    `ceiling` what the device turned out to take.
    """

    def __init__(self, capacity: int | None, frame_bytes: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.ceiling: int | None = None
        self._frame_bytes = frame_bytes
        # Holds exactly the keys of `present` and `writing`.
        self._policy = policy
        # What can be read. Sizes of those that are no frame of ours stand in `_odd`: 10^6 keys count.
        self.present: set[OffloadKey] = set()
        self._odd: dict[OffloadKey, int] = {}
        # Being written. Disjoint from `present`.
        self.writing: dict[OffloadKey, Write] = {}
        # Victims that are not unlinked yet -> bytes. Disjoint from both.
        self.leaving: dict[OffloadKey, int] = {}
        # Loads in flight by key, none 0: these are not evicted.
        self._reads: Counter[OffloadKey] = Counter()
        # Bytes of `present`, and of all that is on its way in or out (`_held`). Never above the capacity by our doing.
        self.used = 0
        self._held = 0
        self._trimming = 0  # the part of `_held` that goes without a write
        self.evictions = 0
        # Request -> its access, from its first use of a key until it ends.
        self._accesses: dict[str, int] = {}
        self._last_access = 0
        # What came since a scan began, and what was taken away without ever having been known: of these the scan knows
        # only as it was. What was known and went needs no note, for the scan tells of news. None while there is none.
        self._changed: set[OffloadKey] | None = None

    # Questions

    def has_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether each of them is present."""
        return self.present.issuperset(keys)

    def has_none(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether none of them is present."""
        return self.present.isdisjoint(keys)

    @property
    def bound(self) -> int | None:
        """Bytes that may be used; None without a bound."""
        bounds = [bound for bound in (self.capacity, self.ceiling) if bound is not None]
        return min(bounds, default=None)

    @property
    def num_reads(self) -> int:
        """Keys that are being read."""
        return len(self._reads)

    def snapshot(self) -> list[OffloadKey]:
        """The present keys. Any thread: it is one step of the interpreter."""
        return list(self.present)

    # Keys come and go

    def add(self, files: Iterable[tuple[OffloadKey, int]], req_id: str | None = None) -> None:
        """These files are there. What is on its way in or out stays so. `req_id` wanted them, if a request did."""
        present, writing, leaving = self.present, self.writing, self.leaving
        new = {key: size for key, size in files if key not in present and key not in writing and key not in leaving}
        self._appear(new.items())
        self._place(list(new), req_id)

    def remove(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """These files are gone; the keys that are news."""
        keys = list(keys)
        if self._changed is not None:
            self._changed.update(keys)  # the known and the unknown: a scan may have seen them before
        gone = [key for key in keys if key in self.present]
        self._policy.remove(gone)
        for key in gone:
            self.used -= self._vanish(key)
        return gone

    def touch(self, keys: Sequence[OffloadKey], req_id: str) -> None:
        """The request uses these now, in prefix order."""
        self._policy.touch(keys, self._access(req_id))

    def end_request(self, req_id: str) -> None:
        """The request uses nothing any more."""
        access = self._accesses.pop(req_id, None)
        if access is not None:
            self._policy.close(access)

    def begin_reads(self, keys: Iterable[OffloadKey]) -> None:
        """These are not evicted before as many `end_reads`."""
        self._reads.update(keys)

    def end_reads(self, keys: Sequence[OffloadKey]) -> None:
        reads = self._reads
        for key in keys:
            left = reads.pop(key) - 1
            if left:
                reads[key] = left
        self._policy.unpinned(keys)

    # Writes

    def reserve(self, writes: Sequence[Write], keys: Sequence[OffloadKey], req_id: str) -> int:
        """Make room for as many of these, in order, as can be had, with victims for each; returns how many.

        `keys` are all of the job's, in prefix order: none of them is a victim. Each write has victims of its own, so
        any may be done first.
        """
        count = self._find_room(writes, keys)
        writing, present = self.writing, self.present
        for write in writes[:count]:
            writing[write.key] = write
        if count:
            self._policy.insert([key for key in keys if key in present or key in writing], self._access(req_id))
        return count

    def settle(self, writes: Sequence[Write]) -> None:
        """These writes ended. A victim that could not be unlinked is present again."""
        for write in writes:
            del self.writing[write.key]
        self._hold(-sum([write.held for write in writes]))
        good = [write for write in writes if write.fault is None]
        self._appear([(write.key, write.size) for write in good])
        for write in writes:
            if write.victims:
                self.end_leaving(write.victims, write.kept)
        if len(good) < len(writes):
            self._policy.remove([write.key for write in writes if write.fault is not None])
        self._policy.unpinned([write.key for write in good])

    # Evictions without a write

    def trim(self) -> Victims:
        """Victims that bring the used bytes back to the bound, or as near to it as can be; see `end_trim`."""
        bound = self.bound
        if bound is None:
            return ()
        victims: list[OffloadKey] = []
        lacking = self.used - self._trimming - bound
        while lacking > 0 and (more := self._evict(lacking, ())):
            victims += more
            lacking -= sum(map(self._size_of, more))
        leaving = self._make_leave(victims)
        self._hold(bytes_of(leaving))
        self._trimming += bytes_of(leaving)
        return leaving

    def end_trim(self, victims: Victims, kept: Collection[OffloadKey]) -> None:
        """These were unlinked, `kept` excepted."""
        self._hold(-bytes_of(victims))
        self._trimming -= bytes_of(victims)
        self.end_leaving(victims, kept)

    def end_leaving(self, victims: Victims, kept: Collection[OffloadKey]) -> None:
        """Victims are gone, or `kept`: these are present again."""
        for victim, _ in victims:
            del self.leaving[victim]
        if kept:
            self.add([(victim, size) for victim, size in victims if victim in kept])
            self.evictions -= len(kept)

    # Scans

    def begin_scan(self) -> None:
        """From now on it counts what changes."""
        self._changed = set()

    def take_scanned(self, there: Sequence[tuple[OffloadKey, int]], gone: Sequence[OffloadKey]) -> list[OffloadKey]:
        """What a scan found, and found missing, beside what has changed since it began; the keys lost by it."""
        changed = self._changed or ()
        self.add([(key, size) for key, size in there if key not in changed])
        return self.remove([key for key in gone if key not in changed])

    def end_scan(self) -> None:
        """The last scan is over."""
        self._changed = None

    def check(self) -> None:
        """Assert the invariants beside the declarations. O(keys): for tests."""
        present, writing, leaving = self.present, self.writing.keys(), self.leaving.keys()
        assert present.isdisjoint(writing), "a key is present and being written"
        assert present.isdisjoint(leaving), "a key is present and on its way out"
        assert writing.isdisjoint(leaving), "a key is being written and on its way out"
        assert self._odd.keys() <= present
        assert len(self._policy) == len(present) + len(writing)
        assert all(key in self._policy for key in (*present, *writing))
        victims = {victim for write in self.writing.values() for victim, _ in write.victims}
        assert self._trimming == sum(size for key, size in self.leaving.items() if key not in victims)
        assert self._held == sum(write.held for write in self.writing.values()) + self._trimming, "held for nobody"
        assert self.used == sum(map(self._size_of, present)) + self._held, "used bytes are not those present and held"
        assert all(count > 0 for count in self._reads.values())

    # Inside

    def _find_room(self, writes: Sequence[Write], keys: Sequence[OffloadKey]) -> int:
        bound = self.bound
        total = sum([write.size for write in writes])
        if bound is None or self.used + total <= bound:
            for write in writes:
                write.held = write.size
            self._hold(total)
            return len(writes)
        free = bound - self.used
        pool = deque(self._evict(min(total - free, self._evictable(keys)), keys))
        count = 0
        for write in writes:
            victims, lacking = [], self.used + write.size - bound
            while lacking > 0 and pool:
                victims.append(pool.popleft())
                lacking -= self._size_of(victims[-1])
            if lacking > 0:
                pool.extendleft(reversed(victims))
                break
            write.victims = self._make_leave(victims)
            write.held = max(write.size, bytes_of(write.victims))
            self._hold(write.held)
            count += 1
        self._place(list(pool), None)  # nobody's victims after all
        return count

    def _evictable(self, keys: Sequence[OffloadKey]) -> int:
        """Bytes that could be evicted with these and what is being read left alone."""
        pinned = self.present.intersection((*self._reads, *keys))
        return self.used - self._held - sum(map(self._size_of, pinned))

    def _evict(self, lacking: int, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """The next victims, of about `lacking` bytes. The policy has given them up, all else is still to be done."""
        if lacking <= 0:
            return []
        spared, reads, writing = set(keys), self._reads, self.writing

        def is_pinned(key: OffloadKey) -> bool:
            return key in reads or key in writing or key in spared

        victims = self._policy.evict(-(-lacking // self._frame_bytes), is_pinned)
        # A call later they may be victims.
        self._policy.unpinned(keys)
        return victims

    def _make_leave(self, victims: Sequence[OffloadKey]) -> Victims:
        sizes = [(victim, self._vanish(victim)) for victim in victims]
        self.leaving.update(sizes)
        self.used -= bytes_of(sizes)
        self.evictions += len(sizes)
        return sizes

    def _hold(self, size: int) -> None:
        self.used += size
        self._held += size

    def _place(self, keys: Sequence[OffloadKey], req_id: str | None) -> None:
        """Tell the policy of keys that it does not hold."""
        if not keys:
            return
        if req_id in self._accesses:
            self._policy.insert(keys, self._accesses[req_id])
            return
        access = self._open()
        self._policy.insert(keys, access)
        self._policy.close(access)

    def _access(self, req_id: str) -> int:
        access = self._accesses.get(req_id)
        if access is None:
            access = self._accesses[req_id] = self._open()
        return access

    def _open(self) -> int:
        self._last_access += 1
        self._policy.open(self._last_access)
        return self._last_access

    def _size_of(self, key: OffloadKey) -> int:
        return self._odd.get(key, self._frame_bytes)

    def _appear(self, files: Collection[tuple[OffloadKey, int]]) -> None:
        keys = [key for key, _ in files]
        self.present.update(keys)
        self.used += bytes_of(files)
        self._odd.update([(key, size) for key, size in files if size != self._frame_bytes])
        if self._changed is not None:
            self._changed.update(keys)

    def _vanish(self, key: OffloadKey) -> int:
        """Its bytes, which are still to be taken from those used."""
        self.present.discard(key)
        return self._odd.pop(key, self._frame_bytes)


def bytes_of(files: Iterable[tuple[OffloadKey, int]]) -> int:
    """Bytes of these (key, bytes)."""
    return sum([size for _, size in files])
