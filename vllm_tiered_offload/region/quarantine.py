"""Rows that nobody may reuse yet (D4).

A job that timed out has a result, but its I/O may still be running and may still write into its rows. Such rows are
held here, each under the tokens of the I/O that has not ended; a row is reusable when its last token has.
"""

from collections.abc import Hashable


class Quarantine:
    """Which rows are held, and by what. Plain data, one owner; no locks."""

    def __init__(self) -> None:
        # Both maps say the same thing from two ends; neither holds an empty set.
        self._tokens_of_row: dict[int, set[Hashable]] = {}
        self._rows_of_token: dict[Hashable, set[int]] = {}

    def hold(self, row: int, token: Hashable) -> None:
        """`row` must not be reused before `end(token)`. Holding it twice under one token is the same as once."""
        self._tokens_of_row.setdefault(row, set()).add(token)
        self._rows_of_token.setdefault(token, set()).add(row)

    def end(self, token: Hashable) -> list[int]:
        """The I/O behind `token` ended: the rows that nothing holds now, ascending. An unknown token frees nothing."""
        reusable = []
        for row in sorted(self._rows_of_token.pop(token, ())):
            tokens = self._tokens_of_row[row]
            tokens.discard(token)
            if not tokens:
                del self._tokens_of_row[row]
                reusable.append(row)
        return reusable

    def __contains__(self, row: object) -> bool:
        return row in self._tokens_of_row

    def __len__(self) -> int:
        """Rows that are held."""
        return len(self._tokens_of_row)
