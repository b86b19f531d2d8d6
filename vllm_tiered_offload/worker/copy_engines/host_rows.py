"""The region's rows made ready for a device: on the memory node next to it, pinned and mapped."""

import logging
from dataclasses import dataclass, field

import numpy as np

from vllm_tiered_offload.contract.geometry import ROW_ALIGNMENT, round_up
from vllm_tiered_offload.worker.copy_engines.device import CopyDevice
from vllm_tiered_offload.worker.copy_engines.numa import bind_memory

logger = logging.getLogger(__name__)

# The driver locks up while it pins: gigabytes at a time let others in between.
REGISTERED_AT_ONCE = 4 << 30


@dataclass(slots=True)
class DeviceRows:
    """Rows as a device sees them. `pinned` is false when copies have to go through pageable memory."""

    device: CopyDevice
    node: int | None = None  # the memory node they were bound to
    _pieces: list[int] = field(default_factory=list)  # addresses registered and not unregistered

    @property
    def pinned(self) -> bool:
        return bool(self._pieces)

    def release(self) -> None:
        """Unregister. Only when no copy runs any more; may be called again. Never raises."""
        while self._pieces:
            address = self._pieces.pop()
            try:
                self.device.unregister(address)
            except Exception as error:
                logger.warning("host rows could not be unregistered: %s", error)


def prepare_rows(slots: np.ndarray, device: CopyDevice) -> DeviceRows:
    """Bind and register the rows behind `slots`; what cannot be had is said once and done without.

    All or nothing: after a failure the pieces that were registered are rolled back, for a driver that has run out of
    something would rather have it back than serve half of the rows fast.
    """
    rows = DeviceRows(device)
    if not slots.size:
        return rows
    start, stop, row_bytes = _pages(slots)
    rows.node = _bind(slots, start, stop, device.numa_node())
    at_once = max(1, REGISTERED_AT_ONCE // row_bytes) * row_bytes
    for address in range(start, stop, at_once):
        try:
            device.register(address, min(at_once, stop - address))
        except Exception as error:
            rows.release()
            logger.warning(
                "%.1f GiB of host rows could not be pinned for the device, copies will be slow: %s "
                "(a smaller cpu.capacity, or more lockable memory for this process, may help)",
                (stop - start) / 2**30,
                error,
            )
            return rows
        rows._pieces.append(address)
    return rows


def _pages(slots: np.ndarray) -> tuple[int, int, int]:
    """(first page, end of the last one, bytes from row to row) of all rows, in bytes.

    Rows begin at page borders in the region, so a row never lies in two registered pieces. Slots elsewhere (tests)
    may not; then the pieces still cover all of them.
    """
    base = slots.ctypes.data
    row_bytes = slots.strides[0] if len(slots) > 1 else slots.shape[1]
    start = base - base % ROW_ALIGNMENT
    stop = base + (len(slots) - 1) * row_bytes + slots.shape[1]
    return start, start + round_up(stop - start, ROW_ALIGNMENT), round_up(row_bytes, ROW_ALIGNMENT)


def _bind(slots: np.ndarray, start: int, stop: int, node: int | None) -> int | None:
    """Move the rows to `node`; the node, or None if they stay where they are.

    Rows that ranks share are left alone: each rank's device may be attached to another node.
    """
    shared = len(slots) > 1 and slots.strides[0] - slots.shape[1] >= ROW_ALIGNMENT
    if node is None or shared or not bind_memory(start, stop - start, node):
        return None
    return node
