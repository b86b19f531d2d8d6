"""How the benchmarks of this folder tell what they found."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def log(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column holds names, the others numbers."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "   ".join(cells))
    print(flush=True)


def write_results(figures: Mapping[str, float | Mapping[str, float]], file: Path | None) -> None:
    """The figures as one line of JSON, printed and in `file`; a group of them is an object in it."""
    line = json.dumps({key: rounded(value) for key, value in figures.items()})
    print(line)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(line + "\n")


def rounded(value: float | Mapping[str, float]) -> float | dict[str, float]:
    if isinstance(value, Mapping):
        return {key: round(figure, 4) for key, figure in value.items()}
    return round(value, 4)
