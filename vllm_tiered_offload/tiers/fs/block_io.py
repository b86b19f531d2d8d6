"""One chunk between a region row and its file.

A write goes to a temporary in the same directory and is renamed, so a visible file is always whole; who comes second
replaces a file by an equal one. A read lands in the row itself and is verified there before anybody may use the row.

With O_DIRECT, address, offset and length must be aligned. They are, for a region's rows; where they are not, or where
the filesystem refuses, the whole tier turns to buffered I/O, once and for good.
"""

import errno
import logging
import mmap
import os
import threading
import time
from collections import Counter

import numpy as np

from vllm_tiered_offload.contract.geometry import ROW_ALIGNMENT
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.block_frame import (
    HEADER_BYTES,
    FrameError,
    FrameFault,
    decode_header,
    encode_header,
    expect,
    verify,
)
from vllm_tiered_offload.tiers.fs.faults import ExpiredError
from vllm_tiered_offload.tiers.fs.files import FileInfo, Files, replace_file
from vllm_tiered_offload.tiers.fs.namespace import FILE_MODE, Namespace

logger = logging.getLogger(__name__)

_SPACE_SECONDS = 1.0
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class IoMode:
    """Direct or buffered, for the whole tier; only ever turns from direct to buffered. Thread-safe."""

    def __init__(self, direct: bool) -> None:
        self._direct = direct
        self._lock = threading.Lock()
        # Reason -> how often I/O had to be buffered because of it while the mode was still direct.
        self._fallbacks: Counter[str] = Counter()

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is worth a try."""
        return self._direct

    def fallbacks(self) -> dict[str, int]:
        """How often, by reason."""
        if not self._fallbacks:
            return {}
        with self._lock:
            return dict(self._fallbacks)

    def fall_back(self, reason: str, detail: str) -> None:
        """Direct I/O cannot be done: be buffered from now on. Says so once; `reason` is a word for the counter."""
        with self._lock:
            first, self._direct = self._direct, False
            self._fallbacks[reason] += 1
        if first:
            logger.warning('fs tier: no direct I/O (%s): using the page cache; set "io": "buffered" to agree', detail)


class FreeSpace:
    """Leaves room on the device for others. Thread-safe; asks the filesystem once a second at most."""

    def __init__(self, files: Files, min_free: int) -> None:
        self._files = files
        self._min_free = min_free
        self._lock = threading.Lock()
        self._free = 0
        self._as_of = -_SPACE_SECONDS

    def take(self, path: str, size: int) -> None:
        """Raise OSError (ENOSPC) when that many bytes more would leave less than is to be left."""
        with self._lock:
            now = time.monotonic()
            if now - self._as_of >= _SPACE_SECONDS or self._free - size < self._min_free:
                self._free, self._as_of = self._files.free_bytes(path), now
            if self._free - size < self._min_free:
                raise OSError(errno.ENOSPC, f"less than {self._min_free} bytes (min_free) would be left on the device")
            self._free -= size


class BlockIo:
    """Reads and writes chunks. Thread-safe; blocks."""

    def __init__(
        self, files: Files, mode: IoMode, *, sync_data: bool, ttl: float | None = None, space: FreeSpace | None = None
    ) -> None:
        self.files = files
        self.mode = mode
        self._sync_data = sync_data
        self.ttl = ttl  # seconds after which a file is not read any more
        self._space = space  # that has to be left on the device
        self._local = threading.local()

    def write(self, namespace: Namespace, key: OffloadKey, row: memoryview) -> bool:
        """Store the row; False when an equally long file was there already. Raises OSError or NamespaceError."""
        path = namespace.file_path(key)
        if self.size(namespace, key) == HEADER_BYTES + row.nbytes:
            return False
        namespace.prepare_for_writing()
        if self._space is not None:
            self._space.take(namespace.path, HEADER_BYTES + row.nbytes)
        header = self._header_page()
        header[:] = encode_header(key, row, namespace.digest)
        if self._may_be_direct(row):
            try:
                self._write_file(namespace, path, [header, row], os.O_DIRECT)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self.mode.fall_back("write", f"write: {os.strerror(error.errno)}")
            else:
                return True
        self._write_file(namespace, path, [header, row], 0)
        return True

    def read(self, namespace: Namespace, key: OffloadKey, row: memoryview) -> None:
        """Fill the row and verify it. Raises OSError or FrameError, and then the row's bytes are meaningless."""
        path, header = namespace.file_path(key), self._header_page()
        if self._may_be_direct(row):
            try:
                self._read_file(path, [header, row], os.O_DIRECT)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self.mode.fall_back("read", f"read: {os.strerror(error.errno)}")
                self._read_file(path, [header, row], 0)
        else:
            self._read_file(path, [header, row], 0)
        frame = decode_header(header)
        expect(frame, key, namespace.digest, row.nbytes)
        verify(frame, row)

    def size(self, namespace: Namespace, key: OffloadKey) -> int | None:
        """Bytes of the chunk's file; None when there is none, or none that may still be read."""
        try:
            found = self.files.info(namespace.file_path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if self._is_expired(found) else found.size

    def _is_expired(self, found: FileInfo) -> bool:
        return self.ttl is not None and time.time() - found.mtime > self.ttl

    def _may_be_direct(self, row: memoryview) -> bool:
        if not self.mode.direct:
            return False
        if row.nbytes % ROW_ALIGNMENT or address_of(row) % ROW_ALIGNMENT:
            self.mode.fall_back("unaligned", "a row of the host region is not aligned")
            return False
        return True

    def _header_page(self) -> memoryview:
        """This thread's own aligned page."""
        page: memoryview | None = getattr(self._local, "page", None)
        if page is None:
            page = self._local.page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        return page

    def _write_file(self, namespace: Namespace, path: str, buffers: list[memoryview], flags: int) -> None:
        def make(temporary: str) -> None:
            fd = self._create(namespace, temporary, flags)
            try:
                self._write_all(fd, buffers)
                if self._sync_data:
                    self.files.fdatasync(fd)
            finally:
                self.files.close(fd)

        replace_file(self.files, path, namespace.temporary_path(path), make)

    def _create(self, namespace: Namespace, path: str, flags: int) -> int:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = self.files.open(path, flags, FILE_MODE)
        except FileNotFoundError:
            namespace.make_directory_of(path)
            fd = self.files.open(path, flags, FILE_MODE)
        try:
            # Whatever the umask is. A chmod that changes nothing would still be a journal entry.
            if self.files.info(fd).mode != FILE_MODE:
                self.files.chmod(fd, FILE_MODE)
        except BaseException:
            self.files.close(fd)
            raise
        return fd

    def _write_all(self, fd: int, buffers: list[memoryview]) -> None:
        total, done = sum(buffer.nbytes for buffer in buffers), 0
        while done < total:
            written = self.files.pwritev(fd, _from(buffers, done), done)
            if written <= 0:
                raise OSError(errno.EIO, "nothing was written")
            done += written

    def _read_file(self, path: str, buffers: list[memoryview], flags: int) -> None:
        fd = self.files.open(path, os.O_RDONLY | flags)
        try:
            total, found = sum(buffer.nbytes for buffer in buffers), self.files.info(fd)
            if self._is_expired(found):
                raise ExpiredError(f"written more than {self.ttl} s ago")
            if found.size != total:
                kind = FrameFault.SHORT if found.size < total else FrameFault.FOREIGN
                raise FrameError(kind, f"the file has {found.size} bytes instead of {total}")
            self._read_all(fd, buffers, total)
        finally:
            self.files.close(fd)

    def _read_all(self, fd: int, buffers: list[memoryview], total: int) -> None:
        done = 0
        while done < total:
            read = self.files.preadv(fd, _from(buffers, done), done)
            if read <= 0:
                raise FrameError(FrameFault.SHORT, f"the file ended after {done} of {total} bytes")
            done += read


def address_of(buffer: memoryview) -> int:
    """Where a buffer lies in memory."""
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])


def _from(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers after `done` bytes of them."""
    if not done:
        return buffers
    left = []
    for buffer in buffers:
        if done < buffer.nbytes:
            left.append(buffer[done:])
        done = max(0, done - buffer.nbytes)
    return left
