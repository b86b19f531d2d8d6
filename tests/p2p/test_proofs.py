"""Proofs of rows that are read: worked out once for a row as it is, and anew for what it holds next."""

from typing import Any

import pytest
from p2p_kit import ROW, content, keys_of

from vllm_tiered_offload.tiers.block_frame import checksum_of
from vllm_tiered_offload.tiers.p2p import proofs as proofs_module
from vllm_tiered_offload.tiers.p2p.leases import PromisedRow
from vllm_tiered_offload.tiers.p2p.proofs import RowProofs

pytestmark = pytest.mark.fast

KEYS = keys_of("proved", 4)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Payloads that were read for their checksum."""
    payloads: list[bytes] = []

    def reading(payload: bytes, *more: Any) -> Any:
        payloads.append(payload)
        return checksum_of(payload, *more)

    monkeypatch.setattr(proofs_module, "checksum_of", reading)
    return payloads


def test_a_row_is_read_once_as_long_as_it_is_the_same(read: list[bytes]) -> None:
    """Whoever asks, for whatever part. Made to fail by keeping nothing."""
    proofs = RowProofs(4, ROW)
    for part in range(3):
        for index, key in enumerate(KEYS):
            row = PromisedRow(part, key, index, 7)
            assert proofs.has(row) == (part > 0)
            proof = proofs.of(row, content(key, ROW))
            assert (proof.key, proof.checksum) == (key, checksum_of(content(key, ROW)).digest)
    assert read == [content(key, ROW) for key in KEYS]


@pytest.mark.parametrize("version", [0, 8])
def test_another_version_is_read_again(read: list[bytes], version: int) -> None:
    """Older ones too: nothing is assumed of how they are numbered. Made to fail by keeping proofs by row alone."""
    proofs = RowProofs(4, ROW)
    proofs.of(PromisedRow(0, KEYS[0], 1, 7), content(KEYS[0], ROW))
    again = PromisedRow(0, KEYS[0], 1, version)
    assert not proofs.has(again)
    assert proofs.of(again, content(KEYS[0], ROW, "anew")).checksum == checksum_of(content(KEYS[0], ROW, "anew")).digest
    assert len(read) == 2
    assert not proofs.has(PromisedRow(0, KEYS[0], 1, 7))
    assert not any(proofs.has(PromisedRow(0, KEYS[0], row, version)) for row in (0, 2, 3))
