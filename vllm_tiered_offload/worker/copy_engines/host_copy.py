"""Byte copies between host tensors and slots, one numpy call for many pages.

numpy's index arrays can gather and scatter only within one array, and a group's layers are many. So both sides are seen
through a *window*: an array of overlapping `piece`-byte items over a stretch of address space, `unit` bytes apart. Item
i of the window is the piece at `base + i * unit`, and a copy of any number of pages of any number of layers is

    destination_window[destination_index] = source_window[source_index]

The device window spans from the group's lowest to its highest byte; what lies between the tensors is never addressed,
because every index is a layout's piece plus a block id that the plan has checked.

Why this and not slices or torch (2 cores, one thread, 30 layers x 24 KiB pages, GB/s store/load): windows 8.2/9.5;
index arrays per layer 7.1/6.2; one slice per page 7.2/7.6; torch._foreach_copy_ 5.8/5.5; torch index_copy_ 4.9/4.8.
With another thread busy in Python: windows 1.9/2.6, one slice per page 0.03/0.02 (it asks for the GIL for every page).
"""

from math import gcd

import numpy as np

from vllm_tiered_offload.worker.copy_engines.base import Direction
from vllm_tiered_offload.worker.copy_plan import CopyPlan
from vllm_tiered_offload.worker.layout import GroupLayout

# numpy lets go of the GIL only from 500 items on, so pieces are kept small and calls large.
MAX_PIECE_BYTES = 4096
CALL_BYTES = 4 << 20
# A row at least this long is copied in a call of its own: its slot is contiguous, which saves one pass over the bytes.
WHOLE_ROW_BYTES = 2 << 20


class _Memory:
    """Address space, told to numpy."""

    def __init__(self, address: int, items: int, unit: int, piece: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (items,),
            "strides": (unit,),
            "typestr": f"|V{piece}",
            "version": 3,
        }


class HostGroupCopier:
    """Copies blocks of one KV group whose tensors are in host memory.

    slots: uint8 (num_rows, slot_bytes); rows may be any distance apart, bytes of a slot are contiguous.
    Raises ValueError when the slots cannot hold the group's chunks or the tensors are not in host memory.
    """

    def __init__(self, layout: GroupLayout, slots: np.ndarray, blocks_per_chunk: int) -> None:
        _refuse_unfit(layout, slots, blocks_per_chunk)
        self.layout = layout
        self._slots = slots
        self._block_bytes = layout.block_bytes
        self._whole_rows = blocks_per_chunk * layout.block_bytes >= WHOLE_ROW_BYTES
        piece = _largest_divisor(layout.piece_bytes, MAX_PIECE_BYTES)
        split = np.arange(0, layout.piece_bytes, piece, dtype=np.int64)
        self._piece = f"V{piece}"
        address = (layout.piece_address[:, None] + split).ravel()
        stride = np.repeat(layout.piece_stride, len(split))
        self._open_device(address, stride, piece)
        self._open_region(len(address), piece)

    def _open_device(self, address: np.ndarray, stride: np.ndarray, piece: int) -> None:
        base = int(address.min())
        end = int((address + stride * (self.layout.num_blocks - 1)).max())
        unit = gcd(piece, *np.unique(address - base).tolist(), *np.unique(stride).tolist())
        self._device = np.asarray(_Memory(base, (end - base) // unit + 1, unit, piece))
        self._device_piece = (address - base) // unit
        self._device_stride = stride // unit

    def _open_region(self, pieces: int, piece: int) -> None:
        rows, row_stride = self._slots.shape[0], self._slots.strides[0]
        unit = gcd(piece, self._block_bytes, row_stride if rows > 1 else 0)
        end = (rows - 1) * row_stride + self._slots.shape[1] - piece
        memory = _Memory(self._slots.ctypes.data, end // unit + 1 if rows else 0, unit, piece)
        self._region = np.asarray(memory)
        self._region_piece = np.arange(pieces, dtype=np.int64) * piece // unit
        self._region_row = row_stride // unit
        self._region_block = self._block_bytes // unit

    def end_of_call(self, plan: CopyPlan, start: int) -> int:
        """How far one `copy` from entry `start` of the plan should go: a few megabytes, at least one block."""
        stop = min(plan.num_blocks, start + max(1, CALL_BYTES // self._block_bytes))
        if not self._whole_rows:
            return stop
        same_row = plan.rows[start:stop] == plan.rows[start]
        return stop if same_row.all() else start + int(np.argmin(same_row))

    def copy(self, direction: Direction, plan: CopyPlan, start: int, stop: int) -> int:
        """Copy entries `start` to `stop` of the plan; bytes copied. Runs on any thread."""
        blocks = plan.device_blocks[start:stop, None]
        device = (blocks * self._device_stride + self._device_piece).ravel()
        slot = self._contiguous(plan, start, stop)
        if slot is not None:
            if direction is Direction.STORE:
                slot[...] = self._device[device]
            else:
                self._device[device] = slot
            return slot.nbytes
        first = plan.rows[start:stop] * self._region_row + plan.sub_blocks[start:stop] * self._region_block
        region = (first[:, None] + self._region_piece).ravel()
        if direction is Direction.STORE:
            self._region[region] = self._device[device]
        else:
            self._device[device] = self._region[region]
        return (stop - start) * self._block_bytes

    def _contiguous(self, plan: CopyPlan, start: int, stop: int) -> np.ndarray | None:
        """The slot bytes as pieces when the entries are one row's (its blocks follow each other), else None."""
        row, first = int(plan.rows[start]), int(plan.sub_blocks[start])
        if plan.rows[stop - 1] != row or plan.sub_blocks[stop - 1] != first + stop - start - 1:
            return None
        return self._slots[row, first * self._block_bytes : (first + stop - start) * self._block_bytes].view(
            self._piece
        )


def _refuse_unfit(layout: GroupLayout, slots: np.ndarray, blocks_per_chunk: int) -> None:
    if layout.device.type != "cpu":
        raise ValueError(f"the host copy engine cannot reach KV tensors on {layout.device}")
    if slots.ndim != 2 or slots.dtype != np.uint8 or (slots.shape[1] > 1 and slots.strides[1] != 1):
        raise ValueError(f"slots must be uint8 (rows, bytes) with contiguous bytes, not {slots.dtype} {slots.shape}")
    if slots.shape[1] < blocks_per_chunk * layout.block_bytes:
        raise ValueError(
            f"a slot of {slots.shape[1]} bytes cannot hold {blocks_per_chunk} blocks of {layout.block_bytes} bytes of"
            f" KV group {layout.group_idx}: the region was made for other tensors or another blocks_per_chunk"
        )


def _largest_divisor(value: int, limit: int) -> int:
    """The largest divisor of `value` that is at most `limit`."""
    return next(value // parts for parts in range(-(-value // limit), value + 1) if value % parts == 0)
