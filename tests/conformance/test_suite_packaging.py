"""The suite is part of the wheel; pytest is needed for it, and for nothing else of ours."""

import ast
import importlib.util
from pathlib import Path

import vllm_tiered_offload
from vllm_tiered_offload.testing import conformance

PACKAGE = Path(vllm_tiered_offload.__file__).parent


def imported(file: Path) -> set[str]:
    """Top-level packages that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def test_only_the_suite_imports_pytest() -> None:
    users = {file for file in PACKAGE.rglob("*.py") if "pytest" in imported(file)}
    assert users
    assert {file.parent for file in users} == {PACKAGE / "testing" / "conformance"}


def test_assertions_explain_themselves() -> None:
    """Every module of the suite is named to pytest before it is imported; one that is not would say nothing."""
    directory = Path(conformance.__file__).parent
    for file in directory.glob("*.py"):
        if any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(file.read_text()))):
            spec = importlib.util.find_spec(f"{conformance.__name__}.{file.stem}")
            assert spec is not None
            assert type(spec.loader).__name__ == "AssertionRewritingHook", f"{file.stem} is not rewritten"


def test_everything_public_is_there() -> None:
    assert [name for name in conformance.__all__ if not hasattr(conformance, name)] == []
    assert conformance.__all__ == sorted(conformance.__all__)
