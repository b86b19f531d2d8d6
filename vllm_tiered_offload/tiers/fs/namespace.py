"""The directory of one fingerprint.

    <root>/v1/<fingerprint digest>/manifest.json
                                   <first 2 digits>/<key in hexadecimal>
                                   quarantine/

Two digits make 256 directories: a million chunks are 4,000 names in each, a scan is short, and soon no store has to
make a directory any more (with 4096 of them, the first gigabytes were written a sixth slower).

A namespace comes and goes whole: it is made under a temporary's name and renamed when its manifest is in it, and
renamed back before it is emptied. So a kill leaves a temporary, whose name says who may collect it.

Directories are 0700 and files 0600 whatever the umask: they hold users' prompts. A new file format gets a new "v2".

Everything here blocks, and any thread but the scheduler's may call it.
"""

import errno
import logging
import math
import os
import re
import threading
import time
from contextlib import suppress
from functools import cached_property

from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.fs.faults import Fault, NamespaceError, classify
from vllm_tiered_offload.tiers.fs.files import Files, remove_file, remove_tree, replace_file
from vllm_tiered_offload.tiers.fs.manifest import MANIFEST, Manifest, ManifestError, read_manifest
from vllm_tiered_offload.tiers.fs.owner import STALE_AGE, Owner

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
VERSION_DIRECTORY = f"v{FORMAT_VERSION}"
QUARANTINE = "quarantine"
DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
FAN_OUT_DIGITS = 2

_VERSION = re.compile(r"v(0|[1-9][0-9]{0,3})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_KEY = re.compile(r"(?:[0-9a-f]{2}){2,}")


class Namespace:
    """Paths of the chunks of one fingerprint. `private` directories go with their engine."""

    def __init__(self, files: Files, root: str, fingerprint: Fingerprint, engine_id: str, *, private: bool) -> None:
        self.files = files
        self.fingerprint = fingerprint
        self.digest = bytes.fromhex(fingerprint.digest)
        self._engine_id = engine_id
        self.private = private
        self._root = root
        self.path = f"{root}/{VERSION_DIRECTORY}/{fingerprint.digest}"
        # Held over I/O: never taken on the scheduler thread.
        self._lock = threading.Lock()
        self._checked = False  # the manifest was there and ours
        self._prepared = False
        # Where it is removed, once that was begun: no late write may make it again then.
        self._grave: str | None = None

    @cached_property
    def owner(self) -> Owner:
        """This process. Found out on the first thread that needs it, for it reads files."""
        return Owner.of(self._engine_id)

    def file_path(self, key: OffloadKey) -> str:
        """Where the chunk is, if it is."""
        name = key.hex()
        return f"{self.path}/{name[:FAN_OUT_DIGITS]}/{name}"

    def temporary_path(self, path: str) -> str:
        """A new name in the directory of `path`."""
        return f"{os.path.dirname(path)}/{self.owner.temporary_name()}"

    def check(self) -> None:
        """Raise NamespaceError when a manifest is there and says that the directory is not ours; OSError on trouble."""
        with self._lock:
            self._check()

    def prepare_for_writing(self) -> None:
        """Make the directory and its manifest, once. Raises NamespaceError, in words for the user."""
        if self._prepared:
            return
        with self._lock:
            if self._prepared:
                return
            if self._grave is not None:
                raise NamespaceError(Fault.CANCELLED, f"{self.path} is being removed")
            try:
                self._make_root()
                if not self._check():
                    self._create()
            except OSError as error:
                raise self._unwritable(error) from error
            self._prepared = self._checked = True

    def make_directory_of(self, path: str) -> None:
        """The directory that `path` will be in; somebody may have dropped the namespace above it."""
        directory = os.path.dirname(path)
        try:
            self._make_directory(directory)
        except FileNotFoundError:
            with self._lock:
                self._prepared = self._checked = False
            self.prepare_for_writing()
            self._make_directory(directory)

    def discard(self, path: str, *, keep: bool) -> None:
        """Take a bad file out of sight: into the quarantine (`keep`), or away. Raises OSError when it stays."""
        if not keep:
            remove_file(self.files, path)
            return
        directory = f"{self.path}/{QUARANTINE}"
        self._make_directory(directory)
        with suppress(FileNotFoundError):
            self.files.rename(path, f"{directory}/{os.path.basename(path)}")

    def try_out(self) -> None:
        """Raise NamespaceError unless a file can be made in the directory (a read-only one may be there already)."""
        self.prepare_for_writing()
        path = f"{self.path}/{self.owner.temporary_name()}"
        try:
            self.files.close(self.files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))
            remove_file(self.files, path)
        except OSError as error:
            raise self._unwritable(error) from error

    def remove(self) -> None:
        """Remove the whole directory, for good. Raises OSError when something stays."""
        with self._lock:
            self._grave = self._grave or self.temporary_path(self.path)
            self._prepared = self._checked = False
        with suppress(FileNotFoundError):
            self.files.rename(self.path, self._grave)
        remove_tree(self.files, self._grave)

    def _unwritable(self, error: OSError) -> NamespaceError:
        return _unwritable(self._root, error)

    def _check(self) -> bool:
        """Whether there is a manifest; it is ours then."""
        if self._checked:
            return True
        try:
            if read_manifest(self.files, self.path).fingerprint != self.fingerprint:
                raise ManifestError("is another model's")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except ManifestError as error:
            raise NamespaceError(
                Fault.REFUSED, f"{self.path}/{MANIFEST} {error}: this directory is not used; remove it to start anew"
            ) from error
        self._checked = True
        return True

    def _make_root(self) -> None:
        missing = []
        parent = os.path.dirname(self._root)
        while not os.path.isdir(parent):
            missing.append(parent)
            parent = os.path.dirname(parent)
        for path in reversed(missing):
            with suppress(FileExistsError):
                self.files.mkdir(path, 0o777)
        for path in (self._root, os.path.dirname(self.path)):
            self._make_directory(path)

    def _make_directory(self, path: str) -> None:
        try:
            self.files.mkdir(path, DIRECTORY_MODE)
        except FileExistsError:
            return
        self.files.chmod(path, DIRECTORY_MODE)

    def _create(self) -> None:
        """Make the directory with its manifest; or the manifest alone, where a directory without one is there."""
        new = self.temporary_path(self.path)
        try:
            self._make_directory(new)
            self._write_manifest(f"{new}/{MANIFEST}")
            self.files.rename(new, self.path)
        except BaseException as error:
            with suppress(OSError):
                remove_tree(self.files, new)
            if not isinstance(error, OSError) or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if not self._check():
            self._add_manifest()

    def _add_manifest(self) -> None:
        path = f"{self.path}/{MANIFEST}"
        replace_file(self.files, path, self.temporary_path(path), self._write_manifest)

    def _write_manifest(self, path: str) -> None:
        text = Manifest.new(self.fingerprint, self.owner if self.private else None).to_bytes()
        fd = self.files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            self.files.chmod(fd, FILE_MODE)
            data = memoryview(text)
            while data:
                data = data[self.files.pwritev(fd, [data], len(text) - len(data)) :]
            # Even with fsync "none": an empty manifest after a power failure would lock the directory.
            self.files.fdatasync(fd)
        finally:
            self.files.close(fd)


def key_of(directory: str, name: str) -> OffloadKey | None:
    """The chunk that a file of this name in a directory of that name is; None when it is none."""
    if _KEY.fullmatch(name) and name[:FAN_OUT_DIGITS] == directory:
        return OffloadKey(bytes.fromhex(name))
    return None


def is_digest(name: str) -> bool:
    """Whether a directory of this name in a version directory is a namespace."""
    return _DIGEST.fullmatch(name) is not None


def is_fan_out(name: str) -> bool:
    """Whether a directory of this name in a namespace holds chunks."""
    return _FAN_OUT.fullmatch(name) is not None


def version_of(name: str) -> int | None:
    """The format version that a directory of this name in a root holds; None when it holds none."""
    match = _VERSION.fullmatch(name)
    return int(match[1]) if match else None


def is_older_format(name: str) -> bool:
    """Whether a directory of this name in a root holds what no engine of this version uses."""
    version = version_of(name)
    return version is not None and version < FORMAT_VERSION


def collect_private_generations(files: Files, root: str, owner: Owner) -> int:
    """Remove what engines that have ended left half made, half removed or private to them; how much there was."""
    count = 0
    parent = f"{root}/{VERSION_DIRECTORY}"
    try:
        names = [entry.name for entry in files.scandir(parent) if entry.size is None]
    except OSError:
        return 0
    for name in names:
        path = f"{parent}/{name}"
        try:
            if _is_left_behind(files, path, owner):
                remove_directory(files, path, owner)
                count += 1
        except (OSError, ManifestError) as error:
            logger.info("fs tier: %s was not looked through: %s", path, error)
    return count


def _is_left_behind(files: Files, path: str, owner: Owner) -> bool:
    maker = Owner.of_temporary(os.path.basename(path))
    if maker is not None:
        return owner.finds_stale(maker, 0.0)
    other = read_manifest(files, path).private_to
    # Who is judged by its age is looked through; the others need not be.
    return (
        other is not None and owner.finds_stale(other, math.inf) and owner.finds_stale(other, _unused_for(files, path))
    )


def _unused_for(files: Files, path: str) -> float:
    """Seconds since a chunk of a namespace was read or written, or it was made; when young, not to the second."""
    now = time.time()
    age = now - files.info(f"{path}/{MANIFEST}").mtime  # when it was read does not count: it just was, by us
    for directory in (f"{path}/{name}" for name in files.listdir(path) if is_fan_out(name)):
        for name in files.listdir(directory) if age > STALE_AGE else ():
            with suppress(FileNotFoundError):
                age = min(age, now - files.info(f"{directory}/{name}").used)
    return age


def remove_directory(files: Files, path: str, owner: Owner) -> None:
    """Take a directory out of everybody's sight, then empty it. Raises OSError when something stays.

    `owner` is this process. One that is gone already does not matter.
    """
    grave = f"{os.path.dirname(path)}/{owner.temporary_name()}"
    with suppress(FileNotFoundError):
        files.rename(path, grave)
        remove_tree(files, grave)


def try_root(root: str) -> None:
    """Raise NamespaceError unless `root` is there, or can be made, and takes a file. Leaves no file, even if killed.

    Says so when older versions have left something there, for nobody else would ever notice.
    """
    try:
        os.makedirs(root, DIRECTORY_MODE, exist_ok=True)
        os.close(os.open(root, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):  # a filesystem without nameless files
            raise _unwritable(root, error) from error
    with suppress(OSError):
        if any(is_older_format(name) for name in os.listdir(root)):
            logger.warning(
                "fs tier: %s holds chunks of an older version, which take room and are never used: "
                '"vllm-tiered-offload fs drop %s --old-formats" removes them',
                root,
                root,
            )


def _unwritable(root: str, error: OSError) -> NamespaceError:
    fault = classify(error)
    fault = fault if fault.pauses_stores else Fault.NOT_ALLOWED
    return NamespaceError(fault, f"{root} cannot be written: {error.strerror or error}")
