"""What this engine has promised to its peers: rows that stay as they are until they were fetched.

    asked --make--> promised --every part fetched, released, peer dropped, reset, deadline--> gone

- A promise belongs to one (peer, request, round). Rounds of one request are independent: each has its own rows, its own
  deadline and its own end, and the primary tier counts how many leases are on a row.
- A part is handed out once. What is fetched late (gone), again (replayed), from an earlier epoch (stale) or beyond what
  was promised (range) is refused whole, and nothing about the promise changes.
- Nothing is pinned beyond its deadline: whoever owns this calls `expire` at `next_deadline`, and every `make` and
  `fetch` does so first. All promises are made for the same time, so they end in the order in which they were made.
- What is promised is bounded: rows for all peers together, rows and promises for each, so that none takes all.
- Only keys in `shared` are promised. A lease would pin whatever is resident, and not all of it may leave (D5).

No I/O; one thread owns it. The leases themselves may be taken and released on any thread.
"""

import os
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import Lease, RowLeases
from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.tiers.p2p.messages import EPOCH_BYTES, Fetch, Found, Lookup, Reason, Refuse

PeerId = bytes
"""Whom a promise was given to: one session."""


class PromisedRow(NamedTuple):
    """One part of a promise: send row `row`, which holds the chunk `key`."""

    part: int
    key: OffloadKey
    row: int


class _PromiseId(NamedTuple):
    peer: PeerId
    request: int
    round: int


@dataclass(slots=True)
class _Promise:
    lease: Lease
    deadline: float
    fetched: set[int] = field(default_factory=set)  # parts that were handed out; below len(lease.keys)


@dataclass(frozen=True, slots=True)
class PromiseLimits:
    """`seconds` that a promise holds, `rows` for all peers together, `rows_a_peer` and `promises_a_peer` for one."""

    seconds: float
    rows: int
    rows_a_peer: int
    promises_a_peer: int = 256


class Promises:
    """All open promises of this engine."""

    def __init__(
        self,
        leases: RowLeases,
        shared: Container[OffloadKey],
        limits: PromiseLimits,
        *,
        clock: Clock = monotonic,
        new_epoch: Callable[[], bytes] = lambda: os.urandom(EPOCH_BYTES),
    ) -> None:
        self._leases = leases
        self._shared = shared
        self._limits = limits
        self._clock = clock
        self._new_epoch = new_epoch
        # Tells promises of this start, and since the last reset, from all earlier ones.
        self.epoch = new_epoch()
        # Open promises, in the order of their deadlines.
        self._open: dict[_PromiseId, _Promise] = {}
        # Rows of all open promises together; a row that was promised twice counts twice.
        self.num_rows = 0
        # Open promises of each peer, and their rows; never 0.
        self._promises_of: Counter[PeerId] = Counter()
        self._rows_of: Counter[PeerId] = Counter()
        self.num_expired = 0  # promises that reached their deadline, since the start

    def __len__(self) -> int:
        return len(self._open)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        return next((promise.deadline for promise in self._open.values()), None)

    def make(self, peer: PeerId, lookup: Lookup) -> Found | Refuse:
        """Promise the longest leading part of the keys that is resident and may leave.

        A round that is asked again loses its older promise.
        """
        self.expire()
        self._end(_PromiseId(peer, lookup.request, lookup.round))
        limits = self._limits
        room = min(limits.rows - self.num_rows, limits.rows_a_peer - self._rows_of.get(peer, 0))
        if room <= 0 or self._promises_of[peer] >= limits.promises_a_peer:
            return Refuse(lookup.request, lookup.round, Reason.BUSY)
        keys = [OffloadKey(key) for key in takewhile(self._shared.__contains__, lookup.keys[:room])]
        lease = self._leases.lease(keys)
        if lease.keys:
            identity = _PromiseId(peer, lookup.request, lookup.round)
            self._open[identity] = _Promise(lease, self._clock() + limits.seconds)
            self._promises_of[peer] += 1
            self._rows_of[peer] += len(lease.keys)
            self.num_rows += len(lease.keys)
        return Found(lookup.request, lookup.round, self.epoch, len(lease.keys), limits.seconds)

    def fetch(self, peer: PeerId, fetch: Fetch) -> list[PromisedRow] | Refuse:
        """The rows of all these parts, or why there is none. Call `fetched` once their bytes were copied."""
        self.expire()
        promise = self._open.get(_PromiseId(peer, fetch.request, fetch.round))
        reason = self._objection(promise, fetch)
        if promise is None or reason is not None:
            return Refuse(fetch.request, fetch.round, reason or Reason.GONE)
        promise.fetched.update(fetch.parts)
        lease = promise.lease
        return [PromisedRow(part, lease.keys[part], lease.block_ids[part]) for part in fetch.parts]

    def _objection(self, promise: _Promise | None, fetch: Fetch) -> Reason | None:
        if fetch.epoch != self.epoch:
            return Reason.STALE
        if promise is None:
            return Reason.GONE
        if max(fetch.parts) >= len(promise.lease.keys):
            return Reason.RANGE
        if len(set(fetch.parts)) != len(fetch.parts) or not promise.fetched.isdisjoint(fetch.parts):
            return Reason.REPLAYED
        return None

    def fetched(self, peer: PeerId, request: int, round_: int) -> None:
        """What was fetched of this round has been copied: a promise without open parts ends."""
        identity = _PromiseId(peer, request, round_)
        promise = self._open.get(identity)
        if promise is not None and len(promise.fetched) == len(promise.lease.keys):
            self._end(identity)

    def release(self, peer: PeerId, request: int, round_: int) -> None:
        """The peer wants nothing more of this round."""
        self._end(_PromiseId(peer, request, round_))

    def drop_peer(self, peer: PeerId) -> None:
        """The peer is gone."""
        for identity in [identity for identity in self._open if identity.peer == peer]:
            self._end(identity)

    def expire(self) -> None:
        """End what has reached its deadline."""
        now = self._clock()
        while self._open:
            identity, promise = next(iter(self._open.items()))
            if promise.deadline > now:
                return
            self.num_expired += 1
            self._end(identity)

    def reset(self) -> None:
        """End everything, and begin a new epoch."""
        self.epoch = self._new_epoch()
        for identity in list(self._open):
            self._end(identity)

    def _end(self, identity: _PromiseId) -> None:
        promise = self._open.pop(identity, None)
        if promise is None:
            return
        self.num_rows -= len(promise.lease.keys)
        self._rows_of[identity.peer] -= len(promise.lease.keys)
        self._promises_of[identity.peer] -= 1
        if not self._promises_of[identity.peer]:
            del self._promises_of[identity.peer], self._rows_of[identity.peer]
        self._leases.release(promise.lease)

    def check(self) -> None:
        """Assert the invariants beside the declarations. For tests."""
        promises = list(self._open.values())
        assert self.num_rows == sum(len(promise.lease.keys) for promise in promises) <= self._limits.rows
        assert [promise.deadline for promise in promises] == sorted(promise.deadline for promise in promises)
        assert Counter(identity.peer for identity in self._open) == self._promises_of
        assert all(0 < rows <= self._limits.rows_a_peer for rows in self._rows_of.values())
        assert self._rows_of.total() == self.num_rows
        assert all(promise.fetched < set(range(len(promise.lease.keys))) for promise in promises)
