"""The tier's thread-safe part: rows that peers hold (DESIGN §2).

Any thread may lease and release. Shared between threads are exactly the four things below, and the lock covers:

    readable   the scheduler thread alone changes it. It adds keys without the lock (a lease sees one or not, both are
               right) but takes keys away under the lock, so that a lease cannot pin a row that is being given up.
    _versions  changed along with that: a row is written only after its key was taken away.
    _held      changed under the lock only; the scheduler thread reads it under the lock where it decides on a row.
    _ended     leases that were released; the scheduler thread collects them, because rows and policy are its own.

So a load, a lookup and a touch never take the lock, and a store takes it only when it evicts. Nobody calls out, waits
or does I/O while holding it.
"""

import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import cast

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import Lease


class LeaseTable:
    """Leases on the rows of `readable` keys, which are below `num_rows`."""

    def __init__(self, num_rows: int) -> None:
        self.lock = threading.Lock()
        # Key -> row, for keys that may be read now. See the module text for who changes it.
        self.readable: dict[OffloadKey, int] = {}
        # By row: how often keys had been taken away when one was taken from it last.
        self._versions = array("Q", bytes(8 * num_rows))
        self._times_taken = 0
        self._ids = count(1)
        # Leases not released yet.
        self._open: dict[int, Lease] = {}
        # Row -> open leases on it, never 0.
        self._held: Counter[int] = Counter()
        # Released and not collected. A deque's append and popleft need no lock.
        self._ended: deque[Lease] = deque()

    def lease(self, keys: Sequence[OffloadKey]) -> Lease:
        """Pin the longest readable leading part of `keys`. An empty lease needs no release."""
        with self.lock:
            found = [*map(self.readable.get, keys), None]
            rows = cast(list[int], found[: found.index(None)])
            versions = map(self._versions.__getitem__, rows)
            lease = Lease(next(self._ids), tuple(keys[: len(rows)]), tuple(rows), tuple(versions))
            if rows:
                self._held.update(rows)
                self._open[lease.lease_id] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease; a second time changes nothing."""
        with self.lock:
            if self._open.pop(lease.lease_id, None) is None:
                return
            held = self._held
            for row in lease.block_ids:
                left = held[row] - 1
                if left:
                    held[row] = left
                else:
                    del held[row]
        self._ended.append(lease)

    def take_away(self, keys: Iterable[OffloadKey]) -> list[int]:
        """These keys, all readable, are no longer; their rows. Under the lock."""
        rows = list(map(self.readable.pop, keys))
        self._times_taken += 1
        for row in rows:
            self._versions[row] = self._times_taken
        return rows

    def take_all_away(self) -> None:
        """No key is readable any more. Under the lock."""
        self.readable.clear()
        self._times_taken += 1
        self._versions = array("Q", [self._times_taken]) * len(self._versions)

    def is_held(self, row: int) -> bool:
        """Whether a lease is on `row`. Without the lock the answer may be old, except for a row that no key has."""
        return row in self._held

    def collect(self) -> list[Lease]:
        """Leases released since the last call."""
        ended = self._ended
        return [ended.popleft() for _ in range(len(ended))] if ended else []

    @property
    def num_open(self) -> int:
        """Leases not released yet."""
        return len(self._open)

    def count_rows(self, counts: Callable[[int], bool]) -> int:
        """Leased rows for which `counts` holds. Under the lock."""
        return sum(1 for row in self._held if counts(row))
