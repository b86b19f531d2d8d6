"""Rows that came from peers: what counts as the chunk that was asked for, and what does not."""

import logging

import pytest

from vllm_tiered_offload import OffloadKey
from vllm_tiered_offload.tiers.block_frame import Checksum, checksum_of, encode_header
from vllm_tiered_offload.tiers.p2p.bounded_log import BoundedLog
from vllm_tiered_offload.tiers.p2p.instructions import Address, Source, Wanted
from vllm_tiered_offload.tiers.p2p.messages import Proof
from vllm_tiered_offload.tiers.p2p.verifier import RowVerifier

pytestmark = pytest.mark.fast

KEY, OTHER = OffloadKey(b"wanted"), OffloadKey(b"another")
SPACE, ELSEWHERE = bytes(32), bytes([1]) * 32
RIGHT, WRONG = bytes(range(256)) * 32, bytes(range(255, -1, -1)) * 32
WANTED = Wanted(KEY, 1, Source(Address("a", 1), 1, 1, 0, bytes(16), 10.0))


def proof_of(payload: bytes, key: OffloadKey = KEY, algorithm: Checksum | None = None) -> Proof:
    checksum = checksum_of(payload, algorithm)
    return Proof(key, checksum.algorithm.value, checksum.digest)


@pytest.fixture
def rows() -> list[memoryview]:
    return [memoryview(bytearray(len(RIGHT))) for _ in range(2)]


@pytest.fixture
def verifier(rows: list[memoryview]) -> RowVerifier:
    return RowVerifier(SPACE, rows, BoundedLog(logging.getLogger(__name__)))


@pytest.mark.parametrize(
    ("proof", "right"),
    [
        (proof_of(RIGHT), True),
        (proof_of(RIGHT, algorithm=Checksum.BLAKE3), True),  # the peer lacks the library of the faster one
        (proof_of(WRONG), False),
        (proof_of(WRONG, algorithm=Checksum.BLAKE3), False),
        (proof_of(RIGHT, OTHER), False),
        (Proof(KEY, 99, checksum_of(RIGHT).digest), False),
        (Proof(KEY, Checksum.BLAKE3.value, checksum_of(RIGHT, Checksum.GMAC).digest), False),
        (encode_header(KEY, RIGHT, SPACE), True),
        (encode_header(KEY, RIGHT, SPACE, Checksum.BLAKE3), True),
        (encode_header(KEY, WRONG, SPACE), False),
        (encode_header(OTHER, RIGHT, SPACE), False),
        (encode_header(KEY, RIGHT, ELSEWHERE), False),
        (encode_header(KEY, RIGHT[:-1], SPACE), False),
        (b"", False),
    ],
)
def test_a_row_that_has_landed(
    verifier: RowVerifier, rows: list[memoryview], proof: bytes | Proof, right: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """D6. Made to fail by not looking at the key, at the namespace, at the checksum, and by comparing checksums of two
    algorithms."""
    rows[1][:] = RIGHT
    assert verifier.is_right(WANTED, proof, checksum_of(rows[1])) == right
    assert ("is not the chunk that was asked for" in caplog.text) != right


@pytest.mark.parametrize(
    ("header", "payload", "right"),
    [
        (encode_header(KEY, RIGHT, SPACE), RIGHT, True),
        (encode_header(KEY, RIGHT, SPACE), WRONG, False),
        (encode_header(KEY, RIGHT[:-1], SPACE), RIGHT[:-1], False),
        (encode_header(OTHER, RIGHT, SPACE), RIGHT, False),
    ],
)
def test_a_payload_gets_into_its_row_when_it_is_right(
    verifier: RowVerifier, rows: list[memoryview], header: bytes, payload: bytes, right: bool
) -> None:
    assert verifier.accept(WANTED, header, payload) == right
    assert bytes(rows[1]) == (payload if right else bytes(len(RIGHT)))
    assert bytes(rows[0]) == bytes(len(RIGHT))
