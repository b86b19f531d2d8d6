"""Every mutant still fits the sources, and there is one for each invariant. That they are killed, ci/mutants.sh shows.

Mutation: changing a line that a patch removes, or renaming a test that a header names, makes this fail.
"""

import re
from pathlib import Path

import pytest
from mutant import DIRECTORY, INVARIANTS, Mutant, MutantError, read_all

REPOSITORY = DIRECTORY.parents[1]
PATCHES = sorted(DIRECTORY.glob("*.patch"))


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_mutant_fits_the_sources(path: Path) -> None:
    """Well formed, applies in exactly one place, is still Python, and the tests that it names exist."""
    mutant = Mutant.read(path)
    assert path.stem.startswith(f"{mutant.invariant.lower()}_")
    for file, text in mutant.mutated(REPOSITORY).items():
        assert text != (REPOSITORY / file).read_text()
        compile(text, file, "exec")
    for test in mutant.tests:
        file, name, *_ = test.partition("[")[0].split("::")
        assert re.search(rf"^(def|class) {name}\b", (REPOSITORY / file).read_text(), re.MULTILINE), test


def test_each_invariant_has_a_mutant() -> None:
    """An invariant that nobody can break is not tested."""
    assert {mutant.invariant for mutant in read_all()} == set(INVARIANTS)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Invariant: L1\nTest: t\n--- a/x\n+++ b/x\n@@\n-a\n", "Breaks"),
        ("Invariant: L9\nTest: t\nBreaks: b\n--- a/x\n+++ b/x\n@@\n-a\n", "invariant L9"),
        ("Invariant: L1\nTest: t\nBreaks: b\nOdd: b\n--- a/x\n+++ b/x\n@@\n-a\n", "Odd"),
        ("Invariant: L1\nTest: t\nBreaks: b\n--- a/x\n+++ b/x\n@@\n" + "-a\n" * 11, "11 changed lines"),
        ("Invariant: L1\nTest: t\nBreaks: b\n", "0 hunks"),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "m.patch"
    path.write_text(text)
    with pytest.raises(MutantError, match=problem):
        Mutant.read(path)


@pytest.mark.parametrize("source", ["a\nb\na\nb\n", "a\nc\n"])
def test_a_hunk_fits_exactly_once_or_nothing_changes(tmp_path: Path, source: str) -> None:
    (tmp_path / "m.patch").write_text("Invariant: L1\nTest: t\nBreaks: b\n--- a/x\n+++ b/x\n@@\n a\n-b\n+c\n")
    (tmp_path / "x").write_text(source)
    with pytest.raises(MutantError, match="places in x fit"):
        Mutant.read(tmp_path / "m.patch").apply(tmp_path)
    assert (tmp_path / "x").read_text() == source
