"""What this engine has promised to its peers: rows that stay as they are until they were fetched.

    asked --make--> promised --every part sent or confirmed, released, peer dropped, reset, deadline--> gone

- A promise belongs to one (peer, request, round). Rounds of one request are independent: each has its own rows, its own
  deadline and its own end, and the primary tier counts how many leases are on a row.
- A part is handed out once, to be sent by us (`fetch`) or read by the peer (`begin_reading`), and its row stays until
  it was sent or confirmed. What is read is proved meanwhile (`next_to_prove`), at the latest when it is confirmed; what
  a peer that reads will want to have proved is known as soon as it was promised (`next_expected`). What is fetched late
  (gone), again (replayed), from an earlier epoch (stale) or beyond what was promised (range) is refused whole, and
  nothing about the promise changes.
- Nothing is pinned beyond its deadline: whoever owns this calls `expire` at `next_deadline`, and every
  call of a peer does so first. All promises are made for the same time: they end in the order in which they were made.
- A promise may end under a READ. That is helped to its end nevertheless, or the peer would wait for it, and is not
  confirmed.
- What is promised is bounded: rows for all peers together, rows and promises for each, so that none takes all.
- Only keys in `shared` are promised. A lease would pin whatever is resident, and not all of it may leave (D5).

No I/O; one thread owns it. The leases themselves may be taken and released on any thread.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import Lease, RowLeases
from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.tiers.p2p.messages import (
    EPOCH_BYTES,
    MAX_READ_PARTS,
    Confirm,
    Fetch,
    Found,
    Lookup,
    Reading,
    Reason,
    Refuse,
)

MAX_GAPS = 8  # runs of resident keys that one question is answered with
READ_ON_SECONDS = 1.0  # after the end of a promise, for the READs that were under way

PeerId = bytes
"""Whom a promise was given to: one session."""


class PromisedRow(NamedTuple):
    """One part of a promise: send row `row`, which holds the chunk `key`. `version`: see `Lease`."""

    part: int
    key: OffloadKey
    row: int
    version: int


HasProof = Callable[[PromisedRow], bool]
"""Whether it takes no work to prove a row."""


class ToProve(NamedTuple):
    """Rows that a peer reads, and what to prove them for."""

    peer: PeerId
    request: int
    round: int
    rows: list[PromisedRow]


class _PromiseId(NamedTuple):
    peer: PeerId
    request: int
    round: int


@dataclass(slots=True)
class _Promise:
    leases: list[Lease]
    parts: dict[int, PromisedRow]  # all that was promised; the leases' rows
    deadline: float
    handed_out: set[int] = field(default_factory=set)  # of `parts`
    reading: set[int] = field(default_factory=set)  # of `handed_out`: the peer reads them, and has not said that it did
    done: set[int] = field(default_factory=set)  # of `handed_out`: sent or confirmed; not all of `parts`
    unproved: dict[int, None] = field(default_factory=dict)  # of `reading`, in the order of the peer's messages
    expected: dict[int, None] = field(default_factory=dict)  # not handed out, and will be read by a peer that reads


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
        # Parts that peers are reading, of all open promises; and when (clock) the last READ of what has ended is over.
        self.num_reading = 0
        self._reads_until = -inf
        # Open promises with parts that are read and need our help.
        self._helped: set[_PromiseId] = set()
        # Open promises with parts to prove, in the order in which that became so.
        self._unproved: dict[_PromiseId, None] = {}
        # Peers that have read something, and are there; and their open promises, oldest first, with expected parts.
        self._readers: set[PeerId] = set()
        self._expected: dict[_PromiseId, None] = {}
        self.num_expired = 0  # promises that reached their deadline, since the start

    def __len__(self) -> int:
        return len(self._open)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        return next((promise.deadline for promise in self._open.values()), None)

    def make(self, peer: PeerId, lookup: Lookup) -> Found | Refuse:
        """Promise those of the keys that are resident and may leave.

        A round that is asked again loses its older promise.
        """
        self.expire()
        self._end(_PromiseId(peer, lookup.request, lookup.round))
        limits = self._limits
        room = min(limits.rows - self.num_rows, limits.rows_a_peer - self._rows_of.get(peer, 0))
        if room <= 0 or self._promises_of[peer] >= limits.promises_a_peer:
            return Refuse(lookup.request, lookup.round, Reason.BUSY)
        leases, parts = self._pin(lookup.keys, room)
        if parts:
            identity = _PromiseId(peer, lookup.request, lookup.round)
            promise = self._open[identity] = _Promise(leases, parts, self._clock() + limits.seconds)
            if peer in self._readers:
                promise.expected = dict.fromkeys(parts)
                self._expected[identity] = None
            self._promises_of[peer] += 1
            self._rows_of[peer] += len(parts)
            self.num_rows += len(parts)
        rows = tuple(part.row for part in parts.values())
        return Found(lookup.request, lookup.round, self.epoch, tuple(parts), limits.seconds, rows)

    def _pin(self, keys: Sequence[bytes], room: int) -> tuple[list[Lease], dict[int, PromisedRow]]:
        """Lease what is there, up to `room` rows.

        A lease ends at the first key that is not resident. Few keys that were offered are not, so the rest is tried
        again, at most MAX_GAPS times.
        """
        wanted = [(part, OffloadKey(key)) for part, key in enumerate(keys) if key in self._shared]
        leases: list[Lease] = []
        parts: dict[int, PromisedRow] = {}
        for _ in range(MAX_GAPS):
            wanted = wanted[: room - len(parts)]
            if not wanted:
                break
            lease = self._leases.lease([key for _, key in wanted])
            if lease.keys:
                leases.append(lease)
            for (part, key), row, version in zip(wanted, lease.block_ids, lease.versions, strict=False):
                parts[part] = PromisedRow(part, key, row, version)
            wanted = wanted[len(lease.keys) + 1 :]
        return leases, parts

    def fetch(self, peer: PeerId, fetch: Fetch) -> list[PromisedRow] | Refuse:
        """The rows of all these parts, or why there is none. Call `done` for each part whose bytes were copied."""
        return self._hand_out(peer, fetch)

    def begin_reading(self, peer: PeerId, reading: Reading) -> Refuse | None:
        """The peer reads these parts; why it may not."""
        rows = self._hand_out(peer, reading)
        if isinstance(rows, Refuse):
            return rows
        identity = _PromiseId(peer, reading.request, reading.round)
        promise = self._open[identity]
        self._readers.add(peer)
        promise.reading.update(reading.parts)
        promise.unproved.update(dict.fromkeys(reading.parts))
        if not reading.alone:
            self._helped.add(identity)
        self._unproved[identity] = None
        self.num_reading += len(reading.parts)
        return None

    @property
    def are_read(self) -> bool:
        """Whether peers read."""
        return self.num_reading > 0 or self.needs_help

    @property
    def needs_help(self) -> bool:
        """Whether a peer reads what it cannot read alone."""
        return bool(self._helped) or self._clock() < self._reads_until

    def next_to_prove(self, at_once: int, has_proof: HasProof) -> ToProve | None:
        """Some rows that a peer reads, at most `at_once` of those that take work; promises take turns."""
        self.expire()
        identity = next(iter(self._unproved), None)
        if identity is None:
            return None
        promise = self._open[identity]
        some = _leading((promise.parts[part] for part in promise.unproved), at_once, has_proof)
        rows = self._take_unproved(identity, [row.part for row in some])
        if identity in self._unproved:
            del self._unproved[identity]
            self._unproved[identity] = None
        return ToProve(*identity, rows)

    def next_expected(self, at_once: int, has_proof: HasProof) -> list[PromisedRow]:
        """Some rows that a peer will read, if it goes on as it has, at most `at_once` of those that take work; each
        once."""
        self.expire()
        identity = next(iter(self._expected), None)
        if identity is None:
            return []
        promise = self._open[identity]
        some = _leading((promise.parts[part] for part in promise.expected), at_once, has_proof)
        self._take_expected(identity, [row.part for row in some])
        return some

    def _take_expected(self, identity: _PromiseId, parts: Iterable[int]) -> None:
        expected = self._open[identity].expected
        for part in parts:
            expected.pop(part, None)
        if not expected:
            self._expected.pop(identity, None)

    def _take_unproved(self, identity: _PromiseId, parts: Collection[int]) -> list[PromisedRow]:
        """Those of the parts that were not proved yet; they count as proved from now on."""
        promise = self._open[identity]
        rows = [promise.parts[part] for part in parts if part in promise.unproved]
        for row in rows:
            del promise.unproved[row.part]
        if not promise.unproved:
            self._unproved.pop(identity, None)
        return rows

    def confirm(self, peer: PeerId, confirm: Confirm) -> list[PromisedRow] | Refuse:
        """The peer has read these parts and its promise holds. What is still to be proved of them, before `done`."""
        self.expire()
        identity = _PromiseId(peer, confirm.request, confirm.round)
        promise = self._open.get(identity)
        reason = self._objection(promise, confirm)
        if promise is not None and reason is None and not promise.reading >= set(confirm.parts):
            reason = Reason.RANGE
        if promise is None or reason is not None:
            return Refuse(confirm.request, confirm.round, reason or Reason.GONE)
        promise.reading.difference_update(confirm.parts)
        if not promise.reading:
            self._helped.discard(identity)
        self.num_reading -= len(confirm.parts)
        return self._take_unproved(identity, confirm.parts)

    def _hand_out(self, peer: PeerId, wanted: Fetch | Reading) -> list[PromisedRow] | Refuse:
        self.expire()
        identity = _PromiseId(peer, wanted.request, wanted.round)
        promise = self._open.get(identity)
        reason = self._objection(promise, wanted)
        if promise is not None and reason is None and not promise.handed_out.isdisjoint(wanted.parts):
            reason = Reason.REPLAYED
        if promise is None or reason is not None:
            return Refuse(wanted.request, wanted.round, reason or Reason.GONE)
        promise.handed_out.update(wanted.parts)
        self._take_expected(identity, wanted.parts)
        return [promise.parts[part] for part in wanted.parts]

    def _objection(self, promise: _Promise | None, wanted: Fetch | Reading | Confirm) -> Reason | None:
        if wanted.epoch != self.epoch:
            return Reason.STALE
        if promise is None:
            return Reason.GONE
        if not promise.parts.keys() >= set(wanted.parts):
            return Reason.RANGE
        if len(set(wanted.parts)) != len(wanted.parts):
            return Reason.REPLAYED
        return None

    def holder(self, peer: PeerId, request: int, round_: int) -> Callable[[], bool]:
        """A function that tells whether the promise, if there is one now, still holds."""
        identity = _PromiseId(peer, request, round_)
        promise = self._open.get(identity)
        return lambda: promise is not None and self._open.get(identity) is promise

    def done(self, peer: PeerId, request: int, round_: int, parts: Collection[int]) -> None:
        """Nobody reads the rows of these parts any more: a promise without open parts ends."""
        identity = _PromiseId(peer, request, round_)
        promise = self._open.get(identity)
        if promise is None:
            return
        promise.done.update(parts)
        if len(promise.done) == len(promise.parts):
            self._end(identity)

    def release(self, peer: PeerId, request: int, round_: int) -> None:
        """The peer wants nothing more of this round."""
        self._end(_PromiseId(peer, request, round_))

    def drop_peer(self, peer: PeerId) -> None:
        """The peer is gone."""
        self._readers.discard(peer)
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
        if identity in self._helped:
            self._reads_until = self._clock() + READ_ON_SECONDS
        self._unproved.pop(identity, None)
        self._expected.pop(identity, None)
        self._helped.discard(identity)
        self.num_rows -= len(promise.parts)
        self.num_reading -= len(promise.reading)
        self._rows_of[identity.peer] -= len(promise.parts)
        self._promises_of[identity.peer] -= 1
        if not self._promises_of[identity.peer]:
            del self._promises_of[identity.peer], self._rows_of[identity.peer]
        for lease in promise.leases:
            self._leases.release(lease)

    def check(self) -> None:
        """Assert the invariants beside the declarations. For tests."""
        promises = list(self._open.values())
        assert self.num_rows == sum(len(promise.parts) for promise in promises) <= self._limits.rows
        assert [promise.deadline for promise in promises] == sorted(promise.deadline for promise in promises)
        assert Counter(identity.peer for identity in self._open) == self._promises_of
        assert all(0 < rows <= self._limits.rows_a_peer for rows in self._rows_of.values())
        assert self._rows_of.total() == self.num_rows
        assert self.num_reading == sum(len(promise.reading) for promise in promises)
        for promise in promises:
            assert promise.done < promise.parts.keys()
            assert promise.handed_out <= promise.parts.keys()
            assert promise.handed_out >= promise.done | promise.reading
            assert promise.done.isdisjoint(promise.reading)
            assert promise.unproved.keys() <= promise.reading
            assert promise.expected.keys() <= promise.parts.keys() - promise.handed_out
        assert self._helped <= {identity for identity, promise in self._open.items() if promise.reading}
        assert self._unproved.keys() == {identity for identity, promise in self._open.items() if promise.unproved}
        assert self._expected.keys() == {identity for identity, promise in self._open.items() if promise.expected}
        assert {identity.peer for identity in self._expected} <= self._readers


def _leading(rows: Iterable[PromisedRow], at_once: int, has_proof: HasProof) -> list[PromisedRow]:
    """At most `at_once` of those that take work, and MAX_READ_PARTS of all; at least one, if there is one."""
    some: list[PromisedRow] = []
    for row in rows:
        at_once -= not has_proof(row)
        if some and (at_once < 0 or len(some) == MAX_READ_PARTS):
            break
        some.append(row)
    return some
