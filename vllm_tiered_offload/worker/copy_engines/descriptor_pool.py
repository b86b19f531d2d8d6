"""Buffers for descriptors, used again: pinning memory takes longer than most copies, and stops the device."""

import threading
from collections import defaultdict
from collections.abc import Callable

from vllm_tiered_offload.worker.copy_engines.device import Descriptors

SMALLEST = 256  # copies; 6 KiB
KEPT_OF_A_SIZE = 8


class DescriptorPool:
    """Free buffers by capacity, powers of two. A buffer is either free here or held by one job; any thread may call."""

    def __init__(self, allocate: Callable[[int], Descriptors]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[Descriptors]] = defaultdict(list)

    def take(self, count: int) -> Descriptors:
        """A buffer for at least `count` copies. Raises what the allocation raises."""
        capacity = max(SMALLEST, 1 << (count - 1).bit_length())
        with self._lock:
            if self._free[capacity]:
                return self._free[capacity].pop()
        return self._allocate(capacity)

    def give_back(self, buffer: Descriptors) -> None:
        """The job that held it has ended: nothing reads the buffer any more."""
        buffer.count = 0
        free = self._free[buffer.table.shape[1]]
        with self._lock:
            if len(free) < KEPT_OF_A_SIZE:
                free.append(buffer)
