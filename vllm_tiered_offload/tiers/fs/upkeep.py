"""Removing from a root, from outside and while engines run.

What a live process may own is never touched: temporaries and private generations go when their process is seen to be
dead. Processes elsewhere (another host, container or boot) cannot be seen, so what they left goes only when asked for,
by its age. A directory is renamed away before it is emptied, so that no engine ever meets half of one; if that is cut
short, the rest is a temporary like any other.

What goes is decided on a survey, without I/O; `remove` does it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from vllm_tiered_offload.tiers.fs.files import Files, remove_file
from vllm_tiered_offload.tiers.fs.inspect import NamespaceSurvey, RootSurvey
from vllm_tiered_offload.tiers.fs.namespace import is_older_format, remove_directory
from vllm_tiered_offload.tiers.fs.owner import Owner


class What(Enum):
    """What can be removed."""

    TEMPORARY = "temporary"
    QUARANTINED = "quarantined file"
    PRIVATE = "private generation"
    NAMESPACE = "namespace"
    OLD_FORMAT = "older format"


@dataclass(frozen=True, slots=True)
class Removal:
    """Something to be removed, with all that is in it. `bytes` is the sum of the sizes that lstat tells."""

    path: str
    what: What
    bytes: int
    is_directory: bool


@dataclass(frozen=True, slots=True)
class Judge:
    """Who is still at work. `elsewhere` is the age in seconds from which leftovers of unseen processes may go."""

    me: Owner
    now: float
    elsewhere: float | None = None

    def may_remove(self, owner: Owner, last_change: float) -> bool:
        if owner.host == self.me.host:
            return self.me.finds_stale(owner, 0.0)
        return self.elsewhere is not None and self.now - last_change > self.elsewhere


def garbage(found: RootSurvey, judge: Judge, *, keep_quarantine: bool = False) -> Iterator[Removal]:
    """What nobody will ever use again. A private generation goes as a whole or, being in use, not at all."""
    private = set()
    for digest, namespace in found.namespaces.items():
        if namespace.owner is not None:
            private.add(digest)
            if judge.may_remove(namespace.owner, namespace.usage.newest):
                yield _whole(namespace)
    for entry in found.temporaries:
        owner = Owner.of_temporary(entry.parts[-1])
        if entry.namespace not in private and owner is not None and judge.may_remove(owner, entry.mtime):
            yield Removal(entry.path, What.TEMPORARY, found.tree_bytes[entry.path], entry.is_directory)
    for entry in found.quarantined:
        if entry.namespace not in private and not keep_quarantine:
            yield Removal(entry.path, What.QUARANTINED, entry.size, False)


def _whole(namespace: NamespaceSurvey) -> Removal:
    what = What.NAMESPACE if namespace.owner is None else What.PRIVATE
    return Removal(namespace.path, what, namespace.usage.total, True)


def old_formats(found: RootSurvey) -> list[Removal]:
    """The version directories that no engine of this version, or a later one, uses."""
    return [
        Removal(f"{found.root}/{name}", What.OLD_FORMAT, usage.total, True)
        for name, usage in sorted(found.other_formats.items())
        if is_older_format(name)
    ]


def one_namespace(found: RootSurvey, prefix: str, judge: Judge) -> Removal:
    """The namespace whose fingerprint begins with `prefix`.

    Raises ValueError, one line, unless there is exactly one and it is no private generation in use.
    """
    matches = [n for digest, n in sorted(found.namespaces.items()) if digest.startswith(prefix.lower())]
    if not prefix or not matches:
        raise ValueError(f"no namespace in {found.root} begins with {prefix!r}: `fs ls` lists them")
    if len(matches) > 1:
        names = ", ".join(match.digest[: len(prefix) + 4] for match in matches)
        raise ValueError(f"{prefix!r} is the beginning of several namespaces ({names}): give more digits")
    [match] = matches
    if match.owner is not None and not judge.may_remove(match.owner, match.usage.newest):
        raise ValueError(f"{match.path} is the private generation of an engine that may be alive: it is left alone")
    return _whole(match)


def remove(files: Files, removal: Removal, me: Owner) -> None:
    """Do it. What is gone already does not matter; raises OSError when something stays."""
    if removal.is_directory:
        remove_directory(files, removal.path, me)
    else:
        remove_file(files, removal.path)
