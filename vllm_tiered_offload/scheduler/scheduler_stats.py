"""The scheduler half's numbers: its own counters, and the manager's."""

from collections.abc import Mapping

from vllm_tiered_offload.contract.managers import OffloadingManager
from vllm_tiered_offload.scheduler.block_pins import BlockPins
from vllm_tiered_offload.telemetry.metrics import metric_key, parse_key
from vllm_tiered_offload.telemetry.stats import OffloadStats


class SchedulerStats:
    """Collects what happened between two reports. Managers count upwards for ever; a report carries differences."""

    def __init__(self, manager: OffloadingManager, pins: BlockPins) -> None:
        self._manager = manager
        self._pins = pins
        self._counted = OffloadStats()
        self._seen: dict[str, int | float] = {}  # the manager's values at the last report
        self._pinned_seen = -1

    def count(self, key: str, amount: int = 1, **labels: str) -> None:
        """Raise one of our counters."""
        self._counted.add(metric_key(key, **labels), amount)

    def set(self, key: str, value: int) -> None:
        """Set one of our gauges."""
        self._counted.set(metric_key(key), value)

    def take(self) -> OffloadStats | None:
        """Everything that changed since the last call, or None."""
        values = self._manager.get_stats()
        if values != self._seen:
            self._add_changes(values)
        if self._pins.num_blocks != self._pinned_seen:
            self._pinned_seen = self._pins.num_blocks
            self.set("device_blocks_pinned", self._pinned_seen)
        return None if self._counted.is_empty() else self._counted.take()

    def _add_changes(self, values: Mapping[str, int | float]) -> None:
        for key, value in values.items():
            before = self._seen.get(key)
            parsed = parse_key(key)
            if value == before or parsed is None:
                continue
            if parsed[0].kind == "gauge":
                self._counted.set(key, value)
            else:
                self._counted.add(key, value - (before or 0))
        self._seen = dict(values)
