"""What can go wrong with one chunk, as counted."""

import errno
from enum import Enum

from vllm_tiered_offload.tiers.block_frame import FrameError, FrameFault


class Fault(Enum):
    """Kinds of failure; the values are the label `kind` of the failure counters."""

    GONE = "gone"  # no such file (any more)
    SHORT = "short"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    UNSUPPORTED = "unsupported"
    EXPIRED = "expired"  # older than the ttl
    NO_SPACE = "no_space"
    NOT_ALLOWED = "not_allowed"  # read-only, no permission
    IO = "io"
    TOO_MANY_FILES = "too_many_files"
    STALE = "stale"  # a network filesystem lost the file
    OTHER = "other"
    REFUSED = "refused"  # the directory's manifest is not ours
    NOT_READY = "not_ready"  # what the directory holds is not known yet, so the capacity might be exceeded
    NO_ROOM = "no_room"  # capacity, and nothing to evict
    PAUSED = "paused"  # stores pause after the medium refused one
    CANCELLED = "cancelled"  # shut down before its turn came
    INTERNAL = "internal"  # a mistake of ours

    @property
    def condemns_file(self) -> bool:
        """Whether the file itself is bad. Trouble of the machine never costs a file."""
        return self in _BAD_FILE

    @property
    def means_absent(self) -> bool:
        """Whether there is nothing to be read under that name."""
        return self in (Fault.GONE, Fault.EXPIRED)

    @property
    def pauses_stores(self) -> bool:
        """Whether the next store would meet the same trouble."""
        return self in (Fault.NO_SPACE, Fault.NOT_ALLOWED, Fault.REFUSED)


_BAD_FILE = frozenset({Fault.SHORT, Fault.CORRUPT, Fault.FOREIGN})

_BY_ERRNO = {
    errno.ENOENT: Fault.GONE,
    errno.ENOTDIR: Fault.GONE,
    errno.ENOSPC: Fault.NO_SPACE,
    errno.EDQUOT: Fault.NO_SPACE,
    errno.EROFS: Fault.NOT_ALLOWED,
    errno.EACCES: Fault.NOT_ALLOWED,
    errno.EPERM: Fault.NOT_ALLOWED,
    errno.EIO: Fault.IO,
    errno.EMFILE: Fault.TOO_MANY_FILES,
    errno.ENFILE: Fault.TOO_MANY_FILES,
    errno.ESTALE: Fault.STALE,
}

_BY_FRAME = {
    FrameFault.SHORT: Fault.SHORT,
    FrameFault.CORRUPT: Fault.CORRUPT,
    FrameFault.FOREIGN: Fault.FOREIGN,
    FrameFault.UNSUPPORTED: Fault.UNSUPPORTED,
}


class NamespaceError(Exception):
    """The namespace directory cannot be used; the text is one line and `fault` the kind."""

    def __init__(self, fault: Fault, text: str) -> None:
        self.fault = fault
        super().__init__(text)


class ExpiredError(Exception):
    """The file is older than the ttl."""


def classify(error: BaseException) -> Fault:
    """The kind of any exception that moving a chunk can raise."""
    if isinstance(error, FrameError):
        return _BY_FRAME[error.kind]
    if isinstance(error, OSError):
        return _BY_ERRNO.get(error.errno or 0, Fault.OTHER)
    if isinstance(error, NamespaceError):
        return error.fault
    if isinstance(error, ExpiredError):
        return Fault.EXPIRED
    return Fault.INTERNAL
