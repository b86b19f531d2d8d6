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
from collections import Counter
from contextlib import suppress

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
from vllm_tiered_offload.tiers.fs.files import Files, remove_file
from vllm_tiered_offload.tiers.fs.namespace import FILE_MODE, Namespace

logger = logging.getLogger(__name__)

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


class BlockIo:
    """Reads and writes chunks. Thread-safe; blocks."""

    def __init__(self, files: Files, mode: IoMode, *, sync_data: bool) -> None:
        self.files = files
        self.mode = mode
        self._sync_data = sync_data
        self._local = threading.local()

    def write(self, namespace: Namespace, key: OffloadKey, row: memoryview) -> bool:
        """Store the row; False when an equally long file was there already. Raises OSError or NamespaceError."""
        path = namespace.file_path(key)
        if self._is_there(path, HEADER_BYTES + row.nbytes):
            return False
        namespace.prepare_for_writing()
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

    def _is_there(self, path: str, size: int) -> bool:
        try:
            return self.files.stat_size(path) == size
        except FileNotFoundError:
            return False

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
        temporary = namespace.temporary_path(path)
        try:
            fd = self._create(namespace, temporary, flags)
            try:
                self._write_all(fd, buffers)
                if self._sync_data:
                    self.files.fdatasync(fd)
            finally:
                self.files.close(fd)
            self.files.rename(temporary, path)
        except BaseException:
            # Also when opening failed: a filesystem without O_DIRECT may make the file before it refuses.
            with suppress(OSError):
                remove_file(self.files, temporary)
            raise

    def _create(self, namespace: Namespace, path: str, flags: int) -> int:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = self.files.open(path, flags, FILE_MODE)
        except FileNotFoundError:
            namespace.make_directory_of(path)
            fd = self.files.open(path, flags, FILE_MODE)
        try:
            if self.files.mode(fd) != FILE_MODE:  # the umask; a chmod that changes nothing still costs a journal entry
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
            total, size = sum(buffer.nbytes for buffer in buffers), self.files.size(fd)
            if size != total:
                kind = FrameFault.SHORT if size < total else FrameFault.FOREIGN
                raise FrameError(kind, f"the file has {size} bytes instead of {total}")
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
