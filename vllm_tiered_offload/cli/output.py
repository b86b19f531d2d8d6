"""What the commands print: tables for people, JSON for programs, progress on a terminal only."""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=1))


def print_lines(lines: Iterable[str]) -> None:
    """On standard output, however long."""
    for line in lines:
        print(printable(line))


def print_trouble(text: str) -> None:
    """One line on standard error."""
    print(printable(text), file=sys.stderr)


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Columns whose name begins with a ">" are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def printable(text: str) -> str:
    """With everything escaped that could move a cursor, colour a terminal or not be encoded."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def size(number: int) -> str:
    """Bytes for people, with three digits."""
    value, unit = float(number), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{number} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def count(number: int, thing: str) -> str:
    """ "1 file", "2 files"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _progress(*columns: Any) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def counting(items: Iterable[T], what: str) -> Iterator[T]:
    """Goes through the items; how many they were so far is shown on a terminal."""
    with _progress(SpinnerColumn(), TextColumn("{task.description} {task.completed:,}")) as progress:
        task = progress.add_task(what, total=None)
        for item in items:
            yield item
            progress.advance(task)


class ByteBar:
    """A bar over bytes, on a terminal."""

    def __init__(self, what: str, total: int) -> None:
        self._progress = _progress(TextColumn(what), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
        self._task = self._progress.add_task(what, total=total)

    def __enter__(self) -> "ByteBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, done: int) -> None:
        self._progress.advance(self._task, done)
