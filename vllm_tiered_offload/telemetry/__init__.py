"""Counters and gauges: one table of names, a container that travels, and their Prometheus side."""

from vllm_tiered_offload.telemetry.metrics import METRICS, Metric, metric_key, parse_key
from vllm_tiered_offload.telemetry.prometheus import PrometheusMetrics
from vllm_tiered_offload.telemetry.stats import OffloadStats

__all__ = ["METRICS", "Metric", "OffloadStats", "PrometheusMetrics", "metric_key", "parse_key"]
