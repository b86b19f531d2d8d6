"""The rows that jobs want, and the promises that they use. No I/O.

    queued --window has room--> owed --Data and its payload: verified, copied-------------------> ended
                                 |  +--Data, its payload gets into the row--> landing --verified----^
                                 |                                                                  |
                                 +--Reading, where the peer's memory can be read--> landing         |
                                       --Confirm--> owed --Confirmed, after its Proofs: verified----+

- A row ends once: verified, corrupt, refused, or failed with its peer or at its deadline. A job ends with its last row.
- A row that is landing ends only when it has landed, or when its peer is disconnected: whoever has the row next would
  find somebody else's bytes in it. What was to end before is `dropped`, and ends then.
- Rows count when they were verified, and those that were read out of a peer's memory when the peer has confirmed that
  its promise held until they were there.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from vllm_tiered_offload.contract.seams import Clock
from vllm_tiered_offload.tiers.block_frame import PayloadChecksum
from vllm_tiered_offload.tiers.p2p.instructions import (
    Address,
    Instruction,
    JobEnded,
    LandedRow,
    PartId,
    Read,
    RoundId,
    Say,
    Verifier,
    Wanted,
)
from vllm_tiered_offload.tiers.p2p.messages import (
    MAX_PARTS,
    MAX_READ_PARTS,
    Buffer,
    Confirm,
    Confirmed,
    Data,
    Fetch,
    MessageError,
    Proofs,
    Reading,
    Release,
)
from vllm_tiered_offload.tiers.p2p.peers import Job, Peer, Phase, Row

WINDOW = MAX_PARTS  # rows that one peer owes us at a time: a server drops whoever has more in its queue


@dataclass(slots=True)
class _Promise:
    """What a peer has promised for a round that was answered. It is released when nobody wants it any more."""

    address: Address
    rows: int = 0  # of jobs in flight
    wanted: bool = True  # the request has not finished


class Transfers:
    """All jobs that have no result. What follows from a call is appended to `out`."""

    def __init__(
        self,
        peers: dict[Address, Peer],
        seconds: float,
        verifier: Verifier,
        strike: Callable[[Peer, str], None],
        out: Callable[[Instruction], None],
        clock: Clock,
        read_window: int = WINDOW,
    ) -> None:
        """`read_window` are the rows that are read out of one peer's memory at a time."""
        self._peers = peers
        self._seconds = seconds
        self._verifier = verifier
        self._strike = strike
        self._out = out
        self._clock = clock
        self._read_window = read_window
        # Rounds that somebody has promised something for, until they are released or their peer fails.
        self._promises: dict[RoundId, _Promise] = {}
        # Jobs with open rows; each open row is in the `owed` or the `queue` of exactly one peer.
        self._jobs: dict[int, Job] = {}
        # For telling.
        self.rows_from: Counter[Address] = Counter()  # that were right
        self.failed_rows: Counter[str] = Counter()  # rows that did not come, by kind

    def promised(self, round_id: RoundId, address: Address) -> None:
        """The peer has promised something of this round."""
        self._promises[round_id] = _Promise(address)

    def pull(self, job_id: int, rows: Sequence[Wanted]) -> None:
        """Fetch these rows. Those whose peer or promise is gone fail at once."""
        now = self._clock()
        job = self._jobs[job_id] = Job(job_id, now + self._seconds, len(rows))
        peers: dict[Address, Peer] = {}
        for (address, request, round_), group in groupby(rows, lambda wanted: wanted.source[:3]):
            of_round = list(group)
            promise, peer = self._promises.get((request, round_)), self._peers[address]
            if promise is None or peer.phase is not Phase.READY or now >= of_round[0].source.expires:
                job.open -= len(of_round)
                continue
            promise.rows += len(of_round)
            peer.queue.extend(Row(job, wanted, wanted.part_id) for wanted in of_round)
            peers[address] = peer
        for peer in peers.values():
            self._fetch_more(peer)
        self._end_if_over(job)

    # ---- asking ------------------------------------------------------------------------------------------------

    def _fetch_more(self, peer: Peer) -> None:
        """Ask for as many queued rows as the window allows, once half of it is free, round by round."""
        window, owed = self._window(peer), len(peer.owed)
        if not peer.queue or owed > window // 2:
            return
        batch = [peer.queue.popleft() for _ in range(min(window - owed, len(peer.queue)))]
        peer.begin_to_owe_rows(batch, self._clock())
        for rows in _by_round(batch):
            self._ask_for(peer, rows)

    def _window(self, peer: Peer) -> int:
        return self._read_window if peer.can_read else WINDOW

    def _ask_for(self, peer: Peer, rows: Sequence[Row]) -> None:
        """These rows of one round."""
        source = rows[0].wanted.source
        promise = source.request, source.round, source.epoch
        if not peer.can_read or source.row is None:
            for parts in _parts(rows, MAX_PARTS):
                self._out(Say(peer.address, Fetch(*promise, parts)))
            return
        for row in rows:
            row.is_landing = row.is_read = True
        # The rows are promised: nothing is lost by reading before the peer has heard of it.
        self._out(Read(peer.address, tuple(row.wanted for row in rows)))
        for parts in _parts(rows, MAX_READ_PARTS):
            self._out(Say(peer.address, Reading(*promise, parts, peer.reads_alone)))

    # ---- bytes come --------------------------------------------------------------------------------------------

    def landing(self, peer: Peer, part_id: PartId) -> Wanted | None:
        """Whether the payload of this part may get into its row from now on."""
        row = peer.owed.get(part_id)
        if row is None or row.is_landing or row.is_read:
            return None
        row.is_landing = True
        return row.wanted

    def on_data(
        self, peer: Peer, data: Data, header: Buffer, payload: Buffer | None, checksum: PayloadChecksum | None
    ) -> None:
        """The part is there: in `payload`, or in its row, where `landing` had one for it, and then with a checksum."""
        [part] = data.parts  # transports tell of one at a time
        row = peer.owed.get((data.request, data.round, part))
        if row is None or row.is_read or (payload is None) != row.is_landing:
            return
        if row.dropped:
            self._end_rows(peer, [row])
        elif checksum is not None:
            self._end(peer, [(row, self._verifier.is_right(row.wanted, header, checksum))])
        elif payload is not None:
            self._end(peer, [(row, self._verifier.accept(row.wanted, header, payload))])
        self._fetch_more(peer)

    def on_landed(self, peer: Peer, landed: Sequence[LandedRow]) -> None:
        """These parts were read."""
        kept: list[Row] = []
        dropped: list[Row] = []
        for part_id, checksum in landed:
            row = peer.owed.get(part_id)
            if row is not None and row.is_landing:
                row.is_landing, row.checksum = False, checksum
                (dropped if row.dropped else kept).append(row)
        for rows in _by_round(kept):
            source = rows[0].wanted.source
            for parts in _parts(rows, MAX_READ_PARTS):
                self._out(Say(peer.address, Confirm(source.request, source.round, source.epoch, parts)))
        self._end_rows(peer, dropped)
        self._fetch_more(peer)

    def on_proofs(self, peer: Peer, proofs: Proofs) -> None:
        """What is to be in rows that are being read, or were."""
        if len(proofs.parts) != len(proofs.proofs):
            raise MessageError("proofs of other parts than it says")
        for part, proof in zip(proofs.parts, proofs.proofs, strict=True):
            row = peer.owed.get((proofs.request, proofs.round, part))
            if row is None:
                continue
            if not row.is_read or row.proof is not None:
                raise MessageError("a proof of what is not read, or the second one")
            row.proof = proof

    def on_confirmed(self, peer: Peer, confirmed: Confirmed) -> None:
        """The peer's promise of these parts held until they had been read."""
        if len(set(confirmed.parts)) < len(confirmed.parts):
            raise MessageError("a confirmation of the same part twice")
        verified: list[tuple[Row, bool]] = []
        for part in confirmed.parts:
            row = peer.owed.get((confirmed.request, confirmed.round, part))
            if row is None:
                continue
            if row.checksum is None or row.proof is None:
                raise MessageError("a confirmation of what was not read, or not proved")
            verified.append((row, self._verifier.is_right(row.wanted, row.proof, row.checksum)))
        self._end(peer, verified)
        self._fetch_more(peer)

    def _end(self, peer: Peer, verified: Sequence[tuple[Row, bool]]) -> None:
        """Rows, and whether they are right. A wrong one may be the end of its peer, and of all that it owes."""
        self._end_right(peer, [row for row, right in verified if right])
        for row in [row for row, right in verified if not right]:
            if peer.owed.get(row.part_id) is row:
                row.job.corrupt.append(row.wanted.key)
                self.failed_rows["corrupt"] += 1
                self._end_rows(peer, [row])
                self._strike(peer, "corrupt")

    def _end_right(self, peer: Peer, rows: Sequence[Row]) -> None:
        if rows:
            peer.strikes = 0
            self.rows_from[peer.address] += len(rows)
            for row in rows:
                row.job.good.append(row.wanted.key)
            self._end_rows(peer, rows)

    # ---- ends --------------------------------------------------------------------------------------------------

    def fail(self, peer: Peer, why: str, round_id: RoundId | None = None) -> None:
        """The rows of one round, or all. Those that are landing end later, unless the peer is disconnected by now."""
        rows = [row for row in peer.rows if round_id in (None, row.part_id[:2])]
        if rows:
            self.failed_rows[why] += len(rows)
        self._drop(peer, rows)
        self._fetch_more(peer)

    def _drop(self, peer: Peer, rows: Sequence[Row]) -> None:
        for row in rows:
            row.dropped = True
        closed = peer.phase is Phase.CLOSED
        self._end_rows(peer, [row for row in rows if closed or not row.is_landing])

    def _end_rows(self, peer: Peer, rows: Sequence[Row]) -> None:
        """Take them from their peer, their promises and their jobs."""
        for row in rows:
            if peer.owed.pop(row.part_id, None) is None:
                peer.queue.remove(row)
        for round_id, count in Counter(row.part_id[:2] for row in rows).items():
            promise = self._promises.get(round_id)
            if promise is not None:
                promise.rows -= count
                self._release_if_unwanted(round_id)
        for job, count in Counter(row.job for row in rows).items():
            job.open -= count
            self._end_if_over(job)
        peer.settle(self._clock())

    def _end_if_over(self, job: Job) -> None:
        if not job.open and self._jobs.pop(job.job_id, None) is not None:
            self._out(JobEnded(job.job_id, tuple(job.good), tuple(job.corrupt)))

    def finish(self, request: int) -> None:
        """Nothing more of what was promised for the request will be asked for."""
        for round_id in [round_id for round_id in self._promises if round_id[0] == request]:
            self._promises[round_id].wanted = False
            self._release_if_unwanted(round_id)

    def drop_all(self) -> None:
        """Every job ends, at once or as soon as nothing gets into its rows, and every promise with it."""
        for peer in self._peers.values():
            self._drop(peer, peer.rows)
        for request in {round_id[0] for round_id in self._promises}:
            self.finish(request)

    def forget_promises(self, peer: Peer) -> None:
        """The peer does not remember them."""
        self._promises = {
            round_id: promise for round_id, promise in self._promises.items() if promise.address != peer.address
        }

    def _release_if_unwanted(self, round_id: RoundId) -> None:
        promise = self._promises[round_id]
        if promise.wanted or promise.rows:
            return
        del self._promises[round_id]
        peer = self._peers[promise.address]
        if peer.phase is Phase.READY:
            self._out(Say(peer.address, Release(*round_id)))

    # ---- time --------------------------------------------------------------------------------------------------

    def late_peers(self) -> Iterator[Peer]:
        """Those that owe rows of a job whose time is over, one after the other: one may end others' rows."""
        now = self._clock()
        late = {job.job_id for job in self._jobs.values() if job.deadline <= now}
        if not late:
            return iter(())
        return (peer for peer in self._peers.values() if any(row.job.job_id in late for row in peer.rows))

    def deadlines(self) -> Iterator[float]:
        """Of all open jobs."""
        return (job.deadline for job in self._jobs.values())

    # ---- for tests ---------------------------------------------------------------------------------------------

    def leftovers(self) -> dict[str, int]:
        """What is empty when nothing is going on, by name."""
        rows = sum(len(peer.rows) for peer in self._peers.values())
        return {"jobs": len(self._jobs), "promises": len(self._promises), "rows": rows}

    def check(self) -> None:
        """Assert the invariants beside the declarations."""
        rows = [row for peer in self._peers.values() for row in peer.rows]
        assert Counter(id(row.job) for row in rows) == Counter({id(j): j.open for j in self._jobs.values() if j.open})
        assert all(job.open for job in self._jobs.values())
        for round_id, promise in self._promises.items():
            assert promise.wanted or promise.rows
            assert promise.rows == sum(row.part_id[:2] == round_id for row in rows)
        for peer in self._peers.values():
            assert len(peer.owed) <= max(WINDOW, self._read_window)
            assert not peer.queue or len(peer.owed) > self._window(peer) // 2
            assert all(row.is_landing for row in peer.owed.values() if row.dropped)
            assert not any(row.dropped or row.is_landing for row in peer.queue)


def _by_round(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows of one round each."""
    for _, group in groupby(rows, lambda row: row.part_id[:2]):
        yield list(group)


def _parts(rows: Sequence[Row], at_most: int) -> Iterator[tuple[int, ...]]:
    """What they are called, as many at a time as one message may tell of."""
    for first in range(0, len(rows), at_most):
        yield tuple(row.wanted.source.part for row in rows[first : first + at_most])
