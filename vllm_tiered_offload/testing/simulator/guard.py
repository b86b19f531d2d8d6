"""No file and no socket on the scheduler thread: an audit hook that is armed while a connector hook runs there."""

import sys
import threading

FORBIDDEN = ("open", "socket.", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "subprocess.Popen")


class ForbiddenCall(RuntimeError):
    """A file or socket call on the scheduler thread. It is refused, like a medium that is gone."""


class _Armed(threading.local):
    depth = 0  # how many armed hooks this thread is in
    seen: str | None = None  # the first forbidden call of the outermost hook


_armed = _Armed()
_installed = False


def _audit(event: str, args: tuple[object, ...]) -> None:
    if _armed.depth and event.startswith(FORBIDDEN):
        depth, _armed.depth = _armed.depth, 0  # describing the call must not trip the hook
        try:
            _armed.seen = _armed.seen or f"{event} {args!r}"
            raise ForbiddenCall(_armed.seen)
        finally:
            _armed.depth = depth


def install() -> None:
    """Put the audit hook in place, once per process: Python cannot take it out again."""
    global _installed  # noqa: PLW0603
    if not _installed:
        sys.addaudithook(_audit)
        _installed = True


def arm() -> None:
    """From now on until the matching `disarm`, file and socket calls of this thread are refused."""
    _armed.depth += 1


def disarm() -> str | None:
    """The first call that was refused, once the outermost `arm` is over."""
    _armed.depth -= 1
    if _armed.depth:
        return None
    seen, _armed.seen = _armed.seen, None
    return seen
