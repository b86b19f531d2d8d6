"""Copies by a kernel that reads and writes host memory over the bus by itself. Imported only where Triton is there.

A few programs, each copying whole fragments one after the other: enough bytes in flight for the bus, and most of the
device left to the model. Addresses and lengths are multiples of 8 bytes.
"""

# mypy: disable-error-code="untyped-decorator"
# Triton has no types.

from typing import Any

import triton
import triton.language as tl

# 16 programs with 8 KiB in flight each cover the product of the bus's bandwidth and delay (64 GB/s, 2 us).
PROGRAMS = 16
WORDS = 1024


@triton.jit
def _copy(source, target, length, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, WORDS)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        read = tl.load(source + i).to(tl.pointer_type(tl.int64))
        write = tl.load(target + i).to(tl.pointer_type(tl.int64))
        words = tl.load(length + i) // 8
        for start in range(0, words, WORDS):
            at = start + lane
            tl.store(write + at, tl.load(read + at, mask=at < words), mask=at < words)


def copy_fragments(source: Any, target: Any, length: Any, count: int) -> None:
    """Launch on torch's current stream. int64 tensors (count,) that the device can read: addresses, and bytes."""
    _copy[(min(PROGRAMS, count),)](source, target, length, count, WORDS=WORDS)
