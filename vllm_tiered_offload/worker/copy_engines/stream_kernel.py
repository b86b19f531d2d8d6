"""Copies past the caches, compiled by numba where it is there.

An ordinary store reads the line that it overwrites, and pushes the model's weights out of the cache for bytes that
nobody reads soon. A non-temporal store of whole lines does neither: memory moves two bytes for each copied one instead
of three. glibc's memcpy does so too, but only for pieces larger than most KV pages are.

Fragments are given by their addresses, so one call without the GIL moves any number of pages of any number of layers.
The beginning of each is fetched while the one before is copied: no prefetcher of the hardware sees it coming (+15 % at
4 KiB). 2 cores, two threads, fragments in random order, GB/s: this 11 to 13 at 4 to 16 KiB, 19 to 26 from 64 KiB on;
numpy's take 9 to 12 and 17; the same loop with memcpy 10 to 16.
"""

# mypy: disable-error-code="untyped-decorator"
# numba has no types.

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

LINE = 64
FETCHED_AHEAD = 8  # lines
# (destination addresses, source addresses, lengths): uint64 vectors of one length, in bytes.
StreamCopy = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


@cache
def stream_copy() -> StreamCopy | None:
    """The compiled copy, or None where numba is not there or makes no working code. Takes a second the first time."""
    try:
        kernel = _compile()
        _prove(kernel)
    except Exception as error:  # an optional speed-up: whatever it is, numpy copies instead
        logger.info("no compiled host copies, numpy does them: %s: %s", type(error).__name__, error)
        return None
    return kernel


def _prove(kernel: StreamCopy) -> None:
    """Copy a few awkward fragments and compare; raises AssertionError."""
    source = np.arange(1024, dtype=np.uint32).view(np.uint8)
    target = np.zeros_like(source)
    starts, lengths = np.array([3, 200, 1001], np.uint64), np.array([17, 640, 2000], np.uint64)
    kernel(starts + np.uint64(target.ctypes.data), starts + np.uint64(source.ctypes.data), lengths)
    expected = np.zeros_like(source)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        expected[start : start + length] = source[start : start + length]
    if not np.array_equal(target, expected):
        raise AssertionError("the compiled copy moved wrong bytes")


def _compile() -> StreamCopy:
    from numba import njit, uint64, void

    copy_line, copy_bytes, fetch_line, fence = _intrinsics()
    vector = uint64[::1]

    @njit(void(vector, vector, vector), nogil=True)
    def copy(target: Any, source: Any, length: Any) -> None:
        line = uint64(LINE)
        for i in range(target.size):
            if i + 1 < target.size:
                for offset in range(uint64(0), min(length[i + 1], uint64(FETCHED_AHEAD * LINE)), line):
                    fetch_line(source[i + 1] + offset)
            to, at, left = target[i], source[i], length[i]
            head = min((line - to % line) % line, left)
            copy_bytes(to, at, head)
            to, at, left = to + head, at + head, left - head
            whole = left - left % line
            for offset in range(uint64(0), whole, line):
                copy_line(to + offset, at + offset)
            copy_bytes(to + whole, at + whole, left - whole)
        fence()

    result: StreamCopy = copy
    return result


def _intrinsics() -> tuple[Any, Any, Any, Any]:
    """What numba has no words for:

    (one aligned line by a non-temporal store, a few bytes by ordinary ones, a line soon needed once, "visible to all
    before what follows")
    """
    from llvmlite import ir
    from numba import types, void
    from numba.extending import intrinsic

    address = types.uint64

    @intrinsic
    def copy_line(typingctx: Any, target: Any, source: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> None:  # noqa: ARG001
            line = ir.VectorType(ir.IntType(64), LINE // 8).as_pointer()
            value = builder.load(builder.inttoptr(args[1], line), align=1)
            store = builder.store(value, builder.inttoptr(args[0], line), align=LINE)
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))

        return void(address, address), generate

    @intrinsic
    def copy_bytes(typingctx: Any, target: Any, source: Any, length: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> None:  # noqa: ARG001
            byte = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(byte, [byte, byte, ir.IntType(64)])
            memcpy = builder.module.globals.get("memcpy") or ir.Function(builder.module, kind, "memcpy")
            builder.call(memcpy, [builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte), args[2]])

        return void(address, address, address), generate

    @intrinsic
    def fetch_line(typingctx: Any, source: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> None:  # noqa: ARG001
            byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
            builder.call(prefetch, [builder.inttoptr(args[0], byte), number(0), number(0), number(1)])

        return void(address), generate

    @intrinsic
    def fence(typingctx: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> None:  # noqa: ARG001
            builder.fence("seq_cst")

        return void(), generate

    return copy_line, copy_bytes, fetch_line, fence
