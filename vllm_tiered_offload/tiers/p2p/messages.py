"""What two engines say to each other: the puller asks, the owner answers.

    puller                                    owner
    Hello (version, fingerprint, geometry) -> Welcome (epoch), or Refuse and nothing else
    Lookup (request, round, keys)          -> Found (which of the keys are promised, where, and for how long)
    Fetch (request, round, epoch, parts)   -> Data, with the rows and their frame headers behind it
    Reading (request, round, epoch, parts) -> Proofs (key and checksum of each), bit by bit, while the puller reads
                                              these rows out of the owner's memory
    Confirm (request, round, epoch, parts) -> Confirmed, if the promise held until now; never before their Proofs
    Release (request, round)                  no answer
    Ping (number)                          -> Pong (the same number), from the thread that serves
                                              Refuse (request, round, reason) instead of any answer

A message is one MessagePack array: its tag, then its fields. Only Data has something behind it: of each of its parts
the row and the header of tiers/block_frame.py. An owner whose memory can be read says so in its Welcome; then Reading
and Confirm take the place of Fetch, if the puller likes. (request, round) is the puller's own numbering; a round is one
question, and rounds of one request have nothing to do with each other.

Every message is bounded in size and in the number of what it holds, and read strictly: `decode` gives a message of
these types with values within these bounds, or raises MessageError and nothing else, whatever the bytes are.
"""

from enum import Enum
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from vllm_tiered_offload.tiers.block_frame import CHECKSUM_BYTES

PROTOCOL_VERSION = 5

MAX_KEYS = 8192
MAX_KEY_BYTES = 128
MAX_PARTS = 32  # of one Fetch; what one peer has been sent and has not read is bounded by it
MAX_READ_PARTS = 512  # of one Reading, and of what is said about what is read
MAX_RANKS = 1024
MAX_MESSAGE_BYTES = MAX_KEYS * (MAX_KEY_BYTES + 3) + 4096
EPOCH_BYTES = 16
MAX_AGENT_BYTES = 1 << 16
DIGEST_BYTES = 16

_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Epoch = Annotated[bytes, Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]
_EngineId = Annotated[str, Meta(max_length=256)]
_Key = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
_Part = Annotated[int, Meta(ge=0, lt=MAX_KEYS)]
_Parts = Annotated[tuple[_Part, ...], Meta(min_length=1, max_length=MAX_PARTS)]
_ReadParts = Annotated[tuple[_Part, ...], Meta(min_length=1, max_length=MAX_READ_PARTS)]


class MessageError(ValueError):
    """The bytes are no message."""


class Reason(Enum):
    """Why the owner does not do what it was asked for."""

    VERSION = "version"  # it speaks another version of the protocol
    FINGERPRINT = "fingerprint"  # its bytes are other ones
    GEOMETRY = "geometry"  # its rows have another shape
    NOT_ALLOWED = "not_allowed"  # the session belongs to another key
    NO_HELLO = "no_hello"  # something else was said before Hello, or the session is forgotten
    MALFORMED = "malformed"  # no message, or not one for an owner
    BUSY = "busy"  # no room for another session or promise now
    GONE = "gone"  # no such promise: never made, released, or past its deadline
    STALE = "stale"  # the promise is of an earlier epoch
    RANGE = "range"  # the promise has no such part
    REPLAYED = "replayed"  # the part was fetched before


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Base of all messages."""


class Hello(_Message, tag="hello", frozen=True):
    """The first message of a session. `fingerprint` is the digest of the namespace."""

    version: _Number
    fingerprint: _Digest
    slot_bytes: Annotated[tuple[_Number, ...], Meta(max_length=MAX_RANKS)]
    blocks_per_chunk: _Number
    engine_id: _EngineId


class Memory(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The owner's region, for a READ. `agent` is NIXL's description of it, `base` the address of row 0.

    NIXL believes a damaged description, so there is a `digest` (nixl_agent.py) over all of it.
    """

    agent: Annotated[bytes, Meta(min_length=1, max_length=MAX_AGENT_BYTES)]
    base: _Number
    num_rows: _Number
    row_bytes: _Number
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Welcome(_Message, tag="welcome", frozen=True):
    """The session is open. `epoch` changes with each start and each reset of the owner."""

    epoch: _Epoch
    engine_id: _EngineId
    memory: Memory | None = None


class Lookup(_Message, tag="lookup", frozen=True):
    """Which of these keys are there? They are promised along with the answer."""

    request: _Number
    round: _Number
    keys: Annotated[tuple[_Key, ...], Meta(min_length=1, max_length=MAX_KEYS)]


class Found(_Message, tag="found", frozen=True):
    """These parts of the Lookup (positions in its keys) are pinned until fetched or released, or `seconds` are over."""

    request: _Number
    round: _Number
    epoch: _Epoch
    parts: Annotated[tuple[_Part, ...], Meta(max_length=MAX_KEYS)]
    seconds: Annotated[float, Meta(ge=0, le=86400)]
    rows: Annotated[tuple[_Number, ...], Meta(max_length=MAX_KEYS)] = ()  # of the region, one for each of `parts`


class Fetch(_Message, tag="fetch", frozen=True):
    """Send the rows of these parts, which are positions in the keys of the Lookup."""

    request: _Number
    round: _Number
    epoch: _Epoch
    parts: _Parts


class Data(_Message, tag="data", frozen=True):
    """These parts. Of each, the row and its frame header follow."""

    request: _Number
    round: _Number
    parts: _Parts


class Reading(_Message, tag="reading", frozen=True):
    """These parts are being read out of the owner's memory: prove them, and help, unless they are read `alone`."""

    request: _Number
    round: _Number
    epoch: _Epoch
    parts: _ReadParts
    alone: bool = False


class Confirm(_Message, tag="confirm", frozen=True):
    """These parts have been read. Were they promised all the time?"""

    request: _Number
    round: _Number
    epoch: _Epoch
    parts: _ReadParts


class Proof(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a row was while it was promised: a chunk, and the checksum of its bytes, by the algorithm's number.

    The rest of a frame header is the same for all rows of a session.
    """

    key: _Key
    algorithm: _Number
    checksum: Annotated[bytes, Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]


class Proofs(_Message, tag="proofs", frozen=True):
    """One for each of these parts."""

    request: _Number
    round: _Number
    parts: _ReadParts
    proofs: Annotated[tuple[Proof, ...], Meta(min_length=1, max_length=MAX_READ_PARTS)]


class Confirmed(_Message, tag="confirmed", frozen=True):
    """These parts were promised all the time."""

    request: _Number
    round: _Number
    parts: _ReadParts


class Release(_Message, tag="release", frozen=True):
    """Nothing more of this round will be fetched."""

    request: _Number
    round: _Number


class Refuse(_Message, tag="refuse", frozen=True):
    """Of the whole session where `request` and `round` are 0."""

    request: _Number
    round: _Number
    reason: Reason


class Ping(_Message, tag="ping", frozen=True):
    """Is the thread that serves alive?"""

    number: _Number


class Pong(_Message, tag="pong", frozen=True):
    """It is."""

    number: _Number


Question: TypeAlias = Hello | Lookup | Fetch | Reading | Confirm | Release | Ping
"""What a puller says."""

Answer: TypeAlias = Welcome | Found | Data | Proofs | Confirmed | Refuse | Pong
"""What an owner says."""

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

Buffer: TypeAlias = bytes | bytearray | memoryview

T = TypeVar("T")


def encode(message: Question | Answer) -> bytes:
    """As it goes over the wire."""
    return _encoder.encode(message)


def decode_question(data: Buffer) -> Question:
    """What a puller said. Raises MessageError for everything else."""
    return _decode(_questions, data)


def decode_answer(data: Buffer) -> Answer:
    """What an owner said; of Data, what comes in front of header and row. Raises MessageError for everything else."""
    return _decode(_answers, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: Buffer) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"{len(data)} bytes are too many")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(str(error)) from error
