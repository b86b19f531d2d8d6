"""Installs the packages that make trouble, and orders it while an engine runs."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .disk import wait_until
from .engine import python_path

HERE = Path(__file__).parent
EXAMPLE_TIER = HERE.parents[1] / "examples" / "custom_tier"
TROUBLEMAKER = HERE / "troublemaker"


def install(target: Path, *projects: Path) -> Path:
    """`pip install` of these projects into a directory of their own, which serves once it is on PYTHONPATH."""
    sources = target.with_name(f"{target.name}-sources")  # setuptools leaves its build beside what it builds
    copies = [shutil.copytree(project, sources / project.name) for project in projects]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(target), *map(str, copies)]
    subprocess.run(command, check=True, timeout=120)
    return target


class Trouble:
    """Orders to the troublemaker package in one engine, through a file in `directory`."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._file = directory / "orders.json"
        self._readers = ["tier", *(f"rank{rank}" for rank in range(ranks))]
        self._number = 0
        self._write({})

    def env(self, packages: Path) -> dict[str, str]:
        """What an engine needs to obey."""
        return {**python_path(packages), "TROUBLE_ORDERS": str(self._file)}

    @contextmanager
    def ordered(self, **order: Any) -> Iterator[None]:
        """Trouble inside, none afterwards."""
        self.order(**order)
        try:
            yield
        finally:
            self.order()

    def order(self, **order: Any) -> None:
        """Returns when everybody who makes trouble has read it."""
        self._number += 1
        text = self._write(order)
        wait_until(lambda: all(self._read_by(reader) == text for reader in self._readers), f"{text} is obeyed")

    def _write(self, order: dict[str, Any]) -> str:
        text = json.dumps({"number": self._number, **order})
        draft = self._file.with_suffix(".draft")
        draft.write_text(text)
        draft.rename(self._file)
        return text

    def _read_by(self, reader: str) -> str:
        obeyed = self._file.with_name(f"{reader}.obeyed")
        return obeyed.read_text() if obeyed.exists() else ""
