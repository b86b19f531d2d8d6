"""The host region: one shared anonymous file, seen as rows.

Rules
- The memory is a memfd: it has no name in any file system, so the size of /dev/shm does not matter, two engines cannot
  meet in it, and the kernel frees it when the last process that holds it ends, however that process ends.
- The creator keeps its descriptor open: it is the door through which the other processes of the engine come in
  (/proc/<pid>/fd/<fd>). They close theirs after mapping.
- What is opened is checked before and after opening: a process id may belong to somebody else by now. The file is
  sealed against resizing, so a mapping that passed the check stays valid.
- Views may outlive `close`: the mapping then goes when the last of them does.
"""

import fcntl
import mmap
import os
import stat
from contextlib import suppress
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.region.errors import RegionClosedError, RegionError, RegionGoneError
from vllm_tiered_offload.region.huge_pages import HugePages
from vllm_tiered_offload.region.limits import MemoryBudget, check_capacity, read_memory_budget
from vllm_tiered_offload.region.mapping import SharedMapping
from vllm_tiered_offload.region.populate import populate as populate_pages

MEMFD_NAME = "vllm-tiered-offload"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostRegion:
    """A mapping of the region in this process. Made by `create` (first rank) or `open` (everybody else)."""

    def __init__(
        self,
        geometry: RegionGeometry,
        mapping: SharedMapping,
        fd: int | None,
        populated_by_advice: bool = True,
        huge_page_bytes: int = 0,
    ) -> None:
        self._geometry = geometry
        self._mapping: SharedMapping | None = mapping  # None once closed
        self._fd = fd  # the creator's open descriptor, None elsewhere and once closed
        self._populated_by_advice = populated_by_advice
        self._huge_page_bytes = huge_page_bytes

    @classmethod
    def create(
        cls, geometry: RegionGeometry, populate: bool = True, budget: MemoryBudget | None = None
    ) -> "HostRegion":
        """Make a region of zero bytes; with `populate` all its pages get their memory now.

        Raises CapacityError, before any memory is taken, when the region has no row or exceeds `budget` (read from
        the system when None); RegionMemoryError when memory runs out while populating; RegionError otherwise.
        """
        check_capacity(geometry.total_bytes, geometry.row_bytes, budget or read_memory_budget())
        fd = _make_memfd(geometry.total_bytes)
        mapping = None
        try:
            mapping = _map(fd, geometry.total_bytes)
            huge_pages = HugePages(mapping)
            by_advice = populate_pages(mapping, huge_pages=huge_pages) if populate else True
        except BaseException:
            if mapping is not None:
                mapping.close()
            os.close(fd)
            raise
        return cls(geometry, mapping, fd, by_advice, huge_pages.num_bytes)

    @classmethod
    def open(cls, announcement: RegionAnnouncement) -> "HostRegion":
        """Map the region that another process of this engine made.

        Raises RegionGoneError when that process or its region is not there any more, RegionError when what is found
        cannot be used.
        """
        fd = _open_announced(announcement)
        try:
            mapping = _map(fd, announcement.geometry.total_bytes)
        finally:
            os.close(fd)
        return cls(announcement.geometry, mapping, None)

    @property
    def geometry(self) -> RegionGeometry:
        """Rows, slots and sizes."""
        return self._geometry

    @property
    def populated_by_advice(self) -> bool:
        """False when the kernel refused MADV_POPULATE_WRITE and every page was read instead."""
        return self._populated_by_advice

    @property
    def huge_page_bytes(self) -> int:
        """How much of the region lies in huge pages; known to its creator alone."""
        return self._huge_page_bytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._mapping is None

    def announcement(self) -> RegionAnnouncement:
        """How other processes open this region. Valid while this process lives and has not closed it."""
        if self._fd is None:
            raise RegionError(
                "only the process that created the host region can announce it, and only until it closes it"
            )
        return RegionAnnouncement(os.getpid(), self._fd, os.fstat(self._fd).st_ino, self._geometry)

    @property
    def array(self) -> NDArray[np.uint8]:
        """All bytes, shape (num_rows, row_bytes); no copy."""
        flat = np.frombuffer(self._open_mapping().view, dtype=np.uint8)
        return flat.reshape(self._geometry.num_rows, self._geometry.row_bytes)

    def rank_view(self, rank: int) -> NDArray[np.uint8]:
        """The slots of one rank, shape (num_rows, slot_bytes[rank]), strided; no copy."""
        if not 0 <= rank < self._geometry.num_ranks:
            raise RegionError(f"rank {rank} has no slot: the host region is shared by {self._geometry.num_ranks} ranks")
        begin = self._geometry.slot_offset(rank)
        return self.array[:, begin : begin + self._geometry.slot_bytes[rank]]

    def rows(self) -> list[memoryview]:
        """One writable view per row, `row_bytes` long, padding included; no copy."""
        whole = self._open_mapping().view
        size = self._geometry.row_bytes
        return [whole[begin : begin + size] for begin in range(0, len(whole), size)]

    def close(self) -> None:
        """Let go of the region. May be called again; views that are still alive stay valid."""
        mapping, self._mapping = self._mapping, None
        fd, self._fd = self._fd, None
        if mapping is not None:
            mapping.close()
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open_mapping(self) -> SharedMapping:
        if self._mapping is None:
            raise RegionClosedError("the host region was closed")
        return self._mapping


def _make_memfd(size: int) -> int:
    """A sealed memfd of `size` zero bytes that takes no memory yet."""
    try:
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise RegionError(f"the host region cannot be made: memfd_create: {error}") from error
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise RegionError(f"the host region cannot be made {size} bytes long: {error}") from error
    return fd


def _map(fd: int, size: int) -> SharedMapping:
    try:
        mapping = SharedMapping(fd, size)
    except OSError as error:
        raise RegionError(f"the host region of {size} bytes cannot be mapped: {error}") from error
    with suppress(OSError):  # users' prompts, and as many gigabytes, do not belong into a core dump
        mapping.madvise(mmap.MADV_DONTDUMP, 0, size)
    return mapping


def _open_announced(announcement: RegionAnnouncement) -> int:
    """An own descriptor of the announced memfd."""
    path = f"/proc/{announcement.pid}/fd/{announcement.fd}"
    who = f"the host region of process {announcement.pid}"
    try:
        # Looked at before it is opened: opening somebody else's device or pipe may have effects of its own.
        _verify(os.stat(path), announcement, who)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise RegionGoneError(f"{who} is gone: the process has ended or runs in another PID namespace") from error
    except PermissionError as error:
        raise RegionError(
            f"{who} cannot be opened: all processes of an engine must run as one user: {error}"
        ) from error
    except OSError as error:
        raise RegionError(f"{who} cannot be opened: {error}") from error
    try:
        _verify(os.fstat(fd), announcement, who)
        _verify_memfd(fd, who)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _verify(found: os.stat_result, announcement: RegionAnnouncement, who: str) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_ino != announcement.inode:
        raise RegionGoneError(
            f"{who} is gone: its descriptor {announcement.fd} is inode {found.st_ino} now,"
            f" announced was {announcement.inode}; the process id was reused or the region closed"
        )
    expected = announcement.geometry.total_bytes
    if found.st_size != expected:
        raise RegionError(f"{who} is {found.st_size} bytes long, announced were {expected}")


def _verify_memfd(fd: int, who: str) -> None:
    """An inode number alone may be met again in another file system; the link text and the seals may not."""
    target = os.readlink(f"/proc/self/fd/{fd}")
    seals = 0
    with suppress(OSError):
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    # The kernel may have added its own seal against execution.
    if not target.startswith(f"/memfd:{MEMFD_NAME}") or seals & _SEALS != _SEALS:
        raise RegionGoneError(f"{who} is gone: its descriptor is {target} now; the process id was reused")
