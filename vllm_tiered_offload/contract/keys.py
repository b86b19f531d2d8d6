"""Names of chunks.

An `OffloadKey` is the hash of a chunk's last block (of the one behind it where a draft model's layers are in the KV
group, see `scheduler.groups`) followed by its KV group index (4 bytes, big endian). Keys come from
`request.block_hashes` alone, so whatever vLLM mixes into a block hash (LoRA, multimodal inputs, cache_salt) keeps
chunks apart here too (D5).
"""

from collections.abc import Iterable
from typing import NewType

OffloadKey = NewType("OffloadKey", bytes)

GROUP_SUFFIX_BYTES = 4


def group_suffix(group_idx: int) -> bytes:
    """The bytes that a KV group adds to each of its keys."""
    return group_idx.to_bytes(GROUP_SUFFIX_BYTES, "big")


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """The key of the chunk that ends with the block hashed `block_hash`."""
    return OffloadKey(block_hash + group_suffix(group_idx))


def make_offload_keys(block_hashes: Iterable[bytes], group_idx: int) -> list[OffloadKey]:
    """One key per hash; the hashes are those of each chunk's last block, in prefix order."""
    suffix = group_suffix(group_idx)
    return [OffloadKey(block_hash + suffix) for block_hash in block_hashes]


def split_offload_key(key: OffloadKey) -> tuple[bytes, int]:
    """The block hash and the KV group index that `key` was made of."""
    return key[:-GROUP_SUFFIX_BYTES], int.from_bytes(key[-GROUP_SUFFIX_BYTES:], "big")
