"""What the kit makes tests of: keys like vLLM's, bytes that belong to one key, rows, fingerprints, opt-outs."""

import hashlib
import mmap
from typing import Literal

import pytest

from vllm_tiered_offload.contract.fingerprint import FIELDS, Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.keys import OffloadKey, make_offload_key

Support = Literal[True] | str
"""True, or the reason why a tier does not do it, which the skipped tests show."""


def require(support: object, what: str) -> None:
    """Skip the test, and say why, unless `support` is True."""
    if support is not True:
        pytest.skip(f"opted out of {what}: {support}")


def keys_of(name: str, count: int, *, start: int = 0, hash_bytes: int = 32, group: int = 0) -> list[OffloadKey]:
    """Keys of one prefix, head first: `hash_bytes` of hash and the KV group's four."""
    hashes = (hashlib.shake_128(f"{name}/{index}".encode()).digest(hash_bytes) for index in range(start, start + count))
    return [make_offload_key(block_hash, group) for block_hash in hashes]


def content(key: OffloadKey, size: int, salt: str = "") -> bytes:
    """The bytes of a chunk: no two keys, and no two salts, have the same."""
    return hashlib.shake_128(salt.encode() + b"/" + key).digest(size)


def make_rows(geometry: RegionGeometry) -> list[memoryview]:
    """Rows of one page-aligned mapping, as in production."""
    whole, size = memoryview(mmap.mmap(-1, geometry.total_bytes)), geometry.row_bytes
    return [whole[index * size : (index + 1) * size] for index in range(geometry.num_rows)]


def make_fingerprint(**changes: object) -> Fingerprint:
    """The fingerprint of an engine; one that differs in `changes` has other bytes."""
    return Fingerprint.of({**dict.fromkeys(FIELDS, None), "model": "conformance", **changes})
