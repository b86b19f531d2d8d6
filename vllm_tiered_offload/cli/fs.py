"""`vllm-tiered-offload fs`: looking at, checking and cleaning up the directory of the filesystem tier."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from vllm_tiered_offload.cli import views
from vllm_tiered_offload.cli.errors import FOUND_BAD, INCOMPLETE, UserError
from vllm_tiered_offload.cli.explain import explain
from vllm_tiered_offload.cli.output import ByteBar, counting, print_json, print_lines, print_table, print_trouble
from vllm_tiered_offload.cli.verifying import verify_root
from vllm_tiered_offload.tiers.fs import upkeep
from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.inspect import Kind, RootError, RootSurvey, open_root, survey, unreadable, walk
from vllm_tiered_offload.tiers.fs.manifest import MANIFEST, ManifestError, read_manifest
from vllm_tiered_offload.tiers.fs.owner import Owner
from vllm_tiered_offload.tiers.fs.upkeep import Judge, Removal

fs = typer.Typer(
    help="Look at, check and clean up the directory of the filesystem tier. All of it is safe while engines run.\n\n"
    "Exit codes: 0 fine; 1 a bad file was found (verify), or the two differ (explain A B); 2 a mistake in what was "
    "asked; 3 something could not be read or removed.",
    no_args_is_help=True,
)

Root = Annotated[str, typer.Argument(help='The directory that is "root" in the tier\'s settings.', show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Troubles:
    """What the system did not let us read or change: said at once, and in the exit code at the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, path: str, error: OSError) -> None:
        self.lines.append(unreadable(path, error))
        print_trouble(f"error: {self.lines[-1]}")

    def print_json(self, value: dict[str, Any]) -> None:
        """The document, and what is not in it."""
        print_json({**value, "troubles": self.lines})


@contextmanager
def _troubles() -> Iterator[Troubles]:
    troubles = Troubles()
    try:
        yield troubles
    except RootError as error:
        raise UserError(str(error)) from error
    if troubles.lines:
        raise typer.Exit(INCOMPLETE)


def _survey(root: str, troubles: Troubles) -> RootSurvey:
    path = open_root(root)
    return survey(path, counting(walk(path, troubles), "names"), Files())


@fs.command()
def ls(root: Root, as_json: Json = False) -> None:
    """List what is in the directory: one line for each namespace, that is, each set of chunks that engines share."""
    with _troubles() as troubles:
        found = _survey(root, troubles)
        if as_json:
            troubles.print_json(views.ls_json(found))
        else:
            print_table(views.NAMESPACE_COLUMNS, map(views.namespace_row, views.by_last_change(found)))
            print_lines(views.remarks(found))


@fs.command()
def du(root: Root, as_json: Json = False) -> None:
    """Say where the bytes are. The total is that of `du -sb`: the sizes of all files, and of the directories."""
    with _troubles() as troubles:
        found = _survey(root, troubles)
        if as_json:
            troubles.print_json(views.du_json(found))
        else:
            print_table(views.USAGE_COLUMNS, views.usage_rows(found))


@fs.command()
def verify(
    root: Root,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads that read.")] = 4,
    as_json: Json = False,
) -> None:
    """Read every chunk and check every bit of it, and every manifest. Changes nothing.

    A bad chunk is never served: an engine that meets one computes instead, and takes the file away.
    """
    with _troubles() as troubles:
        found = _survey(root, troubles)
        with ByteBar("verifying", found.usage.bytes[Kind.CHUNK]) as bar:
            result = verify_root(found, Files(), troubles, threads, bar.advance)
        if as_json:
            troubles.print_json(views.verification_json(found, result))
        else:
            print_lines(views.verification_lines(result))
        if result.bad:
            raise typer.Exit(FOUND_BAD)
        if result.unchecked:
            raise typer.Exit(INCOMPLETE)


@fs.command()
def gc(
    root: Root,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    keep_quarantine: Annotated[bool, typer.Option("--keep-quarantine", help="Leave quarantined files alone.")] = False,
    elsewhere: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Remove also what processes left that cannot be seen from here (on another host, in another "
            'container, before the last boot), if it has not changed for so long, such as "12h" or "7d".',
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove what nobody will use again: temporaries and private generations of dead engines, quarantined files.

    What a live engine may own stays, and so do all shared chunks.
    """
    judge = Judge(_me(), time.time(), None if elsewhere is None else _seconds(elsewhere))
    with _troubles() as troubles:
        found = _survey(root, troubles)
        removals = list(upkeep.garbage(found, judge, keep_quarantine=keep_quarantine))
        done = removals if dry_run else _remove_all(removals, troubles)
        _tell_removals(found, done, troubles, dry_run=dry_run, as_json=as_json)


@fs.command()
def drop(
    root: Root,
    fingerprints: Annotated[
        list[str] | None, typer.Argument(help="First digits of namespaces, as `fs ls` shows them.", show_default=False)
    ] = None,
    old_formats: Annotated[bool, typer.Option("--old-formats", help="All that is of older formats.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove whole namespaces, or what older versions left.

    An engine that uses such a namespace goes on: it computes, and stores anew.
    """
    if not fingerprints and not old_formats:
        raise UserError(f"say what to drop from {root}: first digits of a fingerprint (`fs ls`), or --old-formats")
    with _troubles() as troubles:
        found = _survey(root, troubles)
        removals = _chosen(found, fingerprints or [], old_formats)
        if removals and not yes:
            _confirm(removals, as_json)
        _tell_removals(found, _remove_all(removals, troubles), troubles, dry_run=False, as_json=as_json)


def _chosen(found: RootSurvey, fingerprints: list[str], old_formats: bool) -> list[Removal]:
    judge = Judge(_me(), time.time())
    try:
        chosen = [upkeep.one_namespace(found, prefix, judge) for prefix in fingerprints]
    except ValueError as error:
        raise UserError(str(error)) from error
    if old_formats:
        chosen += upkeep.old_formats(found)
    return list(dict.fromkeys(chosen))


def _confirm(removals: list[Removal], as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise UserError(f"nobody is there to be asked whether to remove {removals[0].path}: say --yes")
    print_lines(map(views.removal_line, removals))
    typer.confirm("Remove?", abort=True)


def _remove_all(removals: list[Removal], troubles: Troubles) -> list[Removal]:
    """What was removed."""
    done = []
    files, me = Files(), _me()
    for removal in removals:
        try:
            upkeep.remove(files, removal, me)
        except OSError as error:
            troubles(removal.path, error)
        else:
            done.append(removal)
    return done


def _tell_removals(found: RootSurvey, done: list[Removal], troubles: Troubles, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        troubles.print_json(views.removals_json(found, done, dry_run=dry_run))
    else:
        print_lines([*map(views.removal_line, done), views.removals_line(done, dry_run=dry_run)])


@fs.command(name="explain")
def explain_command(
    a: Annotated[str, typer.Argument(metavar="ROOT|A", help="A root; or a namespace's directory or manifest.")],
    b: Annotated[
        str | None,
        typer.Argument(metavar="[B]", help="A second namespace's directory or manifest.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say why two namespaces do not share chunks: which fields of the fingerprint differ.

    Of a root, every namespace is compared with the shared one that changed last.
    """
    with _troubles() as troubles:
        named = _manifests_of(a, troubles) if b is None else [_manifest_at(a), _manifest_at(b)]
        pairs = [(named[0], other, explain(named[0][1], other[1])) for other in named[1:]]
        if as_json:
            troubles.print_json(views.pairs_json(pairs))
        elif pairs:
            print_lines(line for pair in pairs for line in views.pair_lines(pair))
        else:
            print_lines([f"{a}: fewer than two namespaces, nothing to compare"])
        if b is not None and pairs[0][2]:
            raise typer.Exit(FOUND_BAD)


def _manifest_at(path: str) -> views.Named:
    """Of a namespace's directory, or of the manifest in it."""
    directory = os.path.dirname(os.path.abspath(path)) if os.path.basename(path) == MANIFEST else path
    try:
        return path, read_manifest(Files(), directory)
    except ManifestError as error:
        raise UserError(f"{directory}/{MANIFEST} {error}") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path} has no {MANIFEST}: name two namespaces (`fs ls --json` has their paths)") from error
    except OSError as error:
        raise UserError(unreadable(path, error)) from error


def _manifests_of(root: str, troubles: Troubles) -> list[views.Named]:
    """Those of a root that can be read, shared ones in front."""
    namespaces = sorted(views.by_last_change(_survey(root, troubles)), key=lambda n: n.owner is not None)
    return [(n.path, n.manifest) for n in namespaces if n.manifest is not None]


def _seconds(age: str) -> float:
    """ "90s", "10m", "12h", "7d"."""
    number, unit = age[:-1], age[-1:]
    if not number.isascii() or not number.isdigit() or unit not in _UNITS:
        raise UserError(f'--elsewhere {age}: expected an age such as "12h" or "7d" (s, m, h, d)')
    return float(int(number) * _UNITS[unit])


def _me() -> Owner:
    return Owner.of("cli")
