"""The puller's state machine, driven by hand: every order of answers, failures and time."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_tiered_offload import OffloadKey
from vllm_tiered_offload.testing.fakes.seams import ManualClock
from vllm_tiered_offload.tiers.block_frame import Checksum, PayloadChecksum
from vllm_tiered_offload.tiers.p2p.instructions import (
    Address,
    Answered,
    Attach,
    Connect,
    Disconnect,
    Instruction,
    JobEnded,
    LandedRow,
    PartId,
    Read,
    Say,
    Source,
    Wanted,
)
from vllm_tiered_offload.tiers.p2p.messages import (
    MAX_PARTS,
    MAX_READ_PARTS,
    Answer,
    Confirm,
    Confirmed,
    Data,
    Fetch,
    Found,
    Hello,
    Lookup,
    Memory,
    Ping,
    Pong,
    Proof,
    Proofs,
    Reading,
    Reason,
    Refuse,
    Release,
    Welcome,
)
from vllm_tiered_offload.tiers.p2p.pulling import FIRST_BACKOFF, Pulling, PullTimes
from vllm_tiered_offload.tiers.p2p.transfers import WINDOW

pytestmark = pytest.mark.fast

A, B, ELSEWHERE = Address("a", 1), Address("a", 2), Address("b", 1)
HELLO = Hello(1, bytes(32), (4096,), 1, "me")
EPOCH = bytes(16)
HEADER, SIZE = bytes(4096), 8192
PROOF = Proof(b"k", 1, bytes(16))
CHECKSUM = PayloadChecksum(Checksum.GMAC, SIZE, bytes(16))
TIMES = PullTimes(lookup=0.5, pull=10.0, silence=1.0)


def keys(count: int) -> list[OffloadKey]:
    return [OffloadKey(f"k{index}".encode()) for index in range(count)]


class World:
    def __init__(self, read_window: int = WINDOW) -> None:
        self.clock = ManualClock()
        self.rows: dict[int, bytes] = {}
        self.wrong: set[int] = set()  # rows that will turn out to be, when they have landed
        self.verified: list[int] = []  # that have landed
        self.pulling = Pulling([A, B, ELSEWHERE], HELLO, self, TIMES, clock=self.clock, read_window=read_window)

    def accept(self, wanted: Wanted, header: object, payload: object) -> bool:
        if payload != b"good":
            return False
        self.rows[wanted.row] = wanted.key
        return True

    def is_right(self, wanted: Wanted, header: object, checksum: object) -> bool:
        self.verified.append(wanted.row)
        return wanted.row not in self.wrong

    def landed(self, address: Address, *part_ids: PartId, alone: bool = False) -> list[Instruction]:
        rows = [LandedRow(part_id, CHECKSUM) for part_id in part_ids]
        return self.pulling.landed(address, rows, alone=alone)

    def hear(self, address: Address, answer: Answer, payload: bytes = b"good") -> list[Instruction]:
        behind = [b"header", payload] if isinstance(answer, Data) else []
        out = self.pulling.heard(address, answer, behind)
        self.pulling.check()
        return out

    def ready(self, *addresses: Address, engine: str = "") -> None:
        """Greeted, with nothing asked."""
        for number, address in enumerate(addresses):
            self.pulling.ask(99, number, keys(1), [address])
            self.hear(address, Welcome(EPOCH, engine or str(address)))
            self.hear(address, Found(99, number, EPOCH, (), 10.0))

    def found(self, count: int = 4, round_: int = 1, seconds: float = 10.0) -> dict[OffloadKey, Source]:
        """A question that A answered."""
        self.pulling.ask(1, round_, keys(count), [A])
        [answered] = self.hear(A, Found(1, round_, EPOCH, tuple(range(count)), seconds))
        assert isinstance(answered, Answered)
        return answered.found

    def pull(self, found: dict[OffloadKey, Source], job_id: int = 1) -> list[Instruction]:
        rows = [Wanted(key, 100 * job_id + row, source) for row, (key, source) in enumerate(found.items())]
        return self.pulling.pull(job_id, rows)

    def tick(self, seconds: float) -> list[Instruction]:
        self.clock.advance(seconds)
        out = self.pulling.tick()
        self.pulling.check()
        return out


@pytest.fixture
def world() -> World:
    return World()


def test_a_question_waits_for_the_greeting(world: World) -> None:
    assert world.pulling.ask(1, 1, keys(2), [A]) == [Connect(A), Say(A, HELLO)]
    assert world.hear(A, Welcome(EPOCH, "a")) == [Say(A, Lookup(1, 1, tuple(keys(2))))]
    [answered] = world.hear(A, Found(1, 1, EPOCH, (0,), 10.0))
    assert answered == Answered(1, 1, {keys(1)[0]: Source(A, 1, 1, 0, EPOCH, 10.0)})


def test_the_longer_prefix_wins_and_the_other_is_released(world: World) -> None:
    """Not the larger number of keys. Made to fail by counting them."""
    world.ready(A, B)
    world.pulling.ask(1, 1, keys(5), [A, B])
    assert world.hear(A, Found(1, 1, EPOCH, (1, 2, 3, 4), 10.0)) == []
    released, answered = world.hear(B, Found(1, 1, EPOCH, (0, 1), 10.0))
    assert released == Say(A, Release(1, 1))
    assert isinstance(answered, Answered)
    assert list(answered.found) == keys(2)


def test_who_has_everything_is_not_kept_waiting_for_the_others(world: World) -> None:
    world.ready(A, B)
    world.pulling.ask(1, 1, keys(2), [A, B])
    assert world.hear(A, Found(1, 1, EPOCH, (0, 1), 10.0))
    assert world.hear(B, Found(1, 1, EPOCH, (0,), 10.0)) == [Say(B, Release(1, 1))]


def test_the_deadline_answers_with_what_there_is(world: World) -> None:
    world.ready(A, B)
    world.pulling.ask(1, 1, keys(2), [A, B])
    world.hear(A, Found(1, 1, EPOCH, (0,), 10.0))
    assert world.pulling.next_timer == 0.5
    answered = [step for step in world.tick(0.5) if isinstance(step, Answered)]
    assert [list(step.found) for step in answered] == [keys(1)]


def test_a_peer_that_cannot_be_greeted_is_left_alone_for_a_while(world: World) -> None:
    world.pulling.ask(1, 1, keys(1), [A])
    assert world.tick(0.5) == [Answered(1, 1, {}), Disconnect(A)]
    assert world.pulling.ask(1, 2, keys(1), [A]) == [Answered(1, 2, {})]
    world.clock.advance(FIRST_BACKOFF)
    assert world.pulling.ask(1, 3, keys(1), [A]) == [Connect(A), Say(A, HELLO)]
    world.tick(0.5)
    world.clock.advance(FIRST_BACKOFF)
    assert world.pulling.ask(1, 4, keys(1), [A]) == [Answered(1, 4, {})], "the second backoff is longer"


def test_rows_come_in_any_order_and_the_job_ends_once(world: World) -> None:
    world.ready(A)
    found = world.found(3)
    assert world.pull(found) == [Say(A, Fetch(1, 1, EPOCH, (0, 1, 2)))]
    assert world.hear(A, Data(1, 1, (2,))) == []
    assert world.hear(A, Data(1, 1, (2,))) == [], "a second copy of a row"
    assert world.hear(A, Data(1, 1, (0,)), payload=b"bad") == []
    assert world.hear(A, Data(1, 1, (1,))) == [JobEnded(1, (keys(3)[2], keys(3)[1]), (keys(3)[0],))]
    assert world.rows == {102: keys(3)[2], 101: keys(3)[1]}


def test_no_more_rows_are_owed_than_the_window_holds(world: World) -> None:
    """Made to fail by asking for all at once."""
    world.ready(A)
    [fetch] = world.pull(world.found(3 * WINDOW))
    assert isinstance(fetch, Say)
    assert isinstance(fetch.message, Fetch)
    assert len(fetch.message.parts) == WINDOW
    steps: list[Instruction] = []
    for part in range(3 * WINDOW):
        steps += world.hear(A, Data(1, 1, (part,)))
    assert isinstance(steps[-1], JobEnded)
    assert len(steps[-1].good) == 3 * WINDOW
    assert len(steps) <= 1 + 2 * 2, "rows are asked for in batches"


def test_a_silent_peer_is_pinged_and_then_fails_with_all_it_owes(world: World) -> None:
    """Case 60: a stopped process. Made to fail by waiting for the pull's own deadline."""
    world.ready(A)
    world.pull(world.found(2))
    assert world.tick(0.5) == [Say(A, Ping(0))]
    world.hear(A, Pong(0))
    assert world.tick(0.6) == [Say(A, Ping(0))], "it lives, and has the same time again"
    assert world.tick(0.4) == [Disconnect(A), JobEnded(1, (), ())]
    assert world.pulling.next_timer is None


def test_case_55_all_ports_of_a_dead_engine_fail_at_once(world: World) -> None:
    """Case 55: but not another host that gives the same name. Made to fail by failing the lost address alone, and by
    believing the name alone."""
    world.ready(A, B, ELSEWHERE, engine="the same")
    world.pull(world.found(2))
    assert world.pulling.lost(B) == [Disconnect(B), Disconnect(A), JobEnded(1, (), ())]
    world.pulling.check()
    assert world.pulling.ask(1, 5, keys(1), [A, B]) == [Answered(1, 5, {})]
    assert world.pulling.ask(1, 6, keys(1), [ELSEWHERE]) == [Say(ELSEWHERE, Lookup(1, 6, tuple(keys(1))))]


def test_case_58_rounds_end_in_any_order(world: World) -> None:
    """Case 58: round 2's rows come first, and the end of the request waits for both. Made to fail by rows told apart
    by request and part."""
    world.ready(A)
    one, two = world.found(2, round_=1), world.found(2, round_=2)
    world.pull(one, job_id=1)
    world.pull(two, job_id=2)
    assert world.pulling.finish(1) == []
    world.hear(A, Data(1, 2, (0,)))
    assert [type(step) for step in world.hear(A, Data(1, 2, (1,)))] == [Say, JobEnded]
    world.hear(A, Data(1, 1, (1,)))
    assert [type(step) for step in world.hear(A, Data(1, 1, (0,)))] == [Say, JobEnded]
    assert world.rows.keys() == {100, 101, 200, 201}


def test_a_promise_that_is_over_is_not_fetched(world: World) -> None:
    """Case 57: the puller knows it, too."""
    world.ready(A)
    found = world.found(2, seconds=3.0)
    world.clock.advance(3.0)
    assert world.pull(found) == [JobEnded(1, (), ())]


def test_a_refused_fetch_fails_its_round_alone(world: World) -> None:
    world.ready(A)
    world.pull(world.found(2, round_=1), job_id=1)
    world.pull(world.found(2, round_=2), job_id=2)
    assert world.hear(A, Refuse(1, 1, Reason.GONE)) == [JobEnded(1, (), ())]
    world.hear(A, Data(1, 2, (0,)))
    assert isinstance(world.hear(A, Data(1, 2, (1,)))[0], JobEnded)


def test_a_peer_that_forgot_us_is_greeted_and_asked_again(world: World) -> None:
    world.ready(A)
    world.pulling.ask(1, 1, keys(1), [A])
    assert world.hear(A, Refuse(0, 0, Reason.NO_HELLO)) == [Say(A, HELLO)]
    assert world.hear(A, Refuse(0, 0, Reason.NO_HELLO)) == []
    assert world.hear(A, Welcome(EPOCH, "a")) == [Say(A, Lookup(1, 1, tuple(keys(1))))]


@pytest.mark.parametrize(
    "lie", [Found(1, 1, EPOCH, (7,), 1.0), Welcome(EPOCH, "again"), Refuse(0, 0, Reason.FINGERPRINT)]
)
def test_a_peer_that_lies_is_dropped(world: World, lie: Answer) -> None:
    world.ready(A)
    world.pulling.ask(1, 1, keys(2), [A])
    assert world.hear(A, lie) == [Disconnect(A), Answered(1, 1, {})]


def test_garbage_drops_the_peer(world: World) -> None:
    world.ready(A)
    assert world.pulling.garbled(A) == [Disconnect(A)]
    assert world.pulling.garbled(A) == []


def test_after_forget_nothing_counts(world: World) -> None:
    world.ready(A)
    world.pull(world.found(2))
    world.pulling.ask(1, 2, keys(2), [A])
    assert {type(step) for step in world.pulling.forget()} == {Answered, JobEnded, Say}
    world.pulling.check()
    assert set(world.pulling.leftovers().values()) == {0}
    assert world.hear(A, Data(1, 1, (0,))) == []
    assert world.rows == {}


# ---- rows that land where they belong ----------------------------------------------------------------------------


MEMORY = Memory(b"agent", 1 << 20, 8, 4096, bytes(16))


def ready_to_read(world: World, count: int = 3) -> dict[OffloadKey, Source]:
    """A is attached, and has promised rows 10, 11, ..."""
    world.pulling.ask(1, 1, keys(count), [A])
    attach, _ = world.hear(A, Welcome(EPOCH, "a", MEMORY))
    assert attach == Attach(A, MEMORY)
    world.pulling.can_read(A)
    [answered] = world.hear(A, Found(1, 1, EPOCH, tuple(range(count)), 10.0, tuple(range(10, 10 + count))))
    assert isinstance(answered, Answered)
    assert [source.row for source in answered.found.values()] == list(range(10, 10 + count))
    return answered.found


def test_rows_that_were_read_count_when_confirmed_and_checked() -> None:
    """Two questions to the owner: it hears of the read when it begins, and confirms when it is over. Its proofs come
    before that. Made to fail by counting rows that are right and not confirmed."""
    world = World(read_window=4)
    read, reading = world.pull(ready_to_read(world))
    assert reading == Say(A, Reading(1, 1, EPOCH, (0, 1, 2)))
    assert isinstance(read, Read)
    assert [wanted.row for wanted in read.rows] == [100, 101, 102]
    assert world.hear(A, Proofs(1, 1, (0,), (PROOF,))) == []
    assert world.landed(A, (1, 1, 0), (1, 1, 2)) == [Say(A, Confirm(1, 1, EPOCH, (0, 2)))]
    assert world.pulling.rows_from[A] == 0
    world.wrong.add(102)
    assert world.hear(A, Proofs(1, 1, (1, 2), (PROOF, PROOF))) == []
    assert world.pulling.rows_from[A] == 0
    assert world.hear(A, Confirmed(1, 1, (0, 2))) == []
    assert world.pulling.rows_from[A] == 1
    assert world.verified == [100, 102]
    assert world.landed(A, (1, 1, 1)) == [Say(A, Confirm(1, 1, EPOCH, (1,)))]
    assert world.hear(A, Refuse(1, 1, Reason.GONE)) == [JobEnded(1, (keys(1)[0],), (keys(3)[2],))]
    assert world.pulling.rows_from[A] == 1, "the last one is not confirmed"


def test_the_next_half_window_is_read_when_half_has_come() -> None:
    """Made to fail by asking for each row that there is room for, and by asking when all have come."""
    world = World(read_window=4)
    world.pull(ready_to_read(world, 7))

    def read(*parts: int) -> list[Instruction]:
        assert world.landed(A, *((1, 1, part) for part in parts)) == [Say(A, Confirm(1, 1, EPOCH, parts))]
        assert world.hear(A, Proofs(1, 1, parts, (PROOF,) * len(parts))) == []
        return world.hear(A, Confirmed(1, 1, parts))

    assert read(2) == []
    more, reading = read(0)
    assert reading == Say(A, Reading(1, 1, EPOCH, (4, 5)))
    assert isinstance(more, Read)
    _, reading = read(1, 3)
    assert reading == Say(A, Reading(1, 1, EPOCH, (6,)))
    assert read(6, 5) == []
    [ended] = read(4)
    assert isinstance(ended, JobEnded)
    assert len(ended.good) == 7


def test_a_window_larger_than_a_message_is_told_in_several() -> None:
    """An owner takes no message with more parts. Made to fail by one message for all, of any kind."""
    most, total = MAX_READ_PARTS, 2 * MAX_READ_PARTS + 9

    def told(steps: Sequence[Instruction], kind: type) -> list[int]:
        messages = [step.message for step in steps if isinstance(step, Say) and isinstance(step.message, kind)]
        return [len(message.parts) for message in messages]

    world = World(read_window=2 * total)
    assert told(world.pull(ready_to_read(world, total)), Reading) == [most, most, 9]
    assert told(world.landed(A, *((1, 1, part) for part in range(total))), Confirm) == [most, most, 9]
    world = World(read_window=2 * total)
    world.pulling.ask(1, 1, keys(total), [A])
    world.hear(A, Welcome(EPOCH, "a", MEMORY))
    world.pulling.can_read(A)
    [answered] = world.hear(A, Found(1, 1, EPOCH, tuple(range(total)), 10.0))
    assert isinstance(answered, Answered)
    assert max(told(world.pull(answered.found), Fetch)) == MAX_PARTS, "it does not say where its rows are"


def test_rows_that_were_dropped_make_room_when_they_have_landed() -> None:
    """They are in the window until then, and nothing else happens then. Made to fail by asking for more only after
    rows that were verified."""
    world = World(read_window=2)
    world.pull(ready_to_read(world, 2))
    world.pulling.ask(1, 2, keys(2), [A])
    [answered] = world.hear(A, Found(1, 2, EPOCH, (0, 1), 10.0, (12, 13)))
    assert isinstance(answered, Answered)
    assert world.pull(answered.found, job_id=2) == []
    assert world.hear(A, Refuse(1, 1, Reason.GONE)) == []
    assert world.landed(A, (1, 1, 0))[1:] == [Say(A, Reading(1, 2, EPOCH, (0,)))]
    steps = world.landed(A, (1, 1, 1))
    assert steps[0] == JobEnded(1, (), ())
    assert steps[2:] == [Say(A, Reading(1, 2, EPOCH, (1,)))]


def test_a_peer_that_fails_by_what_it_sent_takes_the_rest_along(world: World) -> None:
    """Three wrong rows end it. What landed with them ends then, once. Made to fail by ending what nobody owes."""
    world.pull(ready_to_read(world, 6))
    world.wrong.update((100, 101, 103, 104))
    world.landed(A, *((1, 1, part) for part in range(6)))
    world.hear(A, Proofs(1, 1, tuple(range(6)), (PROOF,) * 6))
    steps = world.hear(A, Confirmed(1, 1, tuple(range(6))))
    wrong = tuple(keys(4)[part] for part in (0, 1, 3))
    assert steps == [Disconnect(A), JobEnded(1, (keys(6)[2], keys(6)[5]), wrong)]


def test_a_proof_of_what_is_not_read_drops_the_peer(world: World) -> None:
    """It would let in whatever was in the row before."""
    world.ready(A)
    world.pull(world.found(1))
    assert world.hear(A, Proofs(1, 1, (0,), (PROOF,))) == [Disconnect(A), JobEnded(1, (), ())]


@pytest.mark.parametrize("landed", [False, True])
def test_a_second_proof_drops_the_peer(world: World, landed: bool) -> None:
    """It would be checked, and ended, twice."""
    world.pull(ready_to_read(world, 1))
    if landed:
        world.landed(A, (1, 1, 0))
    world.hear(A, Proofs(1, 1, (0,), (PROOF,)))
    assert world.hear(A, Proofs(1, 1, (0,), (PROOF,))) == [Disconnect(A), JobEnded(1, (), ())]


def test_a_confirmation_twice_drops_the_peer(world: World) -> None:
    """The row would end twice. Made to fail by taking it."""
    world.pull(ready_to_read(world, 2))
    world.landed(A, (1, 1, 0), (1, 1, 1))
    world.hear(A, Proofs(1, 1, (0, 1), (PROOF, PROOF)))
    assert world.hear(A, Confirmed(1, 1, (0, 0))) == [Disconnect(A), JobEnded(1, (), ())]


@pytest.mark.parametrize("what", ["the read is over", "it is proved"])
def test_a_confirmation_before_its_time_drops_the_peer(world: World, what: str) -> None:
    """It would say nothing of the rest of the read, or let in whatever was read. Made to fail by taking it as it
    comes."""
    world.pull(ready_to_read(world, 1))
    if what == "it is proved":
        world.landed(A, (1, 1, 0))
    else:
        world.hear(A, Proofs(1, 1, (0,), (PROOF,)))
    assert world.hear(A, Confirmed(1, 1, (0,))) == [Disconnect(A), JobEnded(1, (), ())]


@pytest.mark.parametrize("how", ["refuse", "forget", "hello"])
def test_a_row_that_is_being_read_ends_when_it_has_landed(world: World, how: str) -> None:
    """Whoever gets the row next would find these bytes in it. Made to fail by ending dropped rows at once."""
    world.pull(ready_to_read(world))
    if how == "forget":
        assert world.pulling.forget() == []
    else:
        refuse = Refuse(1, 1, Reason.GONE) if how == "refuse" else Refuse(0, 0, Reason.NO_HELLO)
        assert JobEnded not in {type(step) for step in world.hear(A, refuse)}
    world.pulling.check()
    assert world.landed(A, (1, 1, 0), (1, 1, 1)) == []
    steps = world.landed(A, (1, 1, 2))
    assert [step for step in steps if isinstance(step, JobEnded)] == [JobEnded(1, (), ())]
    assert world.landed(A, (1, 1, 2)) == []
    assert not world.verified


def test_a_peer_whose_memory_is_read_alone_is_told_so(world: World) -> None:
    """It does not poll for it.."""
    found = list(ready_to_read(world, 3).items())
    _, reading = world.pull(dict(found[:1]), 1)
    assert reading == Say(A, Reading(1, 1, EPOCH, (0,)))
    world.landed(A, (1, 1, 0), alone=True)
    _, reading = world.pull(dict(found[1:2]), 2)
    assert reading == Say(A, Reading(1, 1, EPOCH, (1,), True))
    world.landed(A, (1, 1, 1), alone=False)
    _, reading = world.pull(dict(found[2:]), 3)
    assert reading == Say(A, Reading(1, 1, EPOCH, (2,)))


def test_a_row_whose_reader_is_stuck_ends_with_its_peer(world: World) -> None:
    """A stopped peer: nothing lands. The peer is disconnected first, and that ends the transfer."""
    world.pull(ready_to_read(world))
    world.pulling.forget()
    assert [type(step) for step in world.tick(0.5)] == [Say]
    assert world.tick(0.5) == [Disconnect(A), JobEnded(1, (), ())]


def test_a_payload_lands_only_in_a_row_that_is_owed(world: World) -> None:
    """Once for each part, and not after its job's end."""
    world.ready(A)
    world.pull(world.found(2))
    wanted = world.pulling.landing(A, (1, 1, 0))
    assert wanted is not None
    assert wanted.row == 100
    assert world.pulling.landing(A, (1, 1, 0)) is None
    assert world.pulling.landing(A, (1, 1, 7)) is None
    assert world.pulling.heard(A, Data(1, 1, (1,)), [HEADER], CHECKSUM) == []
    assert not world.verified, "it did not land"
    assert world.pulling.heard(A, Data(1, 1, (0,)), [HEADER], CHECKSUM) == []
    assert world.verified == [100]
    assert world.pulling.rows_from[A] == 1
    assert world.pulling.lost(A) == [Disconnect(A), JobEnded(1, (keys(1)[0],), ())]
    assert world.pulling.landing(A, (1, 1, 1)) is None


class AnyOrder(RuleBasedStateMachine):
    """Peers say anything at any time. Each question and each job has one end, and no row is written after its job's."""

    addresses, small = st.sampled_from([A, B]), st.integers(1, 3)

    def __init__(self) -> None:
        super().__init__()
        self.world = World(read_window=2)
        self.asked: set[tuple[int, int]] = set()
        self.found: dict[OffloadKey, Source] = {}
        self.jobs: dict[int, set[int]] = {}  # open ones and their rows
        self.round = self.job = 0

    def perform(self, steps: list[Instruction]) -> None:
        for step in steps:
            if isinstance(step, Answered):
                self.asked.remove((step.request, step.round))
                self.found.update(step.found)
            elif isinstance(step, JobEnded):
                del self.jobs[step.job_id]
        written = set(self.world.rows)
        assert written <= {row for rows in self.all_rows.values() for row in rows}
        self.world.pulling.check()

    @property
    def all_rows(self) -> dict[int, set[int]]:
        return {job: {100 * job + row for row in range(20)} for job in range(1, self.job + 1)}

    @rule(request=small, count=small, peers=st.sampled_from([[A], [A, B]]))
    def ask(self, request: int, count: int, peers: list[Address]) -> None:
        self.round += 1
        self.asked.add((request, self.round))
        self.perform(self.world.pulling.ask(request, self.round, keys(count), peers))

    @precondition(lambda self: self.found)
    @rule()
    def pull(self) -> None:
        self.job += 1
        self.jobs[self.job] = {100 * self.job + row for row in range(len(self.found))}
        found, self.found = self.found, {}
        self.perform(self.world.pull(found, self.job))

    @rule(request=small)
    def finish(self, request: int) -> None:
        self.perform(self.world.pulling.finish(request))

    @rule(address=addresses, engine=st.sampled_from(["one", "two"]))
    def welcome(self, address: Address, engine: str) -> None:
        self.perform(self.world.pulling.heard(address, Welcome(EPOCH, engine)))

    @rule(address=addresses, back=st.integers(0, 3), request=small, parts=st.sets(st.integers(0, 3)))
    def found_some(self, address: Address, back: int, request: int, parts: set[int]) -> None:
        answer = Found(request, max(0, self.round - back), EPOCH, tuple(sorted(parts)), 5.0)
        self.perform(self.world.pulling.heard(address, answer))

    @rule(address=addresses, back=st.integers(0, 3), request=small, part=st.integers(0, 3), good=st.booleans())
    def data(self, address: Address, back: int, request: int, part: int, good: bool) -> None:
        before, open_rows = set(self.world.rows), {row for rows in self.jobs.values() for row in rows}
        answer = Data(request, max(0, self.round - back), (part,))
        self.perform(self.world.pulling.heard(address, answer, [b"header", b"good" if good else b"bad"]))
        assert set(self.world.rows) - before <= open_rows, "a row was written after its job's end"

    @rule(address=addresses)
    def welcome_to_read(self, address: Address) -> None:
        steps = self.world.pulling.heard(address, Welcome(EPOCH, "reads", MEMORY))
        if Attach(address, MEMORY) in steps:
            self.world.pulling.can_read(address)
        self.perform(steps)

    @rule(address=addresses, back=st.integers(0, 3), request=small, parts=st.sets(st.integers(0, 3)))
    def found_to_read(self, address: Address, back: int, request: int, parts: set[int]) -> None:
        numbers = tuple(sorted(parts))
        answer = Found(request, max(0, self.round - back), EPOCH, numbers, 5.0, numbers)
        self.perform(self.world.pulling.heard(address, answer))

    @rule(address=addresses, back=st.integers(0, 3), request=small, part=st.integers(0, 3))
    def begin_to_land(self, address: Address, back: int, request: int, part: int) -> None:
        self.world.pulling.landing(address, (request, max(0, self.round - back), part))

    @rule(address=addresses, back=st.integers(0, 3), request=small, part=st.integers(0, 3))
    def land(self, address: Address, back: int, request: int, part: int) -> None:
        part_id = request, max(0, self.round - back), part
        self.perform(self.world.landed(address, part_id))
        self.perform(self.world.pulling.heard(address, Confirmed(*part_id[:2], (part,))))

    @rule(address=addresses, back=st.integers(0, 3), request=small, part=st.integers(0, 3))
    def prove(self, address: Address, back: int, request: int, part: int) -> None:
        proofs = Proofs(request, max(0, self.round - back), (part,), (PROOF,))
        self.perform(self.world.pulling.heard(address, proofs))

    @rule(address=addresses, back=st.integers(0, 3), request=small, part=st.integers(0, 3))
    def finish_landing(self, address: Address, back: int, request: int, part: int) -> None:
        data = Data(request, max(0, self.round - back), (part,))
        self.perform(self.world.pulling.heard(address, data, [HEADER], CHECKSUM))

    @rule(good=st.booleans())
    def what_lands_is(self, good: bool) -> None:
        self.world.wrong = set() if good else set().union(*self.all_rows.values())

    @rule(address=addresses, back=st.integers(0, 3), request=st.integers(0, 3), reason=st.sampled_from(Reason))
    def refuse(self, address: Address, back: int, request: int, reason: Reason) -> None:
        answer = Refuse(request, max(0, self.round - back), reason)
        self.perform(self.world.pulling.heard(address, answer))

    @rule(address=addresses)
    def lose(self, address: Address) -> None:
        self.perform(self.world.pulling.lost(address))

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.1, 11.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        self.perform(self.world.pulling.tick())
        timer = self.world.pulling.next_timer
        assert timer is None or timer > self.world.clock(), "a timer that is always due"

    @rule()
    def forget(self) -> None:
        self.perform(self.world.pulling.forget())
        assert not self.asked
        landing = [row for peer in self.world.pulling._peers.values() for row in peer.rows]
        assert self.jobs.keys() == {row.job.job_id for row in landing if row.dropped}, "only what is landing is open"

    @invariant()
    def open_ends_are_known(self) -> None:
        left = self.world.pulling.leftovers()
        assert left["questions"] == len(self.asked)
        assert left["jobs"] == len(self.jobs)

    def teardown(self) -> None:
        """Chaos is over: everything ends by time alone."""
        for _ in range(4):
            self.world.clock.advance(11.0)
            self.perform(self.world.pulling.tick())
        assert not self.asked
        assert not self.jobs


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class ReadsInAnyOrder(RuleBasedStateMachine):
    """A peer that reads come from answers everything, in any order, and refuses some rounds. Every job ends without
    time passing. Made to fail by rows that end without asking for more in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(read_window=2)
        self.jobs: set[int] = set()  # open ones
        self.refused: set[int] = set()  # rounds
        self.landing: list[PartId] = []
        self.readings: list[Reading] = []  # not proved
        self.confirms: list[Confirm] = []  # not answered
        self.round = 0
        ready_to_read(self.world, 1)

    def perform(self, steps: Sequence[Instruction]) -> None:
        for step in steps:
            match step:
                case Read(_, rows):
                    self.landing += [wanted.part_id for wanted in rows]
                case Say(_, Reading() as reading):
                    self.readings.append(reading)
                case Say(_, Confirm() as confirm):
                    self.confirms.append(confirm)
                case JobEnded(job_id):
                    self.jobs.remove(job_id)
        self.world.pulling.check()

    @rule(count=st.integers(1, 5))
    def pull(self, count: int) -> None:
        self.round += 1
        self.world.pulling.ask(2, self.round, keys(count), [A])
        numbers = tuple(range(count))
        [answered] = self.world.hear(A, Found(2, self.round, EPOCH, numbers, 10.0, numbers))
        assert isinstance(answered, Answered)
        self.jobs.add(self.round)
        self.perform(self.world.pull(answered.found, self.round))

    @precondition(lambda self: self.landing)
    @rule(which=st.integers(0, 99), count=st.integers(1, 3))
    def land(self, which: int, count: int) -> None:
        some = [self.landing.pop(which % len(self.landing)) for _ in range(min(count, len(self.landing)))]
        self.perform(self.world.landed(A, *some))

    @precondition(lambda self: self.readings)
    @rule(which=st.integers(0, 99))
    def prove(self, which: int) -> None:
        reading = self.readings.pop(which % len(self.readings))
        if reading.round not in self.refused:
            self.perform(self.world.hear(A, Proofs(2, reading.round, reading.parts, (PROOF,) * len(reading.parts))))

    @precondition(lambda self: self.confirms)
    @rule(which=st.integers(0, 99))
    def confirm(self, which: int) -> None:
        confirm = self.confirms.pop(which % len(self.confirms))
        while any(reading.round == confirm.round for reading in self.readings):
            self.prove(next(at for at, reading in enumerate(self.readings) if reading.round == confirm.round))
        if confirm.round not in self.refused:
            self.perform(self.world.hear(A, Confirmed(2, confirm.round, confirm.parts)))

    @precondition(lambda self: self.round)
    @rule(back=st.integers(0, 2))
    def refuse(self, back: int) -> None:
        self.refused.add(max(1, self.round - back))
        self.perform(self.world.hear(A, Refuse(2, max(1, self.round - back), Reason.GONE)))

    def teardown(self) -> None:
        while self.landing or self.readings or self.confirms:
            for answer, pending in (
                (lambda: self.land(0, 1), self.landing),
                (lambda: self.prove(0), self.readings),
                (lambda: self.confirm(0), self.confirms),
            ):
                if pending:
                    answer()
        assert not self.jobs
        assert self.world.pulling.leftovers()["rows"] == 0


TestReadsInAnyOrder = ReadsInAnyOrder.TestCase
TestReadsInAnyOrder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
