"""A layout's pieces, put together again to the longest fragments that one copy can move.

`GroupLayout` cuts all runs to one length so that one index array addresses them. An engine that takes a length with
each copy needs fewer, longer ones:

    byte j of fragment f of device block b  =  memory[address[f] + b * stride[f] + j]
                                            =  packed block[offset[f] + j],      j < length[f]
"""

from dataclasses import dataclass

import numpy as np

from vllm_tiered_offload.worker.copy_plan import CopyPlan
from vllm_tiered_offload.worker.layout import GroupLayout


@dataclass(frozen=True, slots=True, eq=False)
class BlockFragments:
    """Int64 vectors of one length, in bytes; see the module text."""

    address: np.ndarray
    stride: np.ndarray
    offset: np.ndarray
    length: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Addresses and lengths of copies between device and region, int64 vectors of one length, in bytes."""

    device: np.ndarray
    region: np.ndarray
    length: np.ndarray

    @property
    def num_bytes(self) -> int:
        return int(self.length.sum())


def block_fragments(layout: GroupLayout) -> BlockFragments:
    """The fragments of a block in packed order. Pieces that are neighbours in every block become one."""
    address, stride, piece = layout.piece_address, layout.piece_stride, layout.piece_bytes
    joins = (address[1:] == address[:-1] + piece) & (stride[1:] == stride[:-1])
    first = np.concatenate([[0], np.flatnonzero(~joins) + 1])
    pieces = np.diff(np.append(first, len(address)))
    return BlockFragments(address[first], stride[first], first * piece, pieces * piece)


def copies_of(plan: CopyPlan, fragments: BlockFragments, block_bytes: int, slots: np.ndarray) -> Copies:
    """Every copy of a plan, in prefix order; those that continue each other on both sides, inside a row, are one.

    slots: uint8 (num_rows, slot_bytes), this rank's part of each row.
    """
    row = plan.rows * slots.strides[0] + plan.sub_blocks * block_bytes + slots.ctypes.data
    device = (plan.device_blocks[:, None] * fragments.stride + fragments.address).ravel()
    region = (row[:, None] + fragments.offset).ravel()
    length = np.tile(fragments.length, plan.num_blocks)
    joins = (device[1:] == device[:-1] + length[:-1]) & (region[1:] == region[:-1] + length[:-1])
    if not joins.any():
        return Copies(device, region, length)
    rows = np.repeat(plan.rows, len(fragments.length))
    joins &= rows[1:] == rows[:-1]
    first = np.concatenate([[0], np.flatnonzero(~joins) + 1])
    return Copies(device[first], region[first], np.add.reduceat(length, first))
