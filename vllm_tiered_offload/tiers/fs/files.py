"""The tier's only door to the operating system, so that a test can put a faulty one in its place.

Every method may block and raise OSError; none runs on the scheduler thread.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

Buffer = bytes | bytearray | memoryview


class DirEntry(NamedTuple):
    """One name in a directory; `size` (bytes) and `mtime` (seconds since 1970) are None for what is no plain file."""

    name: str
    size: int | None
    mtime: float | None


class FileInfo(NamedTuple):
    """A plain file: bytes, permission bits, when it was written and when it was last written or read (since 1970)."""

    size: int
    mode: int
    mtime: float
    used: float


class Files:
    """The real functions."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """A descriptor, closed on exec; never follows a symbolic link at the end of `path`."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        """Bytes of the open file."""
        return os.fstat(fd).st_size

    def info(self, target: str | int) -> FileInfo:
        """Of a path or a descriptor; FileNotFoundError when there is no plain file."""
        found = os.stat(target) if isinstance(target, int) else os.stat(target, follow_symlinks=False)
        if not _is_plain_file(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a plain file", target)
        return FileInfo(found.st_size, found.st_mode & 0o777, found.st_mtime, max(found.st_mtime, found.st_atime))

    def free_bytes(self, path: str) -> int:
        """Bytes that the filesystem below `path` still has for us."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def chmod(self, target: str | int, mode: int) -> None:
        """Of a path or a descriptor."""
        os.chmod(target, mode)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def rename(self, source: str, target: str) -> None:
        """Replaces a file that is at `target`."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        """The names in a directory."""
        return os.listdir(path)

    def scandir(self, path: str) -> Iterator[DirEntry]:
        """The entries, one by one; what vanishes meanwhile is left out."""
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                plain = _is_plain_file(found.st_mode)
                yield DirEntry(entry.name, found.st_size if plain else None, found.st_mtime if plain else None)


def _is_plain_file(mode: int) -> bool:
    return mode & 0o170000 == 0o100000


def remove_tree(files: Files, path: str) -> None:
    """Remove a directory and all that is in it. What is gone already does not matter; other trouble raises.

    A symbolic link goes, and what it points to stays: only what cannot be unlinked is looked into.
    """
    try:
        for entry in list(files.scandir(path)):
            child = f"{path}/{entry.name}"
            try:
                remove_file(files, child)
            except (IsADirectoryError, PermissionError):  # Linux, POSIX
                if entry.size is not None:
                    raise
                remove_tree(files, child)
        files.rmdir(path)
    except FileNotFoundError:
        pass


def remove_file(files: Files, path: str) -> bool:
    """Whether `path` was there to be removed. Raises OSError when it is still there."""
    try:
        files.unlink(path)
    except FileNotFoundError:
        return False
    return True


def replace_file(files: Files, path: str, temporary: str, make: Callable[[str], None]) -> None:
    """Have `make` write the file `temporary`, and put it in the place of `path`: nobody ever sees a part of it.

    Raises what `make` does, OSError included; then nothing is left of the temporary.
    """
    try:
        make(temporary)
        files.rename(temporary, path)
    except BaseException:
        # Also when opening failed: a filesystem without O_DIRECT may make the file before it refuses.
        with suppress(OSError):
            remove_file(files, temporary)
        raise
