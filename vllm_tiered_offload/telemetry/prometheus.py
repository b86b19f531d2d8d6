"""The Prometheus side of the table: vLLM hands in its metric classes and labels, we create and feed the metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_tiered_offload.telemetry.metrics import METRICS, Kind, Metric, parse_key
from vllm_tiered_offload.telemetry.stats import OffloadStats


class PrometheusMetrics:
    """All metrics of the table, one time series per engine and label values, made when first fed.

    `counter_cls` and `gauge_cls` are prometheus_client's classes or anything called alike (vLLM has wrappers for Ray).
    `label_names` are vLLM's own labels, `label_values[engine_index]` their values for each engine.
    """

    def __init__(
        self,
        counter_cls: Any,
        gauge_cls: Any,
        label_names: Sequence[str],
        label_values: Mapping[int, Sequence[object]],
    ) -> None:
        self._label_values = label_values
        self._metrics = {
            metric.key: self._create(metric, counter_cls, gauge_cls, label_names) for metric in METRICS.values()
        }
        # (engine index, kind, flat key) -> the series; None for what we do not know
        self._series: dict[tuple[int, Kind, str], Any] = {}

    def observe(self, data: Mapping[str, Any] | None, engine_idx: int = 0) -> None:
        """Apply one `OffloadStats.to_dict()`. Keys, engines and values that we do not know are passed over."""
        stats = OffloadStats.from_dict(data)
        for flat_key, amount in stats.counters.items():
            series = self._find(engine_idx, flat_key, "counter")
            if series is not None and amount >= 0:
                series.inc(amount)
        for flat_key, value in stats.gauges.items():
            series = self._find(engine_idx, flat_key, "gauge")
            if series is not None:
                series.set(value)

    def _find(self, engine_idx: int, flat_key: str, kind: Kind) -> Any:
        place = (engine_idx, kind, flat_key)
        if place not in self._series:
            self._series[place] = self._make_series(engine_idx, flat_key, kind)
        return self._series[place]

    def _make_series(self, engine_idx: int, flat_key: str, kind: Kind) -> Any:
        parsed = parse_key(flat_key)
        engine_labels = self._label_values.get(engine_idx)
        if parsed is None or parsed[0].kind != kind or engine_labels is None:
            return None
        metric, values = parsed
        labels = [*engine_labels, *values]
        parent = self._metrics[metric.key]
        return parent.labels(*labels) if labels else parent

    @staticmethod
    def _create(metric: Metric, counter_cls: Any, gauge_cls: Any, label_names: Sequence[str]) -> Any:
        labels = [*label_names, *metric.labels]
        if metric.kind == "counter":
            return counter_cls(name=metric.name, documentation=metric.documentation, labelnames=labels)
        # With several API server processes the newest value is the right one, not one per process.
        return gauge_cls(
            name=metric.name, documentation=metric.documentation, labelnames=labels, multiprocess_mode="mostrecent"
        )
