"""Who has these keys? Questions to several peers at once, and their one answer. No I/O.

A question is answered when one peer has everything, when all have answered, or at its deadline; the best answer counts,
and what the others promised is released.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.seams import Clock
from vllm_tiered_offload.tiers.p2p.instructions import Address, Answered, RoundId, Source
from vllm_tiered_offload.tiers.p2p.messages import Found, Lookup, MessageError, Question, Release
from vllm_tiered_offload.tiers.p2p.peers import Peer


@dataclass(slots=True)
class _Question:
    round_id: RoundId
    keys: tuple[OffloadKey, ...]
    asked_at: float
    deadline: float
    waiting: set[Address] = field(default_factory=set)  # peers that have not answered; each has it in `asked`
    best: tuple[Address, Found] | None = None


class Conclusion(NamedTuple):
    """The answer that counts. `winner` has promised `found`; nobody has, where it is None."""

    answered: Answered
    winner: Address | None


class Questions:
    """All that have no answer. `say` and `conclude` are called with what follows."""

    def __init__(
        self,
        peers: dict[Address, Peer],
        seconds: float,
        say: Callable[[Peer, Question], None],
        conclude: Callable[[Conclusion], None],
        clock: Clock,
    ) -> None:
        self._peers = peers
        self._seconds = seconds
        self._say = say
        self._tell = conclude
        self._clock = clock
        self._open: dict[RoundId, _Question] = {}

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, round_id: RoundId, keys: Sequence[OffloadKey], peers: Sequence[Peer]) -> None:
        """Put it to these peers, which are told of it when they are greeted (`repeat`)."""
        now = self._clock()
        question = _Question(round_id, tuple(keys), now, now + self._seconds)
        self._open[round_id] = question
        for peer in peers:
            question.waiting.add(peer.address)
            peer.begin_to_owe(now)
            peer.asked.add(round_id)
        if not question.waiting:
            self._conclude(question)

    def say_to(self, peer: Peer, round_id: RoundId) -> None:
        """The question itself."""
        self._say(peer, Lookup(*round_id, self._open[round_id].keys))

    def on_found(self, peer: Peer, found: Found) -> bool:
        """Whether it was asked and in time."""
        round_id = found.request, found.round
        question = self._open.get(round_id)
        if question is None or peer.address not in question.waiting:
            # Too late, or somebody else had everything. The winner's promise is not this one's.
            self._release(peer, found)
            self._no_longer_asked(peer, round_id)
            return False
        if found.parts and max(found.parts) >= len(question.keys):
            raise MessageError("a promise of keys that nobody asked for")
        if found.rows and len(found.rows) != len(found.parts):
            raise MessageError("a promise of rows that are not those of its parts")
        question.waiting.discard(peer.address)
        self._no_longer_asked(peer, round_id)
        loser: tuple[Address, Found] | None = peer.address, found
        if question.best is None or _worth(found) > _worth(question.best[1]):
            question.best, loser = (peer.address, found), question.best
        if loser is not None:
            self._release(self._peers[loser[0]], loser[1])
        if not question.waiting or len(question.best[1].parts) == len(question.keys):
            self._conclude(question)
        return True

    def withdraw(self, peer: Peer, round_id: RoundId) -> None:
        """The peer will not answer this one."""
        question = self._open.get(round_id)
        if question is not None and peer.address in question.waiting:
            question.waiting.discard(peer.address)
            if not question.waiting:
                self._conclude(question)
        self._no_longer_asked(peer, round_id)

    def withdraw_all(self, peer: Peer) -> None:
        """The peer has failed: what it said counts no more either."""
        for question in self._open.values():
            if question.best is not None and question.best[0] == peer.address:
                question.best = None
        for round_id in list(peer.asked):
            self.withdraw(peer, round_id)
        peer.asked.clear()

    def finish(self, request: int) -> None:
        """End the questions of a request."""
        for question in [question for round_id, question in self._open.items() if round_id[0] == request]:
            self._conclude(question)

    def end_all(self) -> None:
        """With the answers that there are."""
        for question in list(self._open.values()):
            self._conclude(question)

    def time_out(self) -> list[Peer]:
        """End those whose time is over; the peers that have not answered, one time for each question."""
        now = self._clock()
        late: list[Peer] = []
        for question in [question for question in self._open.values() if question.deadline <= now]:
            late += [self._peers[address] for address in question.waiting]
            self._conclude(question)
        return late

    def deadlines(self) -> Iterator[float]:
        """Of all that are open."""
        return (question.deadline for question in self._open.values())

    def _conclude(self, question: _Question) -> None:
        """The answer that there is by now."""
        del self._open[question.round_id]
        for address in question.waiting:
            self._no_longer_asked(self._peers[address], question.round_id)
        if question.best is None or not question.best[1].parts:
            self._tell(Conclusion(Answered(*question.round_id, {}), None))
            return
        address, best = question.best
        expires = question.asked_at + best.seconds
        rows: Sequence[int | None] = best.rows or [None] * len(best.parts)
        found = {
            question.keys[part]: Source(address, *question.round_id, part, best.epoch, expires, row)
            for part, row in zip(best.parts, rows, strict=True)
        }
        self._tell(Conclusion(Answered(*question.round_id, found), address))

    def _release(self, peer: Peer, found: Found) -> None:
        if found.parts:
            self._say(peer, Release(found.request, found.round))

    def _no_longer_asked(self, peer: Peer, round_id: RoundId) -> None:
        peer.asked.discard(round_id)
        peer.settle(self._clock())

    def check(self) -> None:
        """Assert the invariants. For tests."""
        assert all(question.waiting for question in self._open.values())
        for peer in self._peers.values():
            assert peer.asked == {q for q, question in self._open.items() if peer.address in question.waiting}


def _worth(found: Found) -> tuple[int, int]:
    """How long the prefix is that a peer has, then how many keys."""
    leading = 0
    for part in sorted(found.parts):
        if part != leading:
            break
        leading += 1
    return leading, len(found.parts)
