"""A shorter list of events with the same outcome."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], still: Callable[[list[T]], bool], seconds: float) -> list[T]:
    """Leave out as much of `items` as possible while `still` holds: halves first, single ones last.

    Stops after `seconds`, or when no single item can be left out.
    """
    best = list(items)
    until = time.monotonic() + seconds
    size = max(1, len(best) // 2)
    while True:
        before = len(best)
        start = 0
        while start < len(best):
            if time.monotonic() >= until:
                return best
            shorter = best[:start] + best[start + size :]
            if still(shorter):
                best = shorter
            else:
                start += size
        if size == 1 and len(best) == before:
            return best
        size = max(1, size // 2)
