"""Host copies by numpy, one call for many pages: what runs where no compiled copy can be had.

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


class WindowCopier:
    """Copies blocks of one KV group; the layout and the slots have been checked against each other."""

    def __init__(self, layout: GroupLayout, slots: np.ndarray) -> None:
        self._num_blocks = layout.num_blocks
        self._slots = slots
        self._block_bytes = layout.block_bytes
        piece = _largest_divisor(layout.piece_bytes, MAX_PIECE_BYTES)
        split = np.arange(0, layout.piece_bytes, piece, dtype=np.int64)
        self._piece = f"V{piece}"
        address = (layout.piece_address[:, None] + split).ravel()
        stride = np.repeat(layout.piece_stride, len(split))
        self._open_device(address, stride, piece)
        self._open_region(len(address), piece)

    def _open_device(self, address: np.ndarray, stride: np.ndarray, piece: int) -> None:
        base = int(address.min())
        end = int((address + stride * (self._num_blocks - 1)).max())
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

    def copy(self, direction: Direction, plan: CopyPlan) -> None:
        device = (plan.device_blocks[:, None] * self._device_stride + self._device_piece).ravel()
        slot = self._contiguous(plan)
        if slot is None:
            first = plan.rows * self._region_row + plan.sub_blocks * self._region_block
            region = (first[:, None] + self._region_piece).ravel()
            if direction is Direction.STORE:
                self._region[region] = self._device[device]
            else:
                self._device[device] = self._region[region]
        elif direction is Direction.STORE:
            # "clip" because numpy gathers into a copy of `out` where it has to raise; the plan has been checked.
            np.take(self._device, device, out=slot, mode="clip")
        else:
            self._device[device] = slot

    def _contiguous(self, plan: CopyPlan) -> np.ndarray | None:
        """The slot bytes as pieces when the plan is blocks of one row that follow each other, else None.

        One pass over the bytes instead of two.
        """
        row, first, count = int(plan.rows[0]), int(plan.sub_blocks[0]), plan.num_blocks
        if (plan.rows != row).any() or (plan.sub_blocks != np.arange(first, first + count)).any():
            return None
        return self._slots[row, first * self._block_bytes : (first + count) * self._block_bytes].view(self._piece)


def _largest_divisor(value: int, limit: int) -> int:
    """The largest divisor of `value` that is at most `limit`."""
    return next(value // parts for parts in range(-(-value // limit), value + 1) if value % parts == 0)
