"""The region's bytes in this process, from an address that huge pages need.

The mmap module leaves the address to the kernel, which looks at small pages alone. So room for one huge page more is
reserved first, which takes addresses and no memory, and the file is put over it where a huge page can begin.
"""

import ctypes
import mmap
import os
import weakref

HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of arm64 with 4 KiB pages; elsewhere the kernel refuses

_MAP_FIXED = 0x10  # not in the mmap module's constants; the same on all of Linux, parisc and its kind aside
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class SharedMapping:
    """`size` bytes of `fd`, writable and shared. They stay mapped while anybody holds a view of them."""

    def __init__(self, fd: int, size: int) -> None:
        """Raises OSError when it cannot be mapped."""
        reserved = size + HUGE_PAGE_BYTES
        begin = _map(None, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.address = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        try:
            _map(self.address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            _libc.munmap(begin, reserved)
            raise
        pages = (ctypes.c_ubyte * size).from_address(self.address)
        # Not at exit: threads that still copy then would meet no memory. The kernel takes it all back anyway.
        weakref.finalize(pages, _libc.munmap, begin, reserved).atexit = False
        self.view = memoryview(pages).cast("B")

    def __len__(self) -> int:
        return len(self.view)

    def madvise(self, advice: int, start: int, length: int) -> None:
        """Tell the kernel something of a range of bytes. Raises OSError where it refuses."""
        if _libc.madvise(self.address + start, length, advice):
            raise _last_error()

    def close(self) -> None:
        """Let go of it. May be called again."""
        self.view = memoryview(b"")


def _map(where: int | None, size: int, prot: int, flags: int, fd: int) -> int:
    address = _libc.mmap(where, size, prot, flags, fd, 0)
    if address == _FAILED:
        raise _last_error()
    return int(address or 0)


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
