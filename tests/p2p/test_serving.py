"""Who is listened to, and what is answered (case 60: mismatches are found before anything is said)."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from p2p_kit import FINGERPRINT, Memory, keys_of
from test_messages import questions

from vllm_tiered_offload.testing.conformance.material import make_fingerprint
from vllm_tiered_offload.testing.fakes.seams import ManualClock
from vllm_tiered_offload.tiers.p2p.leases import PromiseLimits, Promises
from vllm_tiered_offload.tiers.p2p.messages import (
    Fetch,
    Found,
    Hello,
    Lookup,
    Ping,
    Pong,
    Question,
    Reason,
    Refuse,
    Release,
    Welcome,
    encode,
)
from vllm_tiered_offload.tiers.p2p.serving import (
    IDLE_SECONDS,
    MAX_SESSIONS,
    ConfirmParts,
    Owner,
    Reply,
    SendRows,
    greeting,
)

pytestmark = pytest.mark.fast

KEYS = keys_of("served", 4)


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.memory = Memory()
        self.memory.put(KEYS)
        promises = Promises(self.memory.primary, set(KEYS), PromiseLimits(10.0, 16, 16), clock=self.clock)
        self.hello = greeting(FINGERPRINT, self.memory.geometry, "owner")
        self.owner = Owner(self.hello, promises, clock=self.clock)

    def say(self, question: Question, peer: bytes = b"peer", user: str = "") -> Reply | None:
        return self.owner.receive(peer, user, encode(question))

    def done(self, reply: SendRows | ConfirmParts, peer: bytes = b"peer") -> None:
        parts = reply.parts if isinstance(reply, ConfirmParts) else [row.part for row in reply.rows]
        self.owner.promises.done(peer, reply.request, reply.round, parts)


@pytest.fixture
def world() -> World:
    return World()


def refusal(reason: Reason, request: int = 0, round_: int = 0) -> Refuse:
    return Refuse(request, round_, reason)


@pytest.mark.parametrize("question", [Lookup(1, 1, tuple(KEYS)), Fetch(1, 1, bytes(16), (0,)), Release(1, 1), Ping(1)])
def test_a_stranger_is_told_nothing(world: World, question: Question) -> None:
    """Made to fail by looking keys up before the greeting."""
    assert world.say(question) == refusal(Reason.NO_HELLO)
    assert world.memory.pinned == 0


@pytest.mark.parametrize("reason", [Reason.VERSION, Reason.FINGERPRINT, Reason.GEOMETRY])
def test_case_60_a_mismatch_is_refused_at_the_greeting(world: World, reason: Reason) -> None:
    """Case 60: other weights, other rows, another protocol. Made to fail by leaving one of the three checks out."""
    own, other = world.hello, greeting(make_fingerprint(model="other"), world.memory.geometry, "x")
    hello = {
        Reason.VERSION: Hello(own.version + 1, own.fingerprint, own.slot_bytes, own.blocks_per_chunk, "x"),
        Reason.FINGERPRINT: other,
        Reason.GEOMETRY: Hello(own.version, own.fingerprint, (2048, 2048), own.blocks_per_chunk, "x"),
    }[reason]
    assert world.say(hello) == refusal(reason)
    assert world.say(Lookup(1, 1, tuple(KEYS))) == refusal(Reason.NO_HELLO)


def test_a_session_from_its_greeting_to_its_last_row(world: World) -> None:
    welcome = world.say(world.hello)
    assert isinstance(welcome, Welcome)
    assert world.say(Ping(7)) == Pong(7)
    found = world.say(Lookup(1, 1, (*KEYS, b"absent")))
    assert isinstance(found, Found)
    assert found == Found(1, 1, welcome.epoch, (0, 1, 2, 3), 10.0, found.rows)
    rows = world.say(Fetch(1, 1, welcome.epoch, (0, 1, 2, 3)))
    assert isinstance(rows, SendRows)
    assert [row.key for row in rows.rows] == KEYS
    assert world.memory.pinned == 4
    world.done(rows)
    assert world.memory.pinned == 0
    assert world.say(Release(1, 1)) is None


def test_a_mismatch_ends_the_session_that_there_was(world: World) -> None:
    world.say(world.hello)
    world.say(Lookup(1, 1, tuple(KEYS)))
    world.say(greeting(make_fingerprint(model="other"), world.memory.geometry, "x"))
    assert world.memory.pinned == 0
    assert world.say(Ping(1)) == refusal(Reason.NO_HELLO)


def test_a_session_is_its_keys_own(world: World) -> None:
    """Under CURVE a connection can choose its routing id, never its key. Made to fail by not comparing users."""
    world.say(world.hello, user="key a")
    assert world.say(Lookup(1, 1, tuple(KEYS)), user="key b") == refusal(Reason.NOT_ALLOWED)
    assert isinstance(world.say(Lookup(1, 1, tuple(KEYS)), user="key a"), Found)


def test_garbage_ends_a_session_and_gets_no_answer_from_a_stranger_s(world: World) -> None:
    assert world.owner.receive(b"stranger", "", b"garbage") is None
    world.say(world.hello)
    world.say(Lookup(1, 1, tuple(KEYS)))
    assert world.owner.receive(b"peer", "", b"garbage") == refusal(Reason.MALFORMED)
    assert world.memory.pinned == 0
    assert world.owner.num_sessions == 0


def test_sessions_are_bounded(world: World) -> None:
    """A silent one makes room, a living one does not. Made to fail by leaving the bound out."""
    for number in range(MAX_SESSIONS):
        assert isinstance(world.say(world.hello, peer=b"%d" % number), Welcome)
    assert world.say(world.hello) == refusal(Reason.BUSY)
    world.clock.advance(IDLE_SECONDS)
    world.say(Ping(1), peer=b"0")
    assert isinstance(world.say(world.hello), Welcome)
    assert world.owner.num_sessions == MAX_SESSIONS
    assert world.say(Ping(1), peer=b"0") == Pong(1)
    assert world.say(Ping(1), peer=b"1") == refusal(Reason.NO_HELLO)


def test_after_a_reset_everybody_greets_again(world: World) -> None:
    world.say(world.hello)
    world.say(Lookup(1, 1, tuple(KEYS)))
    world.owner.reset()
    assert world.memory.pinned == 0
    assert world.say(Ping(1)) == refusal(Reason.NO_HELLO)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), questions | st.binary(max_size=30)), max_size=12))
def test_any_conversation_gets_answers(said: list[tuple[bytes, Question | bytes]]) -> None:
    """Nothing raises, nothing is pinned beyond the end."""
    world = World()
    world.say(world.hello, peer=b"a")
    for peer, what in said:
        reply = world.owner.receive(peer, "", what if isinstance(what, bytes) else encode(what))
        if isinstance(reply, SendRows | ConfirmParts):
            world.done(reply, peer)
        world.owner.promises.check()
    world.owner.reset()
    assert world.memory.pinned == 0
