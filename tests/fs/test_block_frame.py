"""The frame: whatever comes in, a header or a FrameError; no flipped bit goes unseen."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers import block_frame
from vllm_tiered_offload.tiers.block_frame import (
    HEADER_BYTES,
    MAGIC,
    MAX_KEY_BYTES,
    Checksum,
    FrameError,
    FrameFault,
    PayloadChecksum,
    RunningChecksum,
    checksum_of,
    decode_header,
    encode_header,
    encode_header_of,
    expect,
    verify,
)

KEY = OffloadKey(b"k" * 36)
SPACE = bytes(range(32))
PAYLOAD = bytes(range(256)) * 16
ALGORITHMS = list(block_frame._CHECKSUMS)


def reseal(header: bytearray) -> bytes:
    """The header with a checksum that matches what it says now."""
    seal = block_frame._CHECKSUMS[ALGORITHMS[0]]
    header[-16:] = seal(bytes(header[:-16]))
    return bytes(header)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(
    key=st.binary(max_size=80).map(OffloadKey),
    payload=st.binary(max_size=5000),
    space=st.binary(min_size=32, max_size=32),
)
@settings(max_examples=30, deadline=None)
def test_what_is_encoded_is_decoded(algorithm: Checksum, key: OffloadKey, payload: bytes, space: bytes) -> None:
    header = encode_header(key, payload, space, algorithm)
    assert len(header) == HEADER_BYTES
    frame = decode_header(header)
    assert (frame.key, frame.payload_bytes, frame.fingerprint, frame.algorithm) == (key, len(payload), space, algorithm)
    expect(frame, key, space, len(payload))
    verify(frame, payload)


@given(payload=st.binary(max_size=5000), cuts=st.lists(st.integers(0, 5000), max_size=4))
@settings(max_examples=30, deadline=None)
def test_a_payload_that_is_read_in_pieces_has_the_same_header(payload: bytes, cuts: list[int]) -> None:
    """And is found right and wrong as one that is read at once. Made to fail by leaving out the last piece."""
    pieces = [payload[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(payload)], strict=True)]

    def read(pieces: list[bytes]) -> PayloadChecksum:
        running = RunningChecksum(len(payload))
        for piece in pieces:
            running.add(piece)
        return running.finish()

    header = encode_header(KEY, payload, SPACE)
    assert encode_header_of(KEY, read(pieces), SPACE) == header
    verify(decode_header(header), payload, read(pieces))
    if payload:
        other = bytes([payload[0] ^ 1]) + payload[1:]
        with pytest.raises(FrameError, match="does not match"):
            verify(decode_header(header), other, read([other]))


@pytest.mark.skipif(len(ALGORITHMS) < 2, reason="one of the two libraries is not installed")
def test_a_header_of_the_other_algorithm_is_verified_all_the_same() -> None:
    """Made to fail by comparing checksums of two algorithms."""
    known = checksum_of(PAYLOAD)
    assert known.algorithm is Checksum.GMAC
    frame = decode_header(encode_header(KEY, PAYLOAD, SPACE, Checksum.BLAKE3))
    verify(frame, PAYLOAD, known)
    with pytest.raises(FrameError, match="does not match"):
        verify(frame, PAYLOAD[::-1], known)


@given(st.binary(max_size=200) | st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES + 10))
@settings(deadline=None)
def test_any_bytes_are_a_header_or_a_frame_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_header(data)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_headers_with_a_right_checksum_are_a_header_or_a_frame_error(data: st.DataObject) -> None:
    """Past the checksum: the fields themselves are nonsense."""
    header = bytearray(encode_header(KEY, PAYLOAD, SPACE, ALGORITHMS[0]))
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, 90))] = data.draw(st.integers(0, 255))
    try:
        frame = decode_header(reseal(header))
        verify(frame, PAYLOAD)
    except FrameError as error:
        assert error.kind in FrameFault  # noqa: PT017


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_flipped_bit_of_the_header_is_found(algorithm: Checksum) -> None:
    header = encode_header(KEY, PAYLOAD, SPACE, algorithm)
    positions = [*range(160), *range(160, HEADER_BYTES - 16, 131), *range(HEADER_BYTES - 16, HEADER_BYTES)]
    for position in positions:
        for bit in range(8):
            damaged = bytearray(header)
            damaged[position] ^= 1 << bit
            with pytest.raises(FrameError) as caught:
                decode_header(damaged)
            # Never "unsupported", which would leave the file there for ever.
            assert caught.value.kind is (FrameFault.FOREIGN if position < len(MAGIC) else FrameFault.CORRUPT)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_flipped_bit_of_the_payload_is_found(algorithm: Checksum) -> None:
    frame = decode_header(encode_header(KEY, PAYLOAD, SPACE, algorithm))
    for position in range(0, len(PAYLOAD), 7):
        damaged = bytearray(PAYLOAD)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(FrameError) as caught:
            verify(frame, damaged)
        assert caught.value.kind is FrameFault.CORRUPT


def test_faults_are_told_apart() -> None:
    header = encode_header(KEY, PAYLOAD, SPACE)
    newer, flagged, unknown = bytearray(header), bytearray(header), bytearray(header)
    newer[8], flagged[12], unknown[10] = 9, 1, 77
    newer, flagged, unknown[-16:] = reseal(newer), reseal(flagged), bytes(16)
    cases = [
        (header[:-1], FrameFault.SHORT),
        (b"", FrameFault.SHORT),
        (bytes(HEADER_BYTES), FrameFault.FOREIGN),
        (newer, FrameFault.FOREIGN),
        (flagged, FrameFault.UNSUPPORTED),
        (unknown, FrameFault.CORRUPT),
        (header[:-1] + bytes([header[-1] ^ 1]), FrameFault.CORRUPT),
    ]
    for data, kind in cases:
        with pytest.raises(FrameError) as caught:
            decode_header(data)
        assert caught.value.kind is kind


def test_another_chunk_or_namespace_is_foreign() -> None:
    frame = decode_header(encode_header(KEY, PAYLOAD, SPACE))
    for key, space, size in [(b"other", SPACE, 4096), (KEY, bytes(32), 4096), (KEY, SPACE, 4095)]:
        with pytest.raises(FrameError) as caught:
            expect(frame, OffloadKey(key), space, size)
        assert caught.value.kind is FrameFault.FOREIGN
    with pytest.raises(FrameError) as caught:
        verify(frame, PAYLOAD[:-1])
    assert caught.value.kind is FrameFault.SHORT


def test_a_swapped_payload_is_found() -> None:
    frame = decode_header(encode_header(KEY, PAYLOAD, SPACE))
    with pytest.raises(FrameError):
        verify(frame, PAYLOAD[16:] + PAYLOAD[:16])


@pytest.mark.skipif(len(ALGORITHMS) < 2, reason="one of the two libraries is not installed")
def test_without_the_fast_library_the_other_one_writes_and_foreign_ones_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = encode_header(KEY, PAYLOAD, SPACE)
    monkeypatch.setattr(block_frame, "_CHECKSUMS", {Checksum.BLAKE3: block_frame._CHECKSUMS[Checksum.BLAKE3]})
    assert decode_header(encode_header(KEY, PAYLOAD, SPACE)).algorithm is Checksum.BLAKE3
    with pytest.raises(FrameError) as caught:
        decode_header(fast)
    assert caught.value.kind is FrameFault.UNSUPPORTED


def test_what_cannot_be_framed() -> None:
    for key, space in [(OffloadKey(b"x" * (MAX_KEY_BYTES + 1)), SPACE), (KEY, b"short")]:
        with pytest.raises(ValueError, match="no frame for"):
            encode_header(key, b"", space)
