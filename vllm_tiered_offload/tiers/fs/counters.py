"""The tier's numbers, under the flat keys of telemetry: a name, then its labels."""

from collections.abc import Sequence

from vllm_tiered_offload.contract.jobs import LookupResult
from vllm_tiered_offload.tiers.fs.faults import Fault

STORE = "store"
LOAD = "load"
LOOKUP = "lookup"

_LOOKUP = {result: f"block_lookups_total|tier=fs|result={result.value}" for result in LookupResult}
_BYTES = {direction: f"tier_bytes_total|tier=fs|direction={direction}" for direction in (STORE, LOAD)}
_ALREADY_STORED = "fs_already_stored_total"
_DISCARDED = "fs_discarded_files_total"
_SECONDS = {direction: f"tier_seconds_total|tier=fs|direction={direction}" for direction in (STORE, LOAD)}


class FsCounters:
    """Counters since the start. Bytes are those of the frames that moved, seconds those of the threads that did it."""

    def __init__(self) -> None:
        # By flat key, as they are told.
        self._values: dict[str, int | float] = {
            **{_BYTES[direction]: 0 for direction in (STORE, LOAD)},
            **{_SECONDS[direction]: 0.0 for direction in (STORE, LOAD)},
            _ALREADY_STORED: 0,
            _DISCARDED: 0,
        }

    def looked_up(self, results: Sequence[LookupResult]) -> None:
        """Answers were given."""
        for result, name in _LOOKUP.items():
            self._add(name, results.count(result))

    def moved(self, direction: str, size: int, seconds: float) -> None:
        """Chunks were moved, or it was tried."""
        self._values[_BYTES[direction]] += size
        self._values[_SECONDS[direction]] += seconds

    def failed(self, direction: str, fault: Fault, count: int = 1) -> None:
        """Chunks could not be moved or looked for."""
        self._add(f"tier_failures_total|tier=fs|direction={direction}|kind={fault.value}", count)

    def already_stored(self, count: int) -> None:
        """Chunks need not be written."""
        self._values[_ALREADY_STORED] += count

    def discarded(self, count: int) -> None:
        """Bad files were taken away."""
        self._values[_DISCARDED] += count

    def skipped(self, reason: str, count: int = 1) -> None:
        """Chunks were not worth a write."""
        self._add(f"fs_skipped_stores_total|reason={reason}", count)

    def snapshot(self) -> dict[str, int | float]:
        """By flat key."""
        return self._values.copy()

    def _add(self, name: str, count: int) -> None:
        if count:
            self._values[name] = self._values.get(name, 0) + count
