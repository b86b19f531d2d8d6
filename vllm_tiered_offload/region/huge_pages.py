"""Backing the region with huge pages, where the kernel has them to give.

Rows that lie in scattered pages of 4 KiB reach a disk as hundreds of small segments: direct reads of such rows took 2.2
times as long as reads into huge pages, direct writes 1.3 times (1 and 4 MiB rows, 16 threads, virtio disk).

MADV_COLLAPSE (Linux 6.1) makes them whatever transparent_hugepage/shmem_enabled says, "deny" aside; its default of
"never" would refuse the older MADV_HUGEPAGE. A range without any page is an error to it, so one page of each is read
first; so is a mapping that does not begin at a huge page's boundary. All this is a service: what cannot be had (older
kernels, no free memory in large pieces) stays in small pages, and nobody waits long for the kernel to make room.
"""

import errno
import time
from collections.abc import Callable

import numpy as np

from vllm_tiered_offload.region.mapping import HUGE_PAGE_BYTES, SharedMapping

MADV_COLLAPSE = 25  # not in the mmap module's constants
LONGEST_SECONDS = 20.0  # for the whole region; free memory in large pieces gives 15 GB/s, compaction 0.5

# The kernel found no huge page for this range, or a page of it in use. Anything else will be the same the next time.
_NOT_HERE = frozenset({errno.EAGAIN, errno.EBUSY, errno.ENOMEM})

Advise = Callable[[int, int], None]


class HugePages:
    """What of one mapping, still empty and known to nobody else, got huge pages."""

    def __init__(
        self,
        mapping: SharedMapping,
        *,
        advise: Advise | None = None,
        clock: Callable[[], float] = time.monotonic,
        longest_seconds: float = LONGEST_SECONDS,
    ) -> None:
        """`advise(start, length)` collapses one piece, and `clock` gives seconds (seams for tests)."""
        self._mapping = mapping
        self._advise = advise or (lambda start, length: mapping.madvise(MADV_COLLAPSE, start, length))
        self._clock = clock
        self._deadline = clock() + longest_seconds
        self._wanted = True
        self.num_bytes = 0

    def back(self, start: int, length: int) -> None:
        """Try it for the whole huge pages in this range of bytes. Never raises because of the kernel."""
        first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = (start + length) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if not self._wanted or first >= end or self._clock() >= self._deadline:
            return
        np.frombuffer(self._mapping.view, dtype=np.uint8, count=end - first, offset=first)[::HUGE_PAGE_BYTES].max()
        try:
            self._advise(first, end - first)
        except OSError as error:
            self._wanted = error.errno in _NOT_HERE
        else:
            self.num_bytes += end - first
