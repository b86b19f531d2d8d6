"""Byte copies between host tensors and slots: checks that both fit each other, cuts jobs into calls, and has one of
two ways to move the bytes: a compiled copy with addresses (stream_kernel.py), or numpy with index arrays (windows.py).
"""

import numpy as np

from vllm_tiered_offload.worker.copy_engines.base import Direction
from vllm_tiered_offload.worker.copy_engines.fragments import block_fragments, copies_of
from vllm_tiered_offload.worker.copy_engines.stream_kernel import StreamCopy
from vllm_tiered_offload.worker.copy_engines.windows import WindowCopier
from vllm_tiered_offload.worker.copy_plan import CopyPlan
from vllm_tiered_offload.worker.layout import GroupLayout, refuse_unfit

# A compiled call takes a millisecond. An urgent load waits for one call at most; 4 MiB cost a fifth of the bandwidth.
CALL_BYTES = 16 << 20
# numpy has two passes over the bytes of a call, the second one from the cache.
NUMPY_CALL_BYTES = 4 << 20
# It copies a row at least this long in a call of its own: its slot is contiguous, which saves a pass.
WHOLE_ROW_BYTES = 2 << 20


class StreamCopier:
    """Copies blocks of one KV group by a compiled copy; the layout and the slots have been checked."""

    def __init__(self, layout: GroupLayout, slots: np.ndarray, kernel: StreamCopy) -> None:
        self._fragments = block_fragments(layout)
        self._block_bytes = layout.block_bytes
        self._slots = slots
        self._kernel = kernel

    def copy(self, direction: Direction, plan: CopyPlan) -> None:
        copies = copies_of(plan, self._fragments, self._block_bytes, self._slots)
        device, region, length = (part.view(np.uint64) for part in (copies.device, copies.region, copies.length))
        if direction is Direction.STORE:
            self._kernel(region, device, length)
        else:
            self._kernel(device, region, length)


class HostGroupCopier:
    """Copies blocks of one KV group whose tensors are in host memory.

    slots: uint8 (num_rows, slot_bytes); rows may be any distance apart, bytes of a slot are contiguous.
    kernel: the compiled copy, None for numpy.
    Raises ValueError when the slots cannot hold the group's chunks or the tensors are not in host memory.
    """

    def __init__(
        self, layout: GroupLayout, slots: np.ndarray, blocks_per_chunk: int, kernel: StreamCopy | None = None
    ) -> None:
        if layout.device.type != "cpu":
            raise ValueError(f"the host copy engine cannot reach KV tensors on {layout.device}")
        refuse_unfit(layout, slots, blocks_per_chunk)
        self._block_bytes = layout.block_bytes
        self._call_blocks = max(1, (NUMPY_CALL_BYTES if kernel is None else CALL_BYTES) // layout.block_bytes)
        self._whole_rows = kernel is None and blocks_per_chunk * layout.block_bytes >= WHOLE_ROW_BYTES
        self._way = StreamCopier(layout, slots, kernel) if kernel is not None else WindowCopier(layout, slots)

    def end_of_call(self, plan: CopyPlan, start: int) -> int:
        """How far one `copy` from entry `start` of the plan should go: a few megabytes, at least one block."""
        stop = min(plan.num_blocks, start + self._call_blocks)
        if not self._whole_rows:
            return stop
        same_row = plan.rows[start:stop] == plan.rows[start]
        return stop if same_row.all() else start + int(np.argmin(same_row))

    def copy(self, direction: Direction, plan: CopyPlan, start: int, stop: int) -> int:
        """Copy entries `start` to `stop` of the plan; bytes copied. Runs on any thread."""
        if stop > start:
            self._way.copy(direction, plan.part(start, stop))
        return (stop - start) * self._block_bytes
