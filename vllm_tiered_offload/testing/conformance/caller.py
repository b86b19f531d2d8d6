"""The scheduler thread as a tier sees it: it must not be held up, and in strict moments files and sockets are refused.

`Caller` times every call. While `refuse_io` is set it also arms an audit hook for the calling thread: opening a file,
making a socket, starting a process raises `ForbiddenCall` there, as if the medium were gone. The hook sees what Python
audits: a read from a descriptor that is open already is only seen by the clock.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

FORBIDDEN = (
    "open",
    "socket.",
    "subprocess.Popen",
    "os.posix_spawn",
    "os.listdir",
    "os.scandir",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "shutil.",
    "sqlite3.connect",
    "urllib.Request",
    "time.sleep",
)

R = TypeVar("R")


class ForbiddenCall(OSError):
    """A file or socket call on the scheduler thread."""


class _Armed(threading.local):
    found: list[str] | None = None  # where this thread's forbidden calls are noted; None while it is not watched


_armed = _Armed()
_installed = False


def _audit(event: str, args: tuple[object, ...]) -> None:
    found = _armed.found
    if found is None or not event.startswith(FORBIDDEN):
        return
    _armed.found = None  # describing the call must not trip the hook
    try:
        found.append(f"{event}{args!r}")
        raise ForbiddenCall(f"{event} on the scheduler thread")
    finally:
        _armed.found = found


def _install() -> None:
    """Put the audit hook in place, once per process: Python cannot take it out again."""
    global _installed  # noqa: PLW0603
    if not _installed:
        sys.addaudithook(_audit)
        _installed = True


class Caller:
    """Makes the calls of one scheduler thread, and remembers what they cost."""

    def __init__(self, *, refuse_io: bool = False) -> None:
        self.refuse_io = refuse_io
        self.slowest: dict[str, float] = {}  # method -> seconds of its slowest call
        self.forbidden: list[str] = []  # "method: what it did" of each refused call
        _install()

    def __call__(self, name: str, call: Callable[..., R], *args: object) -> R:
        """The method's own answer or exception."""
        noted: list[str] = []
        started = time.monotonic()
        _armed.found = noted if self.refuse_io else None
        try:
            return call(*args)
        finally:
            _armed.found = None
            seconds = time.monotonic() - started
            self.slowest[name] = max(seconds, self.slowest.get(name, 0.0))
            self.forbidden += [f"{name}: {what}" for what in noted]

    def slower_than(self, seconds: float) -> dict[str, float]:
        """Methods of which a call took longer."""
        return {name: taken for name, taken in self.slowest.items() if taken > seconds}


def call_bounded(name: str, call: Callable[[], R], seconds: float) -> R:
    """Call on another thread, as the guard does with what may block. Fails when it has not ended by then."""
    answers: list[R] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"conformance-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"{name} has not come back after {seconds:g} s"
    if errors:
        raise errors[0]
    return answers[0]
