"""The rows that are read out of one peer's memory: shared out among the lanes, and told of together. No I/O.

    wanted --take--> being read --landed--> landed --half of all, or nothing is left to read--> told

Whoever is told has to be woken, and asks the peer to confirm, which takes time from what copies: so it is told twice.
What was confirmed is kept if the peer dies, and makes room for more to be wanted: so it is told more than once.
"""

from collections import deque
from collections.abc import Sequence
from math import ceil

from vllm_tiered_offload.tiers.p2p.instructions import LandedRow, Wanted
from vllm_tiered_offload.tiers.p2p.messages import MAX_READ_PARTS

LANES = 2  # of one peer, where READs are copies
READ_BYTES = 8 << 20  # of one READ, or one row: in the cache when it is verified
WINDOW_BYTES = 128 << 20  # of one peer that are asked for and not verified


def read_window(row_bytes: int) -> int:
    """Rows of one peer that are asked for and not verified: each lane reads, and has more to read."""
    return min(MAX_READ_PARTS, max(3 * LANES, WINDOW_BYTES // max(1, row_bytes)))


class ReadQueue:
    """Of rows of `row_bytes`. Whoever has it calls it from one thread at a time."""

    def __init__(self, row_bytes: int) -> None:
        self._at_once = max(1, READ_BYTES // max(1, row_bytes))
        self._wanted: deque[Wanted] = deque()
        self._num_reading = 0
        self._landed: list[LandedRow] = []  # and not told
        self._enough = 0  # landed rows to tell of

    def add(self, rows: Sequence[Wanted]) -> None:
        """They are to be read."""
        self._wanted.extend(rows)
        self._enough = ceil((len(self._wanted) + self._num_reading + len(self._landed)) / 2)

    def take(self) -> list[Wanted]:
        """The rows of the next READ, if there are any. The last ones are few, so that all lanes end together."""
        count = min(self._at_once, ceil(len(self._wanted) / LANES))
        self._num_reading += count
        return [self._wanted.popleft() for _ in range(count)]

    def landed(self, rows: Sequence[LandedRow]) -> list[LandedRow]:
        """Rows that were taken have been read: those to tell of now."""
        self._num_reading -= len(rows)
        self._landed += rows
        if len(self._landed) < self._enough and (self._wanted or self._num_reading):
            return []
        landed, self._landed = self._landed, []
        return landed
