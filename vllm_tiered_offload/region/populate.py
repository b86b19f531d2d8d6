"""Giving every page of the mapping its memory at start, so that no page fault and no out-of-memory comes later.

MADV_POPULATE_WRITE does it in the kernel. Where that is refused (EINVAL before Linux 5.14 and in some sandboxes, EIO,
ENOSYS), each page is read once instead. A read can never change a byte, whoever else writes at the same time; and
for shared memory a read through the mapping allocates the page just as a write does (private memory would get the
kernel's one shared zero page, but the region is never private). A "write back what I read" loop would do the same,
and lose what another process wrote in between.

Pages are populated in pieces: between two of them the memory that is left is looked at again, because two engines that
start at once both see the same free memory, and because a piece holds the interpreter. Each piece first takes what it
can get as huge pages (huge_pages.py).
"""

import errno
import mmap
from collections.abc import Callable

import numpy as np

from vllm_tiered_offload.region.errors import RegionMemoryError
from vllm_tiered_offload.region.huge_pages import HugePages
from vllm_tiered_offload.region.limits import CAPACITY_SETTING, MemoryBudget, in_units, read_memory_budget
from vllm_tiered_offload.region.mapping import SharedMapping

MADV_POPULATE_WRITE = 23  # not in the mmap module's constants
PIECE_BYTES = 64 << 20

# EFAULT is the kernel's word for a page that cannot be had (touching it would be SIGBUS).
_OUT_OF_MEMORY = frozenset({errno.EFAULT, errno.ENOMEM, errno.ENOSPC})
# A defect page: reading it would kill the process, so there is no fallback.
_EHWPOISON = 133  # not in the errno module

Advise = Callable[[int, int], None]


def populate(
    mapping: SharedMapping,
    *,
    huge_pages: HugePages | None = None,
    advise: Advise | None = None,
    budget: Callable[[], MemoryBudget] = read_memory_budget,
    piece_bytes: int = PIECE_BYTES,
) -> bool:
    """Give all pages their memory, `huge_pages` where it can; returns False when the fallback was needed.

    `advise(start, length)` populates one piece (a seam for tests). Raises RegionMemoryError when memory runs out.
    """
    advise = advise or (lambda start, length: mapping.madvise(MADV_POPULATE_WRITE, start, length))
    advice_works = True
    total = len(mapping)
    for start in range(0, total, piece_bytes):
        length = min(piece_bytes, total - start)
        _check_room(length, start, total, budget())
        if huge_pages is not None:
            huge_pages.back(start, length)
        if advice_works:
            advice_works = _advise_piece(advise, start, length, total)
        if not advice_works:
            read_every_page(mapping, start, length)
    return advice_works


def read_every_page(mapping: SharedMapping, start: int, length: int) -> None:
    """Fault the pages of one piece in without changing a byte."""
    pages = np.frombuffer(mapping.view, dtype=np.uint8, count=length, offset=start)[:: mmap.PAGESIZE]
    pages.max()


def _advise_piece(advise: Advise, start: int, length: int, total: int) -> bool:
    """Whether the piece was populated; False means that the kernel does not offer it."""
    try:
        advise(start, length)
    except OSError as error:
        if error.errno in _OUT_OF_MEMORY:
            raise RegionMemoryError(_no_memory(start, total, str(error))) from error
        if error.errno == _EHWPOISON:
            raise RegionMemoryError(f"the host region met a defect memory page at byte {start}: {error}") from error
        return False
    return True


def _check_room(length: int, start: int, total: int, budget: MemoryBudget) -> None:
    available = budget.available
    if available is not None and available < length:
        raise RegionMemoryError(_no_memory(start, total, budget.explain()))


def _no_memory(done: int, total: int, reason: str) -> str:
    return (
        f"not enough memory for the host region: {in_units(done)} of {in_units(total)} populated, then {reason};"
        f" lower {CAPACITY_SETTING}"
    )
