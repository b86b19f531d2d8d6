"""The owner's side of the conversation: what is said comes in, what to answer goes out. No I/O.

    stranger --Hello that fits--> session --Lookup, Fetch, Reading, Confirm, Release, Ping--> session
        |                            |
        +--anything else--> refused  +--malformed, does not read, silent too long, room needed--> stranger

A session is one connection. Nothing is looked up or promised for a stranger; who has sent garbage is a stranger again.
Under CURVE a session belongs to the key that opened it, and what comes over it under another key is refused.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.tiers.p2p.leases import PeerId, PromisedRow, Promises
from vllm_tiered_offload.tiers.p2p.messages import (
    PROTOCOL_VERSION,
    Answer,
    Buffer,
    Confirm,
    Fetch,
    Hello,
    Lookup,
    Memory,
    MessageError,
    Ping,
    Pong,
    Question,
    Reading,
    Reason,
    Refuse,
    Release,
    Welcome,
    decode_question,
)

MAX_SESSIONS = 64
IDLE_SECONDS = 60.0  # after which a session makes room for another one

UserId = str
"""Who is at the other end: the public key under CURVE, nothing without it."""


@dataclass(frozen=True, slots=True)
class SendRows:
    """Send one Data for each of these rows of the round."""

    request: int
    round: int
    rows: list[PromisedRow]


@dataclass(frozen=True, slots=True)
class ConfirmParts:
    """Send Proofs of these rows of the round, if any, then Confirmed for the parts, which are done then."""

    request: int
    round: int
    rows: list[PromisedRow]
    parts: tuple[int, ...]


Reply: TypeAlias = Answer | SendRows | ConfirmParts

R = TypeVar("R", bound=Reply)


def greeting(fingerprint: Fingerprint, geometry: RegionGeometry, engine_id: str) -> Hello:
    """What this engine says first, and what it wants to hear."""
    digest = bytes.fromhex(fingerprint.digest)
    return Hello(PROTOCOL_VERSION, digest, geometry.slot_bytes, geometry.blocks_per_chunk, engine_id[:256])


@dataclass(slots=True)
class _Session:
    user: UserId
    heard: float


class Owner:
    """All sessions of the peers that pull from this engine."""

    def __init__(self, own: Hello, promises: Promises, *, clock: Clock = monotonic) -> None:
        self.own = own
        self.memory: Memory | None = None  # what can be read, once it is known
        self.promises = promises
        self._clock = clock
        # At most MAX_SESSIONS; the one that was silent for the longest time comes first.
        self._sessions: OrderedDict[PeerId, _Session] = OrderedDict()
        self.refused: Counter[Reason] = Counter()

    @property
    def num_sessions(self) -> int:
        """Peers that were welcomed and are not forgotten."""
        return len(self._sessions)

    def knows(self, peer: PeerId) -> bool:
        """Whether it has a session."""
        return peer in self._sessions

    def receive(self, peer: PeerId, user: UserId, message: Buffer) -> Reply | None:
        """What to answer to one message; None for nothing. Never raises because of what it holds."""
        session = self._sessions.get(peer)
        try:
            question = decode_question(message)
        except MessageError:
            return self._refuse_garbage(peer, known=session is not None)
        if isinstance(question, Hello):
            return self._greet(peer, user, question)
        if session is None:
            return self._refuse(Reason.NO_HELLO)
        if session.user != user:
            return self._refuse(Reason.NOT_ALLOWED)
        session.heard = self._clock()
        self._sessions.move_to_end(peer)
        return self._answer(peer, question)

    def _answer(self, peer: PeerId, question: Question) -> Reply | None:
        match question:
            case Lookup():
                return self._counted(self.promises.make(peer, question))
            case Fetch(request, round_):
                rows = self.promises.fetch(peer, question)
                return self._counted(rows) if isinstance(rows, Refuse) else SendRows(request, round_, rows)
            case Reading():
                refusal = self.promises.begin_reading(peer, question)
                return None if refusal is None else self._counted(refusal)
            case Confirm(request, round_, _, parts):
                rows = self.promises.confirm(peer, question)
                if isinstance(rows, Refuse):
                    return self._counted(rows)
                return ConfirmParts(request, round_, rows, parts)
            case Release(request, round_):
                self.promises.release(peer, request, round_)
                return None
            case Ping(number):
                return Pong(number)
        raise AssertionError(question)

    def drop(self, peer: PeerId) -> None:
        """The peer is gone, or does not read what it asked for."""
        self._sessions.pop(peer, None)
        self.promises.drop_peer(peer)

    def reset(self) -> None:
        """Nothing that was promised holds any more, and everybody has to greet again."""
        self._sessions.clear()
        self.promises.reset()

    def _greet(self, peer: PeerId, user: UserId, hello: Hello) -> Reply:
        self.drop(peer)
        objection = self._objection(hello)
        if objection is not None:
            return self._refuse(objection)
        now = self._clock()
        if len(self._sessions) >= MAX_SESSIONS:
            oldest, session = next(iter(self._sessions.items()))
            if now - session.heard < IDLE_SECONDS:
                return self._refuse(Reason.BUSY)
            self.drop(oldest)
        self._sessions[peer] = _Session(user, now)
        return Welcome(self.promises.epoch, self.own.engine_id, self.memory)

    def _objection(self, hello: Hello) -> Reason | None:
        own = self.own
        if hello.version != own.version:
            return Reason.VERSION
        if hello.fingerprint != own.fingerprint:
            return Reason.FINGERPRINT
        if (hello.slot_bytes, hello.blocks_per_chunk) != (own.slot_bytes, own.blocks_per_chunk):
            return Reason.GEOMETRY
        return None

    def _refuse_garbage(self, peer: PeerId, *, known: bool) -> Reply | None:
        """A stranger's garbage gets no answer."""
        refusal = self._refuse(Reason.MALFORMED)
        if not known:
            return None
        self.drop(peer)
        return refusal

    def _refuse(self, reason: Reason) -> Refuse:
        return self._counted(Refuse(0, 0, reason))

    def _counted(self, reply: R) -> R:
        if isinstance(reply, Refuse):
            self.refused[reply.reason] += 1
        return reply
