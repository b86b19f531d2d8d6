"""The puller's side of the conversation: what happens comes in, what to do goes out. No I/O, one thread.

A peer:

    closed --something to ask--> greeting --Welcome--> ready --NO_HELLO (it has forgotten us)--> greeting
       ^                            |                    |
       +------- failed: lost, silent, late, mismatched, malformed, too many strikes (retry after a backoff) ------+

- A question is put to all its peers at once. It is answered when one has everything, when all have answered, or at its
  deadline; the best answer counts, and what the others promised is released.
- A row is asked for by a Fetch and ends once: verified and copied, corrupt, refused, or failed with its peer or at its
  deadline. Bytes go into a row only while it is expected, and only after they were verified: a late or wrong Data
  touches nothing. A job ends with its last row.
- While a peer owes us something it has to say something: after half of `silence` it is pinged, after all of it it
  fails. A peer that fails fails with all it owes at once, and so do other ports of its host that gave the same engine's
  name, because all ports of a dead engine are dead (case 55). Nothing is asked of it until its backoff is over.
- (request, round) is one question. Rounds have nothing to do with each other (case 58).
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple, TypeAlias

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.tiers.p2p.messages import (
    MAX_PARTS,
    Answer,
    Buffer,
    Data,
    Fetch,
    Found,
    Hello,
    Lookup,
    MessageError,
    Ping,
    Pong,
    Question,
    Reason,
    Refuse,
    Release,
    Welcome,
    decode_answer,
)

WINDOW = MAX_PARTS  # rows that one peer owes us at a time: a server drops whoever has more in its queue
MAX_STRIKES = 3
FIRST_BACKOFF = 0.5
LAST_BACKOFF = 30.0

_SESSION = 0  # the request of a Refuse that means the whole session


class Address(NamedTuple):
    """Where a peer listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Source(NamedTuple):
    """Where a key can be fetched: one part of what a peer has promised, until `expires` (clock)."""

    address: Address
    request: int
    round: int
    part: int
    epoch: bytes
    expires: float


class Wanted(NamedTuple):
    """One row of a job."""

    key: OffloadKey
    row: int
    source: Source


# ---- instructions --------------------------------------------------------------------------------------------------


class Connect(NamedTuple):
    """Make a fresh connection to the peer."""

    address: Address


class Disconnect(NamedTuple):
    """Drop the connection, and what is queued for it."""

    address: Address


class Say(NamedTuple):
    """Send this to the peer."""

    address: Address
    message: Question


class Answered(NamedTuple):
    """The question (request, round) is answered: where each key is that somebody has."""

    request: int
    round: int
    found: dict[OffloadKey, Source]


class JobEnded(NamedTuple):
    """The job's one result. `corrupt` are keys whose bytes were wrong."""

    job_id: int
    good: tuple[OffloadKey, ...]
    corrupt: tuple[OffloadKey, ...]


Instruction: TypeAlias = Connect | Disconnect | Say | Answered | JobEnded

AcceptRow: TypeAlias = Callable[[OffloadKey, int, Buffer, Buffer], bool]
"""(key, row, frame header, payload) -> whether the bytes are right; then, and only then, they are in the row."""


# ---- state ---------------------------------------------------------------------------------------------------------


class Phase(Enum):
    """How far the conversation with a peer is."""

    CLOSED = "closed"
    GREETING = "greeting"
    READY = "ready"


_RoundId: TypeAlias = tuple[int, int]
_PartId: TypeAlias = tuple[int, int, int]


@dataclass(slots=True)
class _Peer:
    address: Address
    phase: Phase = Phase.CLOSED
    engine_id: str = ""  # what it called itself last
    strikes: int = 0  # failures in a row
    retry_at: float = -inf
    quiet_since: float = inf  # since it owes us something and says nothing; inf while it owes nothing
    pinged: bool = False  # since then
    asked: set[_RoundId] = field(default_factory=set)  # questions that it has not answered
    owed: dict[_PartId, "_Row"] = field(default_factory=dict)  # rows asked for; at most WINDOW
    queue: deque["_Row"] = field(default_factory=deque)  # rows to be asked for; empty unless READY

    @property
    def owes(self) -> bool:
        return bool(self.asked or self.owed)


@dataclass(slots=True)
class _QuestionState:
    request: int
    round: int
    keys: tuple[OffloadKey, ...]
    asked_at: float
    deadline: float
    waiting: set[Address] = field(default_factory=set)  # peers that have not answered; each has it in `asked`
    best: tuple[Address, Found] | None = None


@dataclass(slots=True)
class _Promise:
    """What a peer has promised for a round that was answered. It is released when nobody wants it any more."""

    address: Address
    rows: int = 0  # of jobs in flight
    wanted: bool = True  # the request has not finished


@dataclass(slots=True, eq=False)
class _Row:
    job: "_Job"
    wanted: Wanted

    @property
    def part_id(self) -> _PartId:
        source = self.wanted.source
        return source.request, source.round, source.part


@dataclass(slots=True, eq=False)
class _Job:
    job_id: int
    deadline: float
    open: int
    good: list[OffloadKey] = field(default_factory=list)
    corrupt: list[OffloadKey] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PullTimes:
    """Seconds: for a lookup, for a job's rows, and how long a peer that owes something may say nothing."""

    lookup: float
    pull: float
    silence: float


class Pulling:
    """Everything that this engine asks of its peers. Each method returns the instructions that follow."""

    def __init__(
        self,
        addresses: Collection[Address],
        hello: Hello,
        accept: AcceptRow,
        times: PullTimes,
        *,
        clock: Clock = monotonic,
    ) -> None:
        self._hello = hello
        self._accept = accept
        self._times = times
        self._clock = clock
        self._peers = {address: _Peer(address) for address in addresses}
        # Questions without an answer.
        self._questions: dict[_RoundId, _QuestionState] = {}
        # Rounds that somebody has promised something for, until they are released or their peer fails.
        self._promises: dict[_RoundId, _Promise] = {}
        # Jobs with open rows; each open row is in the `owed` or the `queue` of exactly one peer.
        self._jobs: dict[int, _Job] = {}
        self._out: list[Instruction] = []
        self.failures: Counter[tuple[Address, str]] = Counter()
        self.num_bytes = 0

    # ---- what the tier wants -----------------------------------------------------------------------------------

    def ask(
        self, request: int, round_: int, keys: Sequence[OffloadKey], addresses: Collection[Address]
    ) -> list[Instruction]:
        """Who of these peers has these keys?"""
        now = self._clock()
        question = _QuestionState(request, round_, tuple(keys), now, now + self._times.lookup)
        self._questions[request, round_] = question
        for address in addresses:
            peer = self._peers.get(address)
            if peer is None or now < peer.retry_at:
                continue
            question.waiting.add(address)
            self._begin_to_owe(peer)
            peer.asked.add((request, round_))
            if peer.phase is Phase.CLOSED:
                self._out.append(Connect(address))
                self._greet(peer)
            elif peer.phase is Phase.READY:
                self._say(peer, Lookup(request, round_, question.keys))
        if not question.waiting:
            self._conclude(question)
        return self._take()

    def pull(self, job_id: int, rows: Sequence[Wanted]) -> list[Instruction]:
        """Fetch these rows. Those whose peer or promise is gone fail at once."""
        now = self._clock()
        job = self._jobs[job_id] = _Job(job_id, now + self._times.pull, len(rows))
        peers: dict[Address, _Peer] = {}
        for wanted in rows:
            source, row = wanted.source, _Row(job, wanted)
            promise = self._promises.get((source.request, source.round))
            peer = self._peers[source.address]
            if promise is None or peer.phase is not Phase.READY or now >= source.expires:
                self._end_row(row)
                continue
            promise.rows += 1
            peer.queue.append(row)
            peers[peer.address] = peer
        for peer in peers.values():
            self._fetch_more(peer)
        self._end_job_if_over(job)
        return self._take()

    def finish(self, request: int) -> list[Instruction]:
        """The request is over: nothing more of what was promised for it will be asked for."""
        for round_id in [round_id for round_id in self._questions if round_id[0] == request]:
            self._conclude(self._questions[round_id])
        for round_id in [round_id for round_id in self._promises if round_id[0] == request]:
            self._promises[round_id].wanted = False
            self._release_if_unwanted(round_id)
        return self._take()

    def forget(self) -> list[Instruction]:
        """Every question is answered, every job ends, every promise is released. Nothing that still comes counts."""
        for question in list(self._questions.values()):
            self._conclude(question)
        for peer in self._peers.values():
            for row in [*peer.owed.values(), *peer.queue]:
                self._end_promised_row(row)
            peer.owed.clear()
            peer.queue.clear()
            self._settle_debt(peer)
        for round_id, promise in list(self._promises.items()):
            promise.wanted = False
            self._release_if_unwanted(round_id)
        return self._take()

    # ---- what happens ------------------------------------------------------------------------------------------

    def heard(self, address: Address, parts: Sequence[Buffer]) -> list[Instruction]:
        """The peer said something."""
        peer = self._peers[address]
        if peer.phase is Phase.CLOSED:
            return self._take()
        try:
            answer = decode_answer(parts)
            if peer.owes:
                peer.quiet_since, peer.pinged = self._clock(), False
            self._take_in(peer, answer, parts[1:])
        except MessageError:
            self._fail(peer, "malformed")
        return self._take()

    def lost(self, address: Address) -> list[Instruction]:
        """The connection is gone, or never came about."""
        peer = self._peers[address]
        if peer.phase is not Phase.CLOSED:
            self._fail(peer, "lost")
        return self._take()

    def tick(self) -> list[Instruction]:
        """Time has passed."""
        now = self._clock()
        for question in [question for question in self._questions.values() if question.deadline <= now]:
            if question.waiting:  # else a peer that failed just now has ended it
                self._give_up_waiting(question)
        for job in [job for job in self._jobs.values() if job.deadline <= now]:
            self._time_out(job)
        for peer in self._peers.values():
            if now - peer.quiet_since >= self._times.silence:
                self._fail(peer, "silent")
            elif peer.phase is Phase.READY and not peer.pinged and now >= peer.quiet_since + self._times.silence / 2:
                peer.pinged = True
                self._say(peer, Ping(0))
        return self._take()

    @property
    def next_timer(self) -> float | None:
        """When (clock) `tick` has something to do."""
        return min(self._timers(), default=None)

    def _timers(self) -> Iterator[float]:
        yield from (question.deadline for question in self._questions.values())
        yield from (job.deadline for job in self._jobs.values())
        silence = self._times.silence
        for peer in self._peers.values():
            if peer.quiet_since != inf:
                pings = peer.phase is Phase.READY and not peer.pinged
                yield peer.quiet_since + (silence / 2 if pings else silence)

    # ---- answers -----------------------------------------------------------------------------------------------

    def _take_in(self, peer: _Peer, answer: Answer, behind: Sequence[Buffer]) -> None:
        match answer:
            case Welcome():
                self._on_welcome(peer, answer)
            case Found():
                self._on_found(peer, answer)
            case Data():
                self._on_data(peer, answer, behind)
            case Refuse():
                self._on_refuse(peer, answer)
            case Pong():
                pass

    def _on_welcome(self, peer: _Peer, welcome: Welcome) -> None:
        if peer.phase is not Phase.GREETING:
            raise MessageError("a Welcome that nobody asked for")
        peer.phase, peer.engine_id = Phase.READY, welcome.engine_id
        for request, round_ in sorted(peer.asked):
            self._say(peer, Lookup(request, round_, self._questions[request, round_].keys))

    def _on_found(self, peer: _Peer, found: Found) -> None:
        round_id = found.request, found.round
        question = self._questions.get(round_id)
        if question is None or peer.address not in question.waiting:
            # Too late, or somebody else had everything. The winner's promise is not this one's.
            if found.parts:
                self._say(peer, Release(*round_id))
            self._no_longer_asked(peer, round_id)
            return
        if found.parts and max(found.parts) >= len(question.keys):
            raise MessageError("a promise of keys that nobody asked for")
        peer.strikes = 0
        question.waiting.discard(peer.address)
        self._no_longer_asked(peer, round_id)
        loser: tuple[Address, Found] | None = peer.address, found
        if question.best is None or _worth(found) > _worth(question.best[1]):
            question.best, loser = (peer.address, found), question.best
        if loser is not None and loser[1].parts:
            self._say(self._peers[loser[0]], Release(*round_id))
        if not question.waiting or len(question.best[1].parts) == len(question.keys):
            self._conclude(question)

    def _on_data(self, peer: _Peer, data: Data, behind: Sequence[Buffer]) -> None:
        row = peer.owed.pop((data.request, data.round, data.part), None)
        if row is None:
            return
        header, payload = behind
        if self._accept(row.wanted.key, row.wanted.row, header, payload):
            peer.strikes = 0
            self.num_bytes += len(header) + len(payload)
            row.job.good.append(row.wanted.key)
        else:
            row.job.corrupt.append(row.wanted.key)
            self._strike(peer, "corrupt")
        self._end_promised_row(row)
        if len(peer.owed) <= WINDOW // 2:
            self._fetch_more(peer)
        self._settle_debt(peer)

    def _on_refuse(self, peer: _Peer, refuse: Refuse) -> None:
        if refuse.request == _SESSION:
            if refuse.reason is Reason.NO_HELLO:
                self._on_forgotten(peer)
                return
            self._fail(peer, refuse.reason.value, backoff=LAST_BACKOFF if refuse.reason in _HOPELESS else None)
            return
        round_id = refuse.request, refuse.round
        self.failures[peer.address, refuse.reason.value] += 1
        question = self._questions.get(round_id)
        if question is not None and peer.address in question.waiting:
            question.waiting.discard(peer.address)
            if not question.waiting:
                self._conclude(question)
        self._no_longer_asked(peer, round_id)
        self._fail_rows(peer, round_id)

    def _on_forgotten(self, peer: _Peer) -> None:
        """It was reset, or made room. What is asked is asked again after its Welcome.

        While greeting, this answers something that was said before the greeting.
        """
        if peer.phase is Phase.READY:
            self._fail_rows(peer)
            self._drop_promises(peer)
            self._greet(peer)

    # ---- ends --------------------------------------------------------------------------------------------------

    def _conclude(self, question: _QuestionState) -> None:
        """The answer that there is by now."""
        round_id = question.request, question.round
        del self._questions[round_id]
        for address in question.waiting:
            self._no_longer_asked(self._peers[address], round_id)
        found: dict[OffloadKey, Source] = {}
        if question.best is not None and question.best[1].parts:
            address, best = question.best
            self._promises[round_id] = _Promise(address)
            expires = question.asked_at + best.seconds
            found = {question.keys[part]: Source(address, *round_id, part, best.epoch, expires) for part in best.parts}
        self._out.append(Answered(*round_id, found))

    def _give_up_waiting(self, question: _QuestionState) -> None:
        """At the deadline. A peer that could not even be greeted in that time is not there."""
        late = [self._peers[address] for address in question.waiting]
        self._conclude(question)
        for peer in late:
            if peer.phase is Phase.GREETING:
                self._fail(peer, "unreachable")
            else:
                self._strike(peer, "late")

    def _time_out(self, job: _Job) -> None:
        """Its peers had their time, and fail with all that they owe."""
        for peer in self._peers.values():
            if any(row.job is job for row in [*peer.owed.values(), *peer.queue]):
                self._fail(peer, "late")

    def _strike(self, peer: _Peer, why: str) -> None:
        self.failures[peer.address, why] += 1
        peer.strikes += 1
        if peer.strikes >= MAX_STRIKES and peer.phase is not Phase.CLOSED:
            self._close(peer, None)

    def _fail(self, peer: _Peer, why: str, backoff: float | None = None) -> None:
        """The peer is not asked for a while, nor are other ports of the same engine."""
        failed = [peer, *self._other_ports(peer)]
        for one in failed:
            self.failures[one.address, why] += 1
            one.strikes += 1
            self._close(one, backoff)

    def _other_ports(self, peer: _Peer) -> list[_Peer]:
        """On the same host and by the same name: anybody could call himself like an engine on another host."""
        if peer.phase is not Phase.READY or not peer.engine_id:
            return []
        return [
            other
            for other in self._peers.values()
            if other is not peer
            and other.phase is not Phase.CLOSED
            and (other.address.host, other.engine_id) == (peer.address.host, peer.engine_id)
        ]

    def _close(self, peer: _Peer, backoff: float | None) -> None:
        peer.phase = Phase.CLOSED
        if backoff is None:
            backoff = min(LAST_BACKOFF, FIRST_BACKOFF * 2 ** min(peer.strikes - 1, 10))
        peer.retry_at = self._clock() + backoff
        self._out.append(Disconnect(peer.address))
        self._fail_rows(peer)
        self._drop_promises(peer)
        for question in [self._questions[round_id] for round_id in peer.asked if round_id in self._questions]:
            question.waiting.discard(peer.address)
            if not question.waiting:
                self._conclude(question)
        for question in self._questions.values():
            if question.best is not None and question.best[0] == peer.address:
                question.best = None
        peer.asked.clear()
        self._settle_debt(peer)

    def _drop_promises(self, peer: _Peer) -> None:
        """It does not remember them. Called when none of its rows is open."""
        self._promises = {
            round_id: promise for round_id, promise in self._promises.items() if promise.address != peer.address
        }

    def _fail_rows(self, peer: _Peer, round_id: _RoundId | None = None) -> None:
        """Of one round, or all."""
        rows = [row for row in [*peer.owed.values(), *peer.queue] if round_id in (None, row.part_id[:2])]
        gone = set(map(id, rows))
        peer.owed = {part_id: row for part_id, row in peer.owed.items() if id(row) not in gone}
        peer.queue = deque(row for row in peer.queue if id(row) not in gone)
        for row in rows:
            self._end_promised_row(row)
        if peer.phase is Phase.READY:
            self._fetch_more(peer)
        self._settle_debt(peer)

    def _end_promised_row(self, row: _Row) -> None:
        round_id = row.part_id[:2]
        promise = self._promises.get(round_id)
        if promise is not None:
            promise.rows -= 1
            self._release_if_unwanted(round_id)
        self._end_row(row)
        self._end_job_if_over(row.job)

    def _end_row(self, row: _Row) -> None:
        row.job.open -= 1

    def _end_job_if_over(self, job: _Job) -> None:
        if not job.open and self._jobs.pop(job.job_id, None) is not None:
            self._out.append(JobEnded(job.job_id, tuple(job.good), tuple(job.corrupt)))

    def _release_if_unwanted(self, round_id: _RoundId) -> None:
        promise = self._promises[round_id]
        if promise.wanted or promise.rows:
            return
        del self._promises[round_id]
        peer = self._peers[promise.address]
        if peer.phase is Phase.READY:
            self._say(peer, Release(*round_id))

    # ---- small parts -------------------------------------------------------------------------------------------

    def _greet(self, peer: _Peer) -> None:
        peer.phase = Phase.GREETING
        self._say(peer, self._hello)

    def _fetch_more(self, peer: _Peer) -> None:
        """Ask for as many queued rows as the window allows: one Fetch for each run of one round."""
        batch: list[_Row] = []
        while peer.queue and len(peer.owed) < WINDOW:
            row = peer.queue.popleft()
            if batch and batch[0].part_id[:2] != row.part_id[:2]:
                self._say_fetch(peer, batch)
                batch = []
            self._begin_to_owe(peer)
            peer.owed[row.part_id] = row
            batch.append(row)
        if batch:
            self._say_fetch(peer, batch)

    def _say_fetch(self, peer: _Peer, batch: Sequence[_Row]) -> None:
        source = batch[0].wanted.source
        parts = tuple(row.wanted.source.part for row in batch)
        self._say(peer, Fetch(source.request, source.round, source.epoch, parts))

    def _begin_to_owe(self, peer: _Peer) -> None:
        if not peer.owes:
            peer.quiet_since, peer.pinged = self._clock(), False

    def _no_longer_asked(self, peer: _Peer, round_id: _RoundId) -> None:
        peer.asked.discard(round_id)
        self._settle_debt(peer)

    def _settle_debt(self, peer: _Peer) -> None:
        if not peer.owes:
            peer.quiet_since, peer.pinged = inf, False

    def _say(self, peer: _Peer, message: Question) -> None:
        self._out.append(Say(peer.address, message))

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    # ---- for telling and for tests -----------------------------------------------------------------------------

    @property
    def peers_up(self) -> int:
        """Peers that have welcomed us and did not fail since."""
        return sum(peer.phase is Phase.READY for peer in self._peers.values())

    def leftovers(self) -> dict[str, int]:
        """What is empty when nothing is going on, by name."""
        peers = self._peers.values()
        return {
            "questions": len(self._questions),
            "jobs": len(self._jobs),
            "promises": len(self._promises),
            "asked": sum(len(peer.asked) for peer in peers),
            "rows": sum(len(peer.owed) + len(peer.queue) for peer in peers),
        }

    def check(self) -> None:
        """Assert the invariants beside the declarations. For tests."""
        rows = [row for peer in self._peers.values() for row in [*peer.owed.values(), *peer.queue]]
        assert Counter(id(row.job) for row in rows) == Counter({id(j): j.open for j in self._jobs.values() if j.open})
        assert all(job.open for job in self._jobs.values())
        for round_id, promise in self._promises.items():
            assert promise.wanted or promise.rows
            assert promise.rows == sum(row.part_id[:2] == round_id for row in rows)
        for peer in self._peers.values():
            assert len(peer.owed) <= WINDOW
            assert peer.phase is Phase.READY or not (peer.owed or peer.queue)
            assert peer.phase is not Phase.CLOSED or not peer.asked
            assert peer.owes == (peer.quiet_since != inf)
            assert peer.asked == {q for q, question in self._questions.items() if peer.address in question.waiting}
        for question in self._questions.values():
            assert question.waiting


_HOPELESS = {Reason.VERSION, Reason.FINGERPRINT, Reason.GEOMETRY, Reason.NOT_ALLOWED}


def _worth(found: Found) -> tuple[int, int]:
    """How long the prefix is that a peer has, then how many keys."""
    leading = 0
    for part in sorted(found.parts):
        if part != leading:
            break
        leading += 1
    return leading, len(found.parts)
