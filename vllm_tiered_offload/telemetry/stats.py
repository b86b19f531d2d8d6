"""What a step, a rank or a logging interval counted. Plain numbers under the flat keys of `telemetry.metrics`."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, Self

from vllm_tiered_offload.telemetry.metrics import LOAD, STORE, metric_key, parse_key

Number = int | float


class OffloadStats:
    """Counters since the last `take`, and the latest gauges. One owner; no locks."""

    __slots__ = ("counters", "gauges")

    def __init__(self, counters: dict[str, Number] | None = None, gauges: dict[str, Number] | None = None) -> None:
        self.counters: dict[str, Number] = {} if counters is None else counters
        self.gauges: dict[str, Number] = {} if gauges is None else gauges

    def add(self, flat_key: str, amount: Number = 1) -> None:
        """Raise a counter; see `metric_key` for the key."""
        self.counters[flat_key] = self.counters.get(flat_key, 0) + amount

    def set(self, flat_key: str, value: Number) -> None:
        """Set a gauge."""
        self.gauges[flat_key] = value

    def merge(self, other: "OffloadStats") -> Self:
        """Fold a later (or another rank's) part in: counters are summed, the other's gauges win. Returns self."""
        for flat_key, amount in other.counters.items():
            self.add(flat_key, amount)
        self.gauges.update(other.gauges)
        return self

    def take(self) -> "OffloadStats":
        """What was counted so far; this object begins anew."""
        taken = OffloadStats(self.counters, self.gauges)
        self.counters, self.gauges = {}, {}
        return taken

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.counters and not self.gauges

    def to_dict(self) -> dict[str, dict[str, Number]]:
        """Plain data for JSON, msgpack or pickle."""
        return {"counters": dict(self.counters), "gauges": dict(self.gauges)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Self:
        """Read `to_dict`; what is not a finite number (another version's entries) is left out."""
        parts = data if isinstance(data, Mapping) else {}
        return cls(_numbers(parts.get("counters")), _numbers(parts.get("gauges")))

    def reduce(self) -> dict[str, Number]:
        """A few numbers for a log line: what moved, how fast, what hit, how full. Only what there is to say."""
        summary: dict[str, Number] = {}
        for direction, word in ((STORE, "Stored"), (LOAD, "Loaded")):
            self._summarise_direction(summary, direction, word)
        hits, lookups = self._lookups()
        if lookups:
            summary["Chunk hit rate (%)"] = round(100 * hits / lookups, 1)
        declined = sum(self._labelled("declined_stores_total").values())
        if declined:
            summary["Declined stores"] = declined
        rows_total = self.gauges.get("rows_total")
        if rows_total:
            summary["Host rows used (%)"] = round(100 * self.gauges.get("rows_used", 0) / rows_total, 1)
        return summary

    def _summarise_direction(self, summary: dict[str, Number], direction: str, word: str) -> None:
        moved = self.counters.get(metric_key("bytes_total", direction=direction), 0)
        seconds = self.counters.get(metric_key("seconds_total", direction=direction), 0)
        failures = self.counters.get(metric_key("failures_total", direction=direction), 0)
        if moved:
            summary[f"{word} (GB)"] = round(moved / 1e9, 3)
        if moved and seconds:
            summary[f"{word} (GB/s)"] = round(moved / 1e9 / seconds, 2)
        if failures:
            summary[f"{word}, failed (jobs)"] = failures

    def _lookups(self) -> tuple[Number, Number]:
        """(hits, all) over the tiers."""
        hits: Number = 0
        lookups: Number = 0
        for (_, result), amount in self._labelled("block_lookups_total").items():
            lookups += amount
            hits += amount if result == "hit" else 0
        return hits, lookups

    def _labelled(self, key: str) -> dict[tuple[str, ...], Number]:
        """A counter's values by label values."""
        found: dict[tuple[str, ...], Number] = {}
        for flat_key, amount in self.counters.items():
            parsed = parse_key(flat_key)
            if parsed is not None and parsed[0].key == key:
                found[parsed[1]] = amount
        return found


def is_number(value: object) -> bool:
    """Whether a metric can take this value: finite, and no boolean."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and isfinite(value))


def _numbers(part: object) -> dict[str, Number]:
    if not isinstance(part, Mapping):
        return {}
    return {str(key): value for key, value in part.items() if is_number(value)}
