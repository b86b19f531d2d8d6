"""The tier's numbers, under the flat keys of telemetry: a name, then its labels."""

from collections import Counter

from vllm_tiered_offload.contract.jobs import LookupResult
from vllm_tiered_offload.tiers.fs.faults import Fault

STORE = "store"
LOAD = "load"
LOOKUP = "lookup"

_LOOKUP = {result: f"block_lookups_total|tier=fs|result={result.value}" for result in LookupResult}
_BYTES = {direction: f"tier_bytes_total|tier=fs|direction={direction}" for direction in (STORE, LOAD)}
_SECONDS = {direction: f"tier_seconds_total|tier=fs|direction={direction}" for direction in (STORE, LOAD)}


class FsCounters:
    """Counters since the start. Bytes are those of the frames that moved, seconds those of the threads that did it."""

    def __init__(self) -> None:
        self.lookups: Counter[LookupResult] = Counter()
        self._bytes: Counter[str] = Counter()
        self._seconds = {STORE: 0.0, LOAD: 0.0, LOOKUP: 0.0}
        self._failures: Counter[tuple[str, Fault]] = Counter()
        self.already_stored = 0
        self.discarded_files = 0

    def ended(self, direction: str, fault: Fault | None, moved: int, seconds: float) -> None:
        """One chunk's move ended."""
        self._seconds[direction] += seconds
        if fault is None:
            self._bytes[direction] += moved
        else:
            self._failures[direction, fault] += 1

    def snapshot(self) -> dict[str, int | float]:
        """By flat key."""
        return {
            **{_LOOKUP[result]: count for result, count in self.lookups.items()},
            **{_BYTES[direction]: self._bytes[direction] for direction in (STORE, LOAD)},
            **{_SECONDS[direction]: self._seconds[direction] for direction in (STORE, LOAD)},
            **{
                f"tier_failures_total|tier=fs|direction={direction}|kind={fault.value}": count
                for (direction, fault), count in self._failures.items()
            },
            "fs_already_stored_total": self.already_stored,
            "fs_discarded_files_total": self.discarded_files,
        }
