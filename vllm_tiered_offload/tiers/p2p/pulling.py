"""The puller's side of the conversation: what happens comes in, what to do goes out. No I/O, one thread.

A peer:

    closed --something to ask--> greeting --Welcome--> ready --NO_HELLO (it has forgotten us)--> greeting
       ^                            |                    |
       +------- failed: lost, silent, late, mismatched, malformed, too many strikes (retry after a backoff) ------+

- `questions` says when a question is answered, `transfers` when a row has come and a job ends; this one decides who is
  asked, and which peer has failed.
- While a peer owes us something it has to say something: after half of `silence` it is pinged, after all of it it
  fails. A peer that fails fails with all it owes at once, and so do other ports of its host that gave the same engine's
  name, because all ports of a dead engine are dead (case 55). Nothing is asked of it until its backoff is over.
- Disconnect comes before the ends of what the peer owed: nothing of it gets into a row any more.
- (request, round) is one question. Rounds have nothing to do with each other (case 58).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.tiers.block_frame import PayloadChecksum
from vllm_tiered_offload.tiers.p2p.instructions import (
    Address,
    Attach,
    Connect,
    Disconnect,
    Instruction,
    LandedRow,
    PartId,
    Say,
    Verifier,
    Wanted,
)
from vllm_tiered_offload.tiers.p2p.messages import (
    Answer,
    Buffer,
    Confirmed,
    Data,
    Found,
    Hello,
    MessageError,
    Ping,
    Pong,
    Proofs,
    Question,
    Reason,
    Refuse,
    Welcome,
)
from vllm_tiered_offload.tiers.p2p.peers import Peer, Phase
from vllm_tiered_offload.tiers.p2p.questions import Conclusion, Questions
from vllm_tiered_offload.tiers.p2p.transfers import WINDOW, Transfers

MAX_STRIKES = 3
FIRST_BACKOFF = 0.5
LAST_BACKOFF = 30.0

_SESSION = 0  # the request of a Refuse that means the whole session
_HOPELESS = {Reason.VERSION, Reason.FINGERPRINT, Reason.GEOMETRY, Reason.NOT_ALLOWED}


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
        verifier: Verifier,
        times: PullTimes,
        *,
        is_myself: Callable[[bytes], bool] = lambda epoch: False,  # noqa: ARG005
        read_window: int = WINDOW,
        clock: Clock = monotonic,
    ) -> None:
        """`is_myself` tells an epoch of our own server's from all others. `read_window`: see Transfers."""
        self._hello = hello
        self._is_myself = is_myself
        self._times = times
        self._clock = clock
        self._peers = {address: Peer(address) for address in addresses}
        self._out: list[Instruction] = []
        self._questions = Questions(self._peers, times.lookup, self._say, self._on_concluded, clock)
        self._transfers = Transfers(self._peers, times.pull, verifier, self._strike, self._instruct, clock, read_window)
        # For telling; a kind is ours or a Reason of the protocol, so there are few.
        self.failures: Counter[tuple[Address, str]] = Counter()

    # ---- what the tier wants -----------------------------------------------------------------------------------

    def ask(
        self, request: int, round_: int, keys: Sequence[OffloadKey], addresses: Collection[Address]
    ) -> list[Instruction]:
        """Who of these peers has these keys? Addresses may be new: names have others from time to time."""
        now = self._clock()
        known = [self._peers.setdefault(address, Peer(address)) for address in addresses]
        peers = [peer for peer in known if now >= peer.retry_at]
        self._questions.ask((request, round_), keys, peers)
        for peer in peers:
            if peer.phase is Phase.CLOSED:
                self._instruct(Connect(peer.address))
                self._greet(peer)
            elif peer.phase is Phase.READY:
                self._questions.say_to(peer, (request, round_))
        return self._take()

    def pull(self, job_id: int, rows: Sequence[Wanted]) -> list[Instruction]:
        """Fetch these rows. Those whose peer or promise is gone fail at once."""
        self._transfers.pull(job_id, rows)
        return self._take()

    def finish(self, request: int) -> list[Instruction]:
        """The request is over: nothing more of what was promised for it will be asked for."""
        self._questions.finish(request)
        self._transfers.finish(request)
        return self._take()

    def forget(self) -> list[Instruction]:
        """Every question is answered, every job ends as soon as nothing gets into its rows, every promise is released.

        Nothing that still comes counts.
        """
        self._questions.end_all()
        self._transfers.drop_all()
        return self._take()

    # ---- what happens ------------------------------------------------------------------------------------------

    def heard(
        self, address: Address, answer: Answer, behind: Sequence[Buffer] = (), checksum: PayloadChecksum | None = None
    ) -> list[Instruction]:
        """The peer said something. Behind Data there are its header and its payload, unless that is in its row: then
        it has the checksum of what is there."""
        peer = self._peers[address]
        if peer.phase is Phase.CLOSED:
            return self._take()
        peer.is_alive(self._clock())
        try:
            self._take_in(peer, answer, behind, checksum)
        except MessageError:
            self._fail(peer, "malformed")
        return self._take()

    def garbled(self, address: Address) -> list[Instruction]:
        """What the peer said is no message."""
        return self._failed(address, "malformed")

    def lost(self, address: Address) -> list[Instruction]:
        """The connection is gone, or never came about."""
        return self._failed(address, "lost")

    def moving(self, address: Address) -> None:
        """Bytes come from the peer."""
        self._peers[address].is_alive(self._clock())

    def can_read(self, address: Address) -> None:
        """The peer's memory is attached."""
        self._peers[address].can_read = True

    def landing(self, address: Address, part_id: PartId) -> Wanted | None:
        """The payload of this part begins to come: the row that it gets into, or None where it is not wanted."""
        return self._transfers.landing(self._peers[address], part_id)

    def landed(self, address: Address, rows: Sequence[LandedRow], *, alone: bool = False) -> list[Instruction]:
        """These parts were read out of the peer's memory; `alone`: the peer had no part in it, and need not have."""
        self._peers[address].reads_alone = alone
        self._transfers.on_landed(self._peers[address], rows)
        return self._take()

    def tick(self) -> list[Instruction]:
        """Time has passed."""
        now = self._clock()
        for peer in self._questions.time_out():
            self._answer_is_late(peer)
        for peer in self._transfers.late_peers():
            self._fail(peer, "late")
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
        yield from self._questions.deadlines()
        yield from self._transfers.deadlines()
        silence = self._times.silence
        for peer in self._peers.values():
            if peer.quiet_since != inf:
                pings = peer.phase is Phase.READY and not peer.pinged
                yield peer.quiet_since + (silence / 2 if pings else silence)

    # ---- answers -----------------------------------------------------------------------------------------------

    def _take_in(self, peer: Peer, answer: Answer, behind: Sequence[Buffer], checksum: PayloadChecksum | None) -> None:
        match answer:
            case Welcome():
                self._on_welcome(peer, answer)
            case Found():
                if self._questions.on_found(peer, answer):
                    peer.strikes = 0
            case Data():
                self._transfers.on_data(peer, answer, behind[0], behind[1] if len(behind) > 1 else None, checksum)
            case Proofs():
                self._transfers.on_proofs(peer, answer)
            case Confirmed():
                self._transfers.on_confirmed(peer, answer)
            case Refuse():
                self._on_refuse(peer, answer)
            case Pong():
                pass

    def _on_welcome(self, peer: Peer, welcome: Welcome) -> None:
        if peer.phase is not Phase.GREETING:
            raise MessageError("a Welcome that nobody asked for")
        if self._is_myself(welcome.epoch):
            self._close(peer, "myself", backoff=inf)
            return
        peer.phase, peer.engine_id = Phase.READY, welcome.engine_id
        if welcome.memory is not None and not peer.can_read:
            self._instruct(Attach(peer.address, welcome.memory))
        for round_id in sorted(peer.asked):
            self._questions.say_to(peer, round_id)

    def _on_concluded(self, conclusion: Conclusion) -> None:
        answered, winner = conclusion
        if winner is not None:
            self._transfers.promised((answered.request, answered.round), winner)
        self._instruct(answered)

    def _on_refuse(self, peer: Peer, refuse: Refuse) -> None:
        if refuse.request == _SESSION:
            if refuse.reason is Reason.NO_HELLO:
                self._on_forgotten(peer)
                return
            self._fail(peer, refuse.reason.value, backoff=LAST_BACKOFF if refuse.reason in _HOPELESS else None)
            return
        round_id = refuse.request, refuse.round
        self.failures[peer.address, refuse.reason.value] += 1
        self._questions.withdraw(peer, round_id)
        self._transfers.fail(peer, refuse.reason.value, round_id)

    def _on_forgotten(self, peer: Peer) -> None:
        """It was reset, or made room. What is asked is asked again after its Welcome.

        While greeting, this answers something that was said before the greeting.
        """
        if peer.phase is Phase.READY:
            self._greet(peer)
            self._transfers.fail(peer, Reason.NO_HELLO.value)
            self._transfers.forget_promises(peer)

    # ---- failures ----------------------------------------------------------------------------------------------

    def _answer_is_late(self, peer: Peer) -> None:
        """A peer that could not even be greeted in that time is not there."""
        if peer.phase is Phase.GREETING:
            self._fail(peer, "unreachable")
        elif peer.phase is Phase.READY:
            self._strike(peer, "late")

    def _strike(self, peer: Peer, why: str) -> None:
        self.failures[peer.address, why] += 1
        peer.strikes += 1
        if peer.strikes >= MAX_STRIKES and peer.phase is not Phase.CLOSED:
            self._close(peer, why, None)

    def _failed(self, address: Address, why: str) -> list[Instruction]:
        peer = self._peers[address]
        if peer.phase is not Phase.CLOSED:
            self._fail(peer, why)
        return self._take()

    def _fail(self, peer: Peer, why: str, backoff: float | None = None) -> None:
        """The peer is not asked for a while, nor are other ports of the same engine."""
        failed = [peer, *self._other_ports(peer)]
        for one in failed:
            self.failures[one.address, why] += 1
            one.strikes += 1
            self._close(one, why, backoff)

    def _other_ports(self, peer: Peer) -> list[Peer]:
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

    def _close(self, peer: Peer, why: str, backoff: float | None) -> None:
        peer.phase, peer.can_read, peer.reads_alone = Phase.CLOSED, False, False
        if backoff is None:
            backoff = min(LAST_BACKOFF, FIRST_BACKOFF * 2 ** min(peer.strikes - 1, 10))
        peer.retry_at = self._clock() + backoff
        self._instruct(Disconnect(peer.address))
        self._transfers.fail(peer, why)
        self._transfers.forget_promises(peer)
        self._questions.withdraw_all(peer)
        peer.settle(self._clock())

    # ---- small parts -------------------------------------------------------------------------------------------

    def _greet(self, peer: Peer) -> None:
        peer.phase = Phase.GREETING
        self._say(peer, self._hello)

    def _say(self, peer: Peer, message: Question) -> None:
        self._instruct(Say(peer.address, message))

    def _instruct(self, instruction: Instruction) -> None:
        self._out.append(instruction)

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    # ---- for telling and for tests -----------------------------------------------------------------------------

    @property
    def rows_from(self) -> Counter[Address]:
        """Rows of each peer that were right."""
        return self._transfers.rows_from

    @property
    def failed_rows(self) -> Counter[str]:
        """Rows that did not come, by kind."""
        return self._transfers.failed_rows

    @property
    def seconds_from(self) -> dict[Address, float]:
        """How long each peer owed us rows."""
        return {address: peer.pulling_seconds for address, peer in list(self._peers.items())}

    def is_up(self, address: Address) -> bool:
        """Whether the peer has welcomed us and did not fail since."""
        peer = self._peers.get(address)
        return peer is not None and peer.phase is Phase.READY

    def leftovers(self) -> dict[str, int]:
        """What is empty when nothing is going on, by name."""
        asked = sum(len(peer.asked) for peer in self._peers.values())
        return {"questions": len(self._questions), "asked": asked, **self._transfers.leftovers()}

    def check(self) -> None:
        """Assert the invariants beside the declarations. For tests."""
        self._questions.check()
        self._transfers.check()
        for peer in self._peers.values():
            assert peer.phase is not Phase.CLOSED or not (peer.asked or peer.rows or peer.can_read)
            assert peer.phase is Phase.READY or all(row.dropped for row in peer.rows)
            assert peer.owes == (peer.quiet_since != inf)
