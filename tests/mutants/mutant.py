"""A mutant: a small patch that breaks one invariant of DESIGN, and the test that has to notice.

A patch is a unified diff under a header of `Name: value` lines:

    Invariant: L1                      which invariant it breaks
    Test: tests/.../test_x.py::test_y  a fast test that must fail; several lines name several tests, all must fail,
                                       and one without its [parameters] has failed when one of them has
    Says: [l3]                         (may be left out) text in the failure of one of these tests
    Breaks: ...                        what a user would meet, in one line

A hunk is found by its text, which must be in the file exactly once. Line numbers are for readers and for `patch -p1`,
so other changes to a file leave a mutant alone unless they touch its very lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

DIRECTORY = Path(__file__).parent
INVARIANTS = [f"{letter}{number}" for letter, last in (("L", 7), ("D", 8), ("V", 7)) for number in range(1, last + 1)]
MAX_CHANGED_LINES = 10


class MutantError(Exception):
    """The patch is not well formed, or does not fit the tree."""


@dataclass(frozen=True)
class Hunk:
    """Lines of one file, before and after."""

    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Mutant:
    """One patch file."""

    name: str
    invariant: str
    tests: tuple[str, ...]
    says: str
    breaks: str
    hunks: tuple[Hunk, ...]
    changed_lines: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises MutantError."""
        head, mark, body = path.read_text().partition("--- a/")
        try:
            fields = [line.split(": ", 1) for line in head.splitlines() if line.strip()]
            named = {name: [value for other, value in fields if other == name] for name, _ in fields}
            hunks = _parse_hunks((mark + body).splitlines())
            mutant = cls(
                name=path.stem,
                invariant=_only(named, "Invariant"),
                tests=tuple(named.pop("Test")),
                says=_only(named, "Says") if "Says" in named else "",
                breaks=_only(named, "Breaks"),
                hunks=hunks,
                changed_lines=sum(line.startswith(("+", "-")) for line in body.splitlines() if not _names_file(line)),
            )
        except (KeyError, ValueError) as error:
            raise MutantError(f"{path.name}: not well formed: {error!r}") from error
        if named or not hunks or mutant.invariant not in INVARIANTS or mutant.changed_lines > MAX_CHANGED_LINES:
            raise MutantError(
                f"{path.name}: unknown {sorted(named)}, invariant {mutant.invariant}, {len(hunks)} hunks, "
                f"{mutant.changed_lines} changed lines (at most {MAX_CHANGED_LINES})"
            )
        return mutant

    def mutated(self, root: Path) -> dict[str, str]:
        """The changed files' new text, by path below `root`. Raises MutantError where a hunk does not fit."""
        texts: dict[str, str] = {}
        for hunk in self.hunks:
            text = texts.get(hunk.file) or (root / hunk.file).read_text()
            found = text.count(hunk.before)
            if found != 1:
                raise MutantError(f"{self.name}: {found} places in {hunk.file} fit; refresh the patch:\n{hunk.before}")
            texts[hunk.file] = text.replace(hunk.before, hunk.after)
        return texts

    def apply(self, root: Path) -> None:
        """Change the files below `root`. Raises MutantError, and then changes nothing."""
        for file, text in self.mutated(root).items():
            (root / file).write_text(text)


def read_all(names: Sequence[str] = ()) -> list[Mutant]:
    """Every mutant, or those named. Raises MutantError."""
    paths = {path.stem: path for path in sorted(DIRECTORY.glob("*.patch"))}
    unknown = sorted(set(names) - paths.keys())
    if unknown:
        raise MutantError(f"no such mutant: {', '.join(unknown)}")
    return [Mutant.read(paths[name]) for name in names or paths]


def _only(fields: dict[str, list[str]], name: str) -> str:
    (value,) = fields.pop(name)
    return value


def _names_file(line: str) -> bool:
    return line.startswith(("--- a/", "+++ b/"))


def _parse_hunks(lines: list[str]) -> tuple[Hunk, ...]:
    hunks: list[Hunk] = []
    file = ""
    for line in lines:
        if line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/")
        elif line.startswith("@@"):
            hunks.append(Hunk(file, "", ""))
        elif not line.startswith("--- a/"):
            last = hunks[-1]
            sign, text = line[:1] or " ", line[1:] + "\n"
            hunks[-1] = Hunk(
                file,
                last.before + text if sign in " -" else last.before,
                last.after + text if sign in " +" else last.after,
            )
    return tuple(hunks)
