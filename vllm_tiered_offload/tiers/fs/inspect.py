"""A root read without an engine: what every name in it is, how many bytes it has, and whether it is whole.

Nothing is changed here, and nothing is waited for: engines may be writing all the while. What vanishes between two
looks was never there. What is found is not trusted: links are not followed, and a name that nobody of ours would have
made is STRANGE, counted and otherwise left alone.
"""

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from vllm_tiered_offload.tiers.block_frame import (
    HEADER_BYTES,
    FrameError,
    FrameFault,
    FrameHeader,
    decode_header,
    expect,
    verify,
)
from vllm_tiered_offload.tiers.fs.faults import Fault, classify
from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.manifest import MANIFEST, Manifest, ManifestError, read_manifest
from vllm_tiered_offload.tiers.fs.namespace import (
    QUARANTINE,
    VERSION_DIRECTORY,
    is_digest,
    is_fan_out,
    key_of,
    version_of,
)
from vllm_tiered_offload.tiers.fs.owner import Owner

OnTrouble = Callable[[str, OSError], None]


class RootError(Exception):
    """The path cannot be read as a root; one line that names it and says what to do."""


class Kind(Enum):
    """What a name in a root is."""

    CHUNK = "chunks"
    MANIFEST = "manifests"
    QUARANTINED = "quarantined"
    TEMPORARY = "temporaries"  # also what an interrupted removal left, as a whole tree
    DIRECTORY = "directories"
    OTHER_FORMAT = "other_formats"
    STRANGE = "strange"


@dataclass(frozen=True, slots=True)
class Entry:
    """One name. `parts` are those below the root; `size` is that of the name itself, as lstat tells it (bytes)."""

    root: str
    parts: tuple[str, ...]
    kind: Kind
    size: int
    mtime: float
    is_directory: bool
    link: tuple[int, int] | None  # device and inode of a file that has several names

    @property
    def path(self) -> str:
        return "/".join((self.root, *self.parts))

    @property
    def namespace(self) -> str | None:
        """The digest of the namespace that it is of or in."""
        if len(self.parts) > 1 and self.parts[0] == VERSION_DIRECTORY and is_digest(self.parts[1]):
            return self.parts[1]
        return None


@dataclass(slots=True)
class Usage:
    """Files and bytes, by kind. The bytes of a file with several names count once, at the first of them."""

    files: Counter[Kind] = field(default_factory=Counter)
    bytes: Counter[Kind] = field(default_factory=Counter)
    directory_bytes: int = 0
    newest: float = 0.0  # when something was last written, made or removed (seconds since 1970)

    @property
    def total(self) -> int:
        """What `du -sb` says, where it counts the directories themselves, too."""
        return sum(self.bytes.values())

    @property
    def file_bytes(self) -> int:
        """The total without the directories themselves; newer versions of `du -sb` leave them out."""
        return self.total - self.directory_bytes

    def add(self, entry: Entry, size: int) -> None:
        self.files[entry.kind] += not entry.is_directory
        self.bytes[entry.kind] += size
        self.directory_bytes += size if entry.is_directory else 0
        self.newest = max(self.newest, entry.mtime)


class BadFile(NamedTuple):
    """A file that is not what it should be, or (unless the fault condemns it) could not be checked."""

    path: str
    fault: Fault
    why: str


@dataclass(slots=True)
class NamespaceSurvey:
    """One namespace. Without a manifest there is a `problem`; its fault is GONE when there is none yet."""

    path: str
    digest: str
    usage: Usage = field(default_factory=Usage)
    manifest: Manifest | None = None
    problem: BadFile | None = None

    @property
    def owner(self) -> Owner | None:
        """Whose private generation it is."""
        return None if self.manifest is None else self.manifest.private_to


@dataclass(slots=True)
class RootSurvey:
    """A whole root."""

    root: str
    usage: Usage = field(default_factory=Usage)
    namespaces: dict[str, NamespaceSurvey] = field(default_factory=dict)  # by digest
    other_formats: dict[str, Usage] = field(default_factory=dict)  # by the name of the version directory
    # The names that may be garbage; of a tree, its top alone, and the sizes of trees by their top's path.
    temporaries: list[Entry] = field(default_factory=list)
    quarantined: list[Entry] = field(default_factory=list)
    tree_bytes: Counter[str] = field(default_factory=Counter)


def open_root(path: str) -> str:
    """The absolute path of a root. Raises RootError for whatever is none."""
    root = os.path.realpath(os.path.expanduser(path))
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        raise RootError(f'{path} does not exist: name the directory that is "root" in the tier\'s settings') from None
    except NotADirectoryError:
        raise RootError(f'{path} is a file: name the directory that is "root" in the tier\'s settings') from None
    except OSError as error:
        raise RootError(unreadable(path, error)) from error
    if not names or any(version_of(name) is not None for name in names):
        return root
    parent, name = os.path.split(root)
    if MANIFEST in names and version_of(os.path.basename(parent)) is not None:
        raise RootError(f"{path} is one namespace of a root: name the root, {os.path.dirname(parent)}")
    if version_of(name) is not None:
        raise RootError(f"{path} is one format version of a root: name the root, {parent}")
    raise RootError(
        f'{path} is no root of the fs tier ({VERSION_DIRECTORY} is missing in it): name the directory that is "root" '
        "in the tier's settings"
    )


def unreadable(path: str, error: OSError) -> str:
    """One line about a path that the system does not let us read or change."""
    text = f"{path}: {error.strerror or error}"
    if isinstance(error, PermissionError):
        text += " (chunks hold users' prompts: be the user that runs the engine, or root)"
    return text


def walk(root: str, on_trouble: OnTrouble) -> Iterator[Entry]:
    """Every name of a root and below, directories before what is in them.

    A directory that cannot be read goes to `on_trouble`; what vanishes meanwhile is left out.
    """
    yield _entry(root, (), os.lstat(root))
    open_directories: list[tuple[str, ...]] = [()]
    while open_directories:
        parts = open_directories.pop()
        for entry in _read_directory(root, parts, on_trouble):
            yield entry
            if entry.is_directory:
                open_directories.append(entry.parts)


def _read_directory(root: str, parts: tuple[str, ...], on_trouble: OnTrouble) -> list[Entry]:
    path = "/".join((root, *parts))
    found = []
    try:
        with os.scandir(path) as names:
            for name in names:
                try:
                    found.append(_entry(root, (*parts, name.name), name.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue
    except FileNotFoundError:
        pass
    except OSError as error:
        on_trouble(path, error)
    return found


def _entry(root: str, parts: tuple[str, ...], status: os.stat_result) -> Entry:
    directory = stat.S_ISDIR(status.st_mode)
    link = (status.st_dev, status.st_ino) if status.st_nlink > 1 and not directory else None
    kind = kind_of(parts, status.st_mode)
    return Entry(root, parts, kind, status.st_size, status.st_mtime, directory, link)


def kind_of(parts: tuple[str, ...], mode: int) -> Kind:
    """What the name is whose path below the root has these parts. `mode` is lstat's."""
    if any(Owner.of_temporary(part) for part in parts):
        return Kind.TEMPORARY
    if not parts:
        return Kind.DIRECTORY
    if parts[0] != VERSION_DIRECTORY:
        return Kind.STRANGE if version_of(parts[0]) is None else Kind.OTHER_FORMAT
    if stat.S_ISDIR(mode):
        return Kind.DIRECTORY if _is_our_directory(parts[1:]) else Kind.STRANGE
    if stat.S_ISREG(mode) and len(parts) > 2 and _is_our_directory(parts[1:-1]):
        return _kind_of_file(parts[2:])
    return Kind.STRANGE


def _is_our_directory(parts: tuple[str, ...]) -> bool:
    """Below the version directory."""
    match parts:
        case ():
            return True
        case (digest,):
            return is_digest(digest)
        case (digest, name):
            return is_digest(digest) and (is_fan_out(name) or name == QUARANTINE)
    return False


def _kind_of_file(parts: tuple[str, ...]) -> Kind:
    """Below a namespace, in one of our directories."""
    match parts:
        case (name,):
            return Kind.MANIFEST if name == MANIFEST else Kind.STRANGE
        case (directory, _) if directory == QUARANTINE:
            return Kind.QUARANTINED
        case (directory, name) if key_of(directory, name) is not None:
            return Kind.CHUNK
    return Kind.STRANGE


def survey(root: str, entries: Iterable[Entry], files: Files) -> RootSurvey:
    """Everything that `entries`, which come from `walk`, add up to."""
    found = RootSurvey(root)
    links: set[tuple[int, int]] = set()
    for entry in entries:
        size = 0 if entry.link in links else entry.size
        if entry.link is not None:
            links.add(entry.link)
        _add(found, entry, size)
    for namespace in found.namespaces.values():
        _read_manifest_of(namespace, files)
    return found


def _add(found: RootSurvey, entry: Entry, size: int) -> None:
    found.usage.add(entry, size)
    digest = entry.namespace
    if digest is not None and (digest in found.namespaces or entry.is_directory):
        path = f"{entry.root}/{VERSION_DIRECTORY}/{digest}"
        found.namespaces.setdefault(digest, NamespaceSurvey(path, digest)).usage.add(entry, size)
    elif entry.kind is Kind.OTHER_FORMAT:
        found.other_formats.setdefault(entry.parts[0], Usage()).add(entry, size)
    if entry.kind is Kind.TEMPORARY:
        depth = next(i for i, part in enumerate(entry.parts) if Owner.of_temporary(part)) + 1
        found.tree_bytes["/".join((entry.root, *entry.parts[:depth]))] += size
        if depth == len(entry.parts):
            found.temporaries.append(entry)
    elif entry.kind is Kind.QUARANTINED:
        found.quarantined.append(entry)


def _read_manifest_of(namespace: NamespaceSurvey, files: Files) -> None:
    path = f"{namespace.path}/{MANIFEST}"
    try:
        manifest = read_manifest(files, namespace.path)
    except ManifestError as error:
        namespace.problem = BadFile(path, Fault.FOREIGN, str(error))
    except OSError as error:
        namespace.problem = BadFile(path, classify(error), unreadable("it cannot be read", error))
    else:
        if manifest.fingerprint.digest == namespace.digest:
            namespace.manifest = manifest
        else:
            namespace.problem = BadFile(path, Fault.FOREIGN, "is of another fingerprint than its directory")


def check_chunk(files: Files, entry: Entry) -> BadFile | None:
    """Read the whole file; None when it is, bit for bit, what was stored. The fault is GONE when it is not there now.

    A replaced file is no trouble: writers rename, so what was opened stays as it was.
    """
    try:
        _read_and_verify(files, entry)
    except FrameError as error:
        return BadFile(entry.path, classify(error), str(error))
    except OSError as error:
        return BadFile(entry.path, classify(error), unreadable("it cannot be read", error))
    return None


def _read_and_verify(files: Files, entry: Entry) -> None:
    key = key_of(*entry.parts[-2:])
    assert key is not None, "check_chunk is for chunks"
    assert entry.namespace is not None
    fd = files.open(entry.path, os.O_RDONLY)
    try:
        header = decode_header(_read(files, fd, HEADER_BYTES, 0))
        payload_bytes = files.size(fd) - HEADER_BYTES
        _check_size(header, payload_bytes)
        expect(header, key, bytes.fromhex(entry.namespace), payload_bytes)
        verify(header, _read(files, fd, payload_bytes, HEADER_BYTES))
    finally:
        files.close(fd)


def _check_size(header: FrameHeader, payload_bytes: int) -> None:
    """Before any memory is taken for the payload."""
    if payload_bytes != header.payload_bytes:
        kind = FrameFault.SHORT if payload_bytes < header.payload_bytes else FrameFault.FOREIGN
        raise FrameError(kind, f"payload of {payload_bytes} bytes, the header says {header.payload_bytes}")


def _read(files: Files, fd: int, size: int, offset: int) -> memoryview:
    """Up to `size` bytes from there; fewer at the end of the file."""
    buffer = memoryview(bytearray(size))
    done = 0
    while done < size and (read := files.preadv(fd, [buffer[done:]], offset + done)) > 0:
        done += read
    return buffer[:done]
