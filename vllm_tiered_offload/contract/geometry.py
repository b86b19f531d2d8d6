"""Shape of the host region.

The region is an array of rows. One row holds one chunk: `blocks_per_chunk` device blocks of one KV group, the slots of
all ranks side by side. Rows are padded to 4096 bytes so that O_DIRECT and RDMA registration work on every row.

    row:   | rank 0 slot | rank 1 slot | ... | padding to 4096 |
    slot:  | block 0 | block 1 | ... | block blocks_per_chunk-1 |
    block: | page of layer 0 | page of layer 1 | ... |        (packed, the worker's KV tensor layout decides the order)

With several KV groups of different size a slot is as long as the largest group needs. A rank whose KV the one before it
holds as well (MLA) has a slot of no bytes, and loads from that one's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ROW_ALIGNMENT = 4096


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV group on one rank: tokens a block and bytes a block (all layers of the group, packed)."""

    block_tokens: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class RegionGeometry:
    """Rows of the host region; `slot_bytes[rank]` is the part of each row that this rank writes."""

    num_rows: int
    slot_bytes: tuple[int, ...]
    blocks_per_chunk: int

    @classmethod
    def fit(cls, capacity: int, slot_bytes: Sequence[int], blocks_per_chunk: int) -> "RegionGeometry":
        """As many rows as fit into `capacity` bytes (0 rows when not even one does)."""
        one = cls(1, tuple(slot_bytes), blocks_per_chunk)
        return cls(capacity // one.row_bytes, one.slot_bytes, blocks_per_chunk)

    @property
    def num_ranks(self) -> int:
        """Workers that share each row."""
        return len(self.slot_bytes)

    @property
    def row_bytes(self) -> int:
        """Distance between rows, padding included."""
        return round_up(sum(self.slot_bytes), ROW_ALIGNMENT)

    @property
    def total_bytes(self) -> int:
        """Size of the whole mapping."""
        return self.num_rows * self.row_bytes

    def slot_offset(self, rank: int) -> int:
        """Where rank `rank`'s slot begins inside a row."""
        return list(accumulate(self.slot_bytes, initial=0))[rank]
