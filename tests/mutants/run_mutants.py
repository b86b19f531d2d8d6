"""Applies each mutant in a scratch copy of this tree and runs the fast tests there: `bash ci/mutants.sh`.

A mutant is killed when every test that its header names fails, with the words that it should say, while at least
90 % of the other fast tests still pass: a patch that breaks everything proves nothing. First the tests run without a
mutant, and must pass. The last line is `N killed, M survived`; M counts whatever was not killed, for whatever reason.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mutant import DIRECTORY, Mutant, MutantError, read_all

REPOSITORY = DIRECTORY.parents[1]
COPIED = ("vllm_tiered_offload", "tests", "examples", "ci", "docs")  # and the files beside them
OTHERS_THAT_PASS = 0.9
RUN_SECONDS = 900
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-m", "fast", "-p", "no:cacheprovider"),
    *("--timeout=60", "--hypothesis-profile=mutants", "--junitxml=results.xml"),
)


@dataclass(frozen=True)
class Results:
    """What a run of tests gave: ids of tests that passed, and failure text by id of those that failed."""

    passed: frozenset[str]
    failed: dict[str, str]

    def of(self, test: str) -> list[str]:
        """The ids that ran among those that `test` stands for: itself, or its cases."""
        return [ran for ran in (*self.passed, *self.failed) if ran == test or ran.startswith(f"{test}[")]


@dataclass(frozen=True)
class Verdict:
    """`survived` says why the mutant was not killed; empty when it was."""

    mutant: Mutant
    survived: str
    text: str
    seconds: float


@contextmanager
def scratch_copy(tree: Path) -> Iterator[Path]:
    """A copy of `tree` in a temporary directory of its own."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        root = Path(name)
        for directory in COPIED:
            shutil.copytree(tree / directory, root / directory, ignore=shutil.ignore_patterns("__pycache__"))
        for file in tree.iterdir():
            if file.is_file():
                shutil.copy2(file, root)
        yield root


def run_tests(root: Path, tests: Sequence[str]) -> Results:
    """Run the fast ones of `tests` in the tree `root`. Raises MutantError when pytest itself does not end well."""
    environment = {name: value for name, value in os.environ.items() if name != "VTO_EXPECT_INSTALLED"}
    environment["PYTHONPATH"] = str(root)  # before any installed copy
    process = subprocess.Popen(
        [*PYTEST, *tests],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise MutantError(f"the tests did not end within {RUN_SECONDS} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode not in (0, 1) or not (root / "results.xml").exists():
        raise MutantError(f"pytest ended with status {process.returncode}:\n{output[-3000:]}")
    return read_results(root / "results.xml")


def read_results(path: Path) -> Results:
    """From pytest's XML report; skipped tests are in neither set."""
    passed: set[str] = set()
    failed: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        test = f"{case.get('classname')}.{case.get('name')}"
        troubles = [*case.iter("failure"), *case.iter("error")]
        if troubles:
            failed[test] = failed.get(test, "") + "\n".join(trouble.text or "" for trouble in troubles)
        elif case.find("skipped") is None:
            passed.add(test)
    return Results(frozenset(passed - failed.keys()), failed)


def id_in_report(node_id: str) -> str:
    """How the XML report calls a test."""
    path, *rest = node_id.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *rest])


def judge(mutant: Mutant, clean: Path, baseline: Results, named_only: bool) -> Verdict:
    """Apply the mutant in a copy of `clean`, run the tests, and say what came of it."""
    began = time.monotonic()
    text = ""
    try:
        with scratch_copy(clean) as root:
            mutant.apply(root)
            results = run_tests(root, mutant.tests if named_only else ["tests"])
        survived, text = why_survived(mutant, baseline, results, named_only)
    except MutantError as error:
        survived = str(error)
    return Verdict(mutant, survived, text, time.monotonic() - began)


def why_survived(mutant: Mutant, baseline: Results, results: Results, named_only: bool) -> tuple[str, str]:
    """The reason, empty when the mutant was killed; and a note about the other tests."""
    named = [results.of(id_in_report(test)) for test in mutant.tests]
    for test, ran in zip(mutant.tests, named, strict=True):
        if not ran:
            return f"{test} is not among the fast tests", ""
        if not results.failed.keys() & set(ran):
            return f"{test} passes", ""
    mine = {test for ran in named for test in ran}
    if not any(mutant.says in results.failed.get(test, "") for test in mine):
        return f"no failure says {mutant.says!r}", ""
    if named_only:
        return "", ""
    others = baseline.passed - mine
    passing = len(others & results.passed)
    note = f"{passing} of {len(others)} others pass"
    return ("" if passing >= OTHERS_THAT_PASS * len(others) else f"it breaks too much: {note}"), note


def run_unmutated(clean: Path, tests: Sequence[str]) -> Results:
    """The same tests without a mutant. Raises MutantError when one fails."""
    began = time.monotonic()
    with scratch_copy(clean) as root:
        results = run_tests(root, tests)
    if results.failed:
        raise MutantError("without a mutant these fail already: " + ", ".join(sorted(results.failed)))
    print(f"without a mutant {len(results.passed)} tests pass in {time.monotonic() - began:.0f} s", flush=True)
    return results


def judge_all(mutants: Sequence[Mutant], clean: Path, named_only: bool, jobs: int) -> tuple[int, int]:
    """Print each verdict; how many mutants were killed and how many survived. Raises MutantError, see run_unmutated."""
    named = sorted({test for mutant in mutants for test in mutant.tests})
    baseline = run_unmutated(clean, named if named_only else ["tests"])
    killed = survived = 0
    with ThreadPoolExecutor(jobs) as pool:
        for verdict in pool.map(lambda mutant: judge(mutant, clean, baseline, named_only), mutants):
            outcome = f"SURVIVED: {verdict.survived}" if verdict.survived else f"killed {verdict.text}"
            print(f"{verdict.mutant.name} ({verdict.seconds:.0f} s): {outcome}".rstrip(), flush=True)
            survived += bool(verdict.survived)
            killed += not verdict.survived
    return killed, survived


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ci/mutants.sh", description="Prove that the fast tests notice each mutant.")
    parser.add_argument("names", nargs="*", help="mutants (tests/mutants/NAME.patch); all of them by default")
    parser.add_argument("--named-only", action="store_true", help="run only the tests that the mutants name")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    options = parser.parse_args(arguments)
    try:
        mutants = read_all(options.names)
        with scratch_copy(REPOSITORY) as clean:  # the checkout may change meanwhile
            killed, survived = judge_all(mutants, clean, options.named_only, options.jobs)
    except MutantError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{killed} killed, {survived} survived")
    return 1 if survived or not killed else 0


if __name__ == "__main__":
    sys.exit(main())
