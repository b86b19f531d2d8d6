"""The wire messages: what is written is read again, and whatever else comes is a MessageError."""

import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_offload.tiers.block_frame import CHECKSUM_BYTES
from vllm_tiered_offload.tiers.p2p.messages import (
    EPOCH_BYTES,
    MAX_AGENT_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
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
    MessageError,
    Ping,
    Pong,
    Proof,
    Proofs,
    Question,
    Reading,
    Reason,
    Refuse,
    Release,
    Welcome,
    decode_answer,
    decode_question,
    encode,
)

pytestmark = pytest.mark.fast

numbers = st.integers(0, (1 << 63) - 1)
epochs = st.binary(min_size=EPOCH_BYTES, max_size=EPOCH_BYTES)
names = st.text(max_size=40)
parts = st.integers(0, MAX_KEYS - 1)
keys = st.binary(min_size=1, max_size=MAX_KEY_BYTES)

proofs = st.builds(Proof, keys, numbers, st.binary(min_size=CHECKSUM_BYTES, max_size=CHECKSUM_BYTES))
memories = st.builds(Memory, st.binary(min_size=1, max_size=99), *[numbers] * 3, st.binary(min_size=16, max_size=16))

questions: st.SearchStrategy[Question] = st.one_of(
    st.builds(
        Hello, numbers, st.binary(min_size=32, max_size=32), st.lists(numbers, max_size=4).map(tuple), numbers, names
    ),
    st.builds(Lookup, numbers, numbers, st.lists(keys, min_size=1, max_size=8).map(tuple)),
    *(
        st.builds(message, numbers, numbers, epochs, st.lists(parts, min_size=1, max_size=8).map(tuple))
        for message in (Fetch, Reading, Confirm)
    ),
    st.builds(Reading, numbers, numbers, epochs, st.lists(parts, min_size=1, max_size=8).map(tuple), st.booleans()),
    st.builds(Release, numbers, numbers),
    st.builds(Ping, numbers),
)
answers: st.SearchStrategy[Answer] = st.one_of(
    st.builds(Welcome, epochs, names, st.none() | memories),
    st.builds(
        Found,
        *(numbers, numbers, epochs, st.lists(parts, max_size=8).map(tuple), st.floats(0, 86400)),
        st.lists(numbers, max_size=8).map(tuple),
    ),
    st.builds(Proofs, numbers, numbers, st.just((0, 1)), st.tuples(proofs, proofs)),
    st.builds(Confirmed, numbers, numbers, st.lists(parts, min_size=1, max_size=8).map(tuple)),
    st.builds(Data, numbers, numbers, st.lists(parts, min_size=1, max_size=MAX_PARTS).map(tuple)),
    st.builds(Refuse, numbers, numbers, st.sampled_from(Reason)),
    st.builds(Pong, numbers),
)

# MessagePack that no message is: the types nest and have sizes of their own.
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)
TAGS = [
    *("hello", "welcome", "lookup", "found", "fetch", "data", "reading", "confirm", "proofs", "confirmed"),
    *("release", "refuse", "ping", "pong"),
]


def verdict(data: bytes) -> None:
    """Reading gives a message or a MessageError; anything else fails the test."""
    for decode in (decode_question, decode_answer):
        try:
            message = decode(data)
        except MessageError:
            continue
        assert decode(encode(message)) == message


@given(questions)
def test_question_is_read_as_it_was_written(question: Question) -> None:
    assert decode_question(encode(question)) == question


@given(answers)
def test_answer_is_read_as_it_was_written(answer: Answer) -> None:
    assert decode_answer(encode(answer)) == answer


@given(questions, answers)
def test_each_side_says_only_what_is_its_own(question: Question, answer: Answer) -> None:
    """Made to fail by one decoder for both."""
    with pytest.raises(MessageError):
        decode_answer(encode(question))
    with pytest.raises(MessageError):
        decode_question(encode(answer))


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes_get_a_verdict(data: bytes) -> None:
    verdict(data)


@settings(max_examples=200)
@given(questions | answers, st.data())
def test_damaged_messages_get_a_verdict(message: Question | Answer, data: st.DataObject) -> None:
    """Bytes changed, cut off, added and doubled in a message of every type."""
    whole = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole)))
        match data.draw(st.sampled_from(["change", "cut", "insert", "double"])):
            case "change":
                whole[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del whole[at:]
            case "insert":
                whole[at:at] = data.draw(st.binary(max_size=5))
            case "double":
                whole += whole[at:]
    verdict(bytes(whole))


@settings(max_examples=200)
@given(st.sampled_from(TAGS), st.lists(values, max_size=7))
def test_wrong_fields_get_a_verdict(tag: str, fields: list[object]) -> None:
    verdict(msgspec.msgpack.encode([tag, *fields]))


EPOCH = bytes(EPOCH_BYTES)


@pytest.mark.parametrize(
    "beyond",
    [
        Hello(1, bytes(31), (), 1, ""),
        Hello(1, bytes(32), (-1,), 1, ""),
        Hello(1, bytes(32), (1,) * 1025, 1, ""),
        Hello(1, bytes(32), (), 1, "e" * 257),
        Lookup(0, 0, ()),
        Lookup(-1, 0, (b"k",)),
        Lookup(1 << 63, 0, (b"k",)),
        Lookup(0, 0, (b"",)),
        Lookup(0, 0, (bytes(MAX_KEY_BYTES + 1),)),
        Lookup(0, 0, (b"k",) * (MAX_KEYS + 1)),
        Fetch(0, 0, EPOCH, ()),
        Fetch(0, 0, EPOCH, (MAX_KEYS,)),
        Fetch(0, 0, EPOCH, (0,) * (MAX_PARTS + 1)),
        Reading(0, 0, EPOCH, (0,) * (MAX_READ_PARTS + 1)),
        Confirm(0, 0, EPOCH, (0,) * (MAX_READ_PARTS + 1)),
        Fetch(0, 0, EPOCH[1:], (0,)),
    ],
)
def test_question_beyond_a_bound_is_refused(beyond: Question) -> None:
    with pytest.raises(MessageError):
        decode_question(encode(beyond))


@pytest.mark.parametrize(
    "beyond",
    [
        Found(0, 0, EPOCH, (1,), float("nan")),
        Found(0, 0, EPOCH, (1,), float("inf")),
        Found(0, 0, EPOCH, (1,), -1.0),
        Found(0, 0, EPOCH, (-1,), 1.0),
        Data(0, 0, (MAX_KEYS,)),
        Welcome(b"", ""),
        Welcome(EPOCH, "", Memory(bytes(MAX_AGENT_BYTES + 1), 0, 0, 0, bytes(16))),
        Welcome(EPOCH, "", Memory(b"agent", -1, 0, 0, bytes(16))),
        Proofs(0, 0, (0,), (Proof(b"k", 1, bytes(CHECKSUM_BYTES - 1)),)),
        Proofs(0, 0, (0,), (Proof(b"", 1, bytes(CHECKSUM_BYTES)),)),
        Proofs(0, 0, (0,), (Proof(b"k", 1, bytes(CHECKSUM_BYTES)),) * (MAX_READ_PARTS + 1)),
        Confirmed(0, 0, (0,) * (MAX_READ_PARTS + 1)),
    ],
)
def test_answer_beyond_a_bound_is_refused(beyond: Answer) -> None:
    with pytest.raises(MessageError):
        decode_answer(encode(beyond))


def test_largest_question_fits() -> None:
    """Otherwise the largest question that a puller may put would be cut off by the socket."""
    largest = Lookup((1 << 63) - 1, (1 << 63) - 1, (bytes(MAX_KEY_BYTES),) * MAX_KEYS)
    assert len(encode(largest)) <= MAX_MESSAGE_BYTES
    assert decode_question(encode(largest)) == largest
    with pytest.raises(MessageError):
        decode_question(encode(largest) + bytes(MAX_MESSAGE_BYTES))


@pytest.mark.parametrize(
    "claim", [b"\xdd\x7f\xff\xff\xff", b"\xdc\x1f\xff", b"\xc6\x7f\xff\xff\xff", b"\xdb\x7f\xff\xff\xff"]
)
def test_a_claimed_length_allocates_nothing(claim: bytes) -> None:
    """An array, a byte string or a text that says it has two thousand million items, and has none."""
    tracemalloc.start()
    try:
        for tag in TAGS:
            for field in range(6):
                verdict(bytes([0x90 + field + 2, 0xA0 + len(tag)]) + tag.encode() + bytes(field) + claim)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
