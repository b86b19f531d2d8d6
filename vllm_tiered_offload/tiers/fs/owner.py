"""Who wrote a temporary or a private generation, and whether that process can still be at work on it.

    .tmp-<engine id>-<host>-<pid>-<start>-<counter>

<host> stands for one boot of one machine and its PID namespace: only within it does a process id say anything. There,
leftovers are stale exactly when their process is dead; a process id that was given away again is told by <start>, when
the process began (clock ticks since the boot, 0 where that is not known). What our own engine id left elsewhere is that
of a container that was replaced, or of an engine on another host that somebody gave the same id: it is stale when
nobody has used it for so long that nothing is lost if that one is alive. Everything else belongs to somebody who may be
alive, and is left alone.
"""

import hashlib
import itertools
import os
import re
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TEMPORARY_PREFIX = ".tmp-"
STALE_AGE = 3600.0  # seconds

_TEMPORARY = re.compile(
    r"\.tmp-(?P<engine>.+)-(?P<host>[0-9a-f]{12})-(?P<pid>[0-9]{1,10})-(?P<started>[0-9]{1,18})-[0-9]+"
)
_counter = itertools.count()


@dataclass(frozen=True, slots=True)
class Owner:
    """A process of an engine. `engine` has no characters but those that a file name takes."""

    engine: str
    host: str
    pid: int
    started: int = 0

    @classmethod
    def of(cls, engine_id: str) -> "Owner":
        """This process, for this engine. Ids that are long or look alike in a file name stay apart by a digest."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", engine_id)[:48] or "_"
        if name != engine_id:
            name += "." + hashlib.blake2b(engine_id.encode(errors="replace"), digest_size=4).hexdigest()
        pid = os.getpid()
        return cls(name, host_token(), pid, start_of(pid) or 0)

    @classmethod
    def of_temporary(cls, name: str) -> "Owner | None":
        """Who made the temporary of that name; None when it is no name of ours."""
        match = _TEMPORARY.fullmatch(name)
        return cls(match["engine"], match["host"], int(match["pid"]), int(match["started"])) if match else None

    def temporary_name(self) -> str:
        """A name that nobody else uses."""
        return f"{TEMPORARY_PREFIX}{self.engine}-{self.host}-{self.pid}-{self.started}-{next(_counter)}"

    def finds_stale(self, other: "Owner", age: float) -> bool:
        """Whether what `other` left, and nobody has used for `age` seconds, may be collected by us."""
        if other.host == self.host:
            return not is_alive(other.pid, other.started)
        return other.engine == self.engine and age > STALE_AGE


def is_alive(pid: int, started: int) -> bool:
    """Whether the process of that id that began then is there, whosever it is; in doubt it is."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # another user's
    return not started or start_of(pid) in (started, None)


def start_of(pid: int) -> int | None:
    """When the process began, in clock ticks since the boot; None where the system does not say."""
    try:
        # The name in parentheses may hold anything; what comes after it begins with the third field, and this is the
        # 22nd.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


@cache
def host_token() -> str:
    """12 hexadecimal digits; a random one where the system does not say who it is, so that nothing looks dead."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return uuid.uuid4().hex[:12]
    return hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=6).hexdigest()
