"""Telemetry in vLLM's own stats and Prometheus types."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_tiered_offload.telemetry.prometheus import PrometheusMetrics
from vllm_tiered_offload.telemetry.stats import OffloadStats


class TieredOffloadStats(KVConnectorStats):
    """`data` is `OffloadStats` as plain dictionaries, so that it crosses process borders."""

    def _stats(self) -> OffloadStats:
        return OffloadStats.from_dict(self.data)

    def reset(self) -> None:
        self.data = OffloadStats().to_dict()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merged = self._stats()
        merged.merge(OffloadStats.from_dict(other.data))
        return TieredOffloadStats(data=merged.to_dict())

    def reduce(self) -> dict[str, int | float]:
        return self._stats().reduce()

    def is_empty(self) -> bool:
        return self._stats().is_empty()


class TieredOffloadPromMetrics(KVConnectorPromMetrics):
    """Our metrics on vLLM's own /metrics."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics = PrometheusMetrics(
            self._counter_cls, self._gauge_cls, self._labelnames, self.per_engine_labelvalues
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._metrics.observe(transfer_stats_data, engine_idx)
