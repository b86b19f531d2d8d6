"""Who wrote a temporary or a private generation, and whether that process can still be at work on it.

    .tmp-<engine id>-<host>-<pid>-<counter>

<host> stands for one boot of one machine and its PID namespace: only within it does a process id say anything. There,
leftovers are stale exactly when their process is dead. What our own engine id left elsewhere (a container that was
replaced) is stale when it is old. Everything else belongs to somebody who may be alive, and is left alone.
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
STALE_AGE = 600.0  # seconds

_TEMPORARY = re.compile(r"\.tmp-(?P<engine>.+)-(?P<host>[0-9a-f]{12})-(?P<pid>[0-9]{1,10})-[0-9]+")
_counter = itertools.count()


@dataclass(frozen=True, slots=True)
class Owner:
    """A process of an engine. `engine` has no characters but those that a file name takes."""

    engine: str
    host: str
    pid: int

    @classmethod
    def of(cls, engine_id: str) -> "Owner":
        """This process, for this engine. Ids that are long or look alike in a file name stay apart by a digest."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", engine_id)[:48] or "_"
        if name != engine_id:
            name += "." + hashlib.blake2b(engine_id.encode(errors="replace"), digest_size=4).hexdigest()
        return cls(name, host_token(), os.getpid())

    @classmethod
    def of_temporary(cls, name: str) -> "Owner | None":
        """Who made the temporary of that name; None when it is no name of ours."""
        match = _TEMPORARY.fullmatch(name)
        return cls(match["engine"], match["host"], int(match["pid"])) if match else None

    def temporary_name(self) -> str:
        """A name that nobody else uses."""
        return f"{TEMPORARY_PREFIX}{self.engine}-{self.host}-{self.pid}-{next(_counter)}"

    def finds_stale(self, other: "Owner", age: float) -> bool:
        """Whether what `other` left `age` seconds ago may be collected by us."""
        if other.host == self.host:
            return not is_alive(other.pid)
        return other.engine == self.engine and age > STALE_AGE


def is_alive(pid: int) -> bool:
    """Whether a process of that id is there, whosever it is."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


@cache
def host_token() -> str:
    """12 hexadecimal digits; a random one where the system does not say who it is, so that nothing looks dead."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return uuid.uuid4().hex[:12]
    return hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=6).hexdigest()
