"""The example of a third-party tier: its own tests pass, it is found through its entry point, and it stays short.

It is made known the way an installation does it, by a dist-info directory written from its pyproject.toml, so that
nothing has to be installed for this test.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_tier"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory for PYTHONPATH that holds the example's module and its metadata."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module in (EXAMPLE / "src").glob("*.py"):
        (tmp_path / module.name).write_text(module.read_text())
    return tmp_path


def test_example_passes_its_own_tests(installed: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE)]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 50
    assert "not installed" not in done.stdout, "the entry point was not found"


def test_example_is_short() -> None:
    """It is there to be read."""
    [module] = (EXAMPLE / "src").glob("*.py")
    assert len(module.read_text().splitlines()) < 150
