"""Which rows of the region are free, and who still uses the others. Scheduler thread only.

    free  --take-->  used  --give-->  free
                      |
                      +--orphan--> orphaned  --(last pin and last lease gone)-->  free

A used row belongs to a key. An orphaned row belongs to none: its key was forgotten while somebody still read or wrote
it, so it is not free yet (D4, L6). Pins are the scheduler thread's own (loads, stores); leases are counted elsewhere
and asked for through `is_leased`.
"""

from collections.abc import Callable, Iterable


class RowAllocator:
    """Rows 0 .. num_rows-1. free + used + orphaned == num_rows at all times."""

    def __init__(self, num_rows: int, is_leased: Callable[[int], bool]) -> None:
        self.num_rows = num_rows
        self._is_leased = is_leased
        # Rows given back; the next one taken is the last one given, whose pages are the warmest.
        self._recycled: list[int] = []
        # Rows from here on have never been taken: all of them are free.
        self._fresh = 0
        # Loads and stores in flight on each row. A free row has none.
        self.pins: list[int] = [0] * num_rows
        # Rows without a key that are pinned or leased.
        self.orphaned: set[int] = set()
        # How many rows have pins.
        self.num_pinned = 0

    @property
    def num_free(self) -> int:
        """Rows that `take` can hand out."""
        return len(self._recycled) + self.num_rows - self._fresh

    @property
    def num_used(self) -> int:
        """Rows that belong to a key."""
        return self.num_rows - self.num_free - len(self.orphaned)

    def take(self, count: int) -> list[int]:
        """`count` free rows; the caller has checked that there are as many."""
        recycled = self._recycled
        keep = max(len(recycled) - count, 0)
        rows = recycled[keep:]
        if rows:
            del recycled[keep:]
        missing = count - len(rows)
        if missing:
            rows.extend(range(self._fresh, self._fresh + missing))
            self._fresh += missing
        return rows

    def reserve(self, count: int) -> list[int]:
        """Take rows and pin them."""
        rows, pins = self.take(count), self.pins
        for row in rows:
            pins[row] = 1  # a free row has none
        self.num_pinned += count
        return rows

    def give(self, row: int) -> None:
        """A used row's key is gone: the row is free now, or once nobody uses it any more."""
        if self.pins[row] or self._is_leased(row):
            self.orphaned.add(row)
        else:
            self._recycled.append(row)

    def give_all(self) -> None:
        """All keys are gone. Visits every row."""
        pins, leased = self.pins, self._is_leased
        self.orphaned = {row for row in range(self._fresh) if pins[row] or leased(row)}
        self._recycled = [row for row in range(self._fresh - 1, -1, -1) if row not in self.orphaned]

    def pin(self, rows: Iterable[int]) -> None:
        """One more user for each row."""
        pins, newly = self.pins, 0
        for row in rows:
            before = pins[row]
            pins[row] = before + 1
            if not before:
                newly += 1
        self.num_pinned += newly

    def unpin(self, rows: Iterable[int]) -> None:
        """One user less for each row; an orphaned one that nobody uses any more becomes free."""
        pins, unused = self.pins, []
        for row in rows:
            left = pins[row] - 1
            pins[row] = left
            if not left:
                unused.append(row)
        self.num_pinned -= len(unused)
        if self.orphaned:
            for row in unused:
                self.settle(row)

    def settle(self, row: int) -> None:
        """A use of `row` has ended: free it if it is orphaned and this was the last one."""
        if row in self.orphaned and not self.pins[row] and not self._is_leased(row):
            self.orphaned.remove(row)
            self._recycled.append(row)

    def free_rows(self) -> list[int]:
        """Every free row. O(num_rows): for checks."""
        return [*self._recycled, *range(self._fresh, self.num_rows)]
