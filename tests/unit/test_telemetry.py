"""Telemetry: one table of names, a container that adds up, and Prometheus series that are made when first fed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from vllm_tiered_offload.telemetry import METRICS, OffloadStats, PrometheusMetrics, metric_key, parse_key

HIT = metric_key("block_lookups_total", tier="cpu", result="hit")
MISS = metric_key("block_lookups_total", tier="cpu", result="miss")

flat_keys = st.sampled_from([HIT, MISS, metric_key("loaded_tokens_total")])
counters = st.dictionaries(flat_keys, st.integers(0, 1 << 40))
gauges = st.dictionaries(st.just("rows_used"), st.integers(0, 100))


class Prometheus:
    """A registry of its own per test, with the labels that vLLM hands in."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = PrometheusMetrics(
            lambda **kwargs: Counter(**kwargs, registry=self.registry),
            lambda **kwargs: Gauge(**kwargs, registry=self.registry),
            ["model_name", "engine"],
            {0: ["tiny", "0"], 1: ["tiny", 1]},
        )

    def value(self, name: str, engine: str = "0", **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": "tiny", "engine": engine, **labels})

    def samples(self) -> list[str]:
        lines = generate_latest(self.registry).decode().splitlines()
        return [line for line in lines if not line.startswith("#") and "_created" not in line]


@pytest.fixture
def prometheus() -> Prometheus:
    return Prometheus()


def test_the_table() -> None:
    for key, metric in METRICS.items():
        assert metric.name == f"vllm:tiered_offload_{key}"
        assert (metric.kind == "counter") == (key.endswith("_total") and key != "rows_total"), key
        assert metric.documentation.endswith(".")
        flat = metric_key(key, **dict.fromkeys(metric.labels, "x"))
        assert parse_key(flat) == (metric, ("x",) * len(metric.labels))


def test_keys() -> None:
    assert (
        HIT == metric_key("block_lookups_total", result="hit", tier="cpu") == "block_lookups_total|tier=cpu|result=hit"
    )
    assert metric_key("rows_used") == "rows_used"
    assert parse_key(metric_key("evictions_total", tier="a|b=c")) == (METRICS["evictions_total"], ("a_b=c",))
    with pytest.raises(ValueError, match="no metric nothing"):
        metric_key("nothing")
    with pytest.raises(ValueError, match="has the labels"):
        metric_key("bytes_total")


@pytest.mark.parametrize(
    "key", ["", "nothing", "bytes_total", "bytes_total|tier=x", "rows_used|a=b", "bytes_total|direction"]
)
def test_unknown_keys(key: str) -> None:
    known = parse_key(key)
    assert known is None or key == "bytes_total|direction"


@given(st.lists(st.tuples(counters, gauges)))
def test_merge_sums_counters_and_keeps_the_latest_gauge(parts: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    whole = OffloadStats()
    for part_counters, part_gauges in parts:
        before = OffloadStats(dict(part_counters), dict(part_gauges))
        assert whole.merge(before) is whole
        assert before.counters == part_counters, "the other side stays as it was"
    for key in (HIT, MISS):
        assert whole.counters.get(key, 0) == sum(part.get(key, 0) for part, _ in parts)
    latest = [part["rows_used"] for _, part in parts if "rows_used" in part]
    assert whole.gauges.get("rows_used") == (latest[-1] if latest else None)


@given(counters, gauges)
def test_dict_round_trip(part_counters: dict[str, Any], part_gauges: dict[str, Any]) -> None:
    stats = OffloadStats(dict(part_counters), dict(part_gauges))
    data = json.loads(json.dumps(stats.to_dict()))
    read = OffloadStats.from_dict(data)
    assert (read.counters, read.gauges) == (part_counters, part_gauges)
    assert read.is_empty() == stats.is_empty() == (not part_counters and not part_gauges)
    data["counters"]["late"] = 1
    assert "late" not in stats.to_dict()["counters"]


@pytest.mark.parametrize(
    "data",
    [None, {}, 7, {"counters": 3}, {"counters": {"a": "x", "b": True, "c": None, "d": float("nan")}, "gauges": []}],
)
def test_foreign_data_is_left_out(data: Any) -> None:
    assert OffloadStats.from_dict(data).is_empty()


def test_take_begins_anew() -> None:
    stats = OffloadStats()
    stats.add(HIT, 2)
    stats.add(HIT)
    stats.set("rows_used", 4)
    taken = stats.take()
    assert (taken.counters, taken.gauges) == ({HIT: 3}, {"rows_used": 4})
    assert stats.is_empty()
    stats.add(HIT)
    assert taken.counters == {HIT: 3}


def test_reduce_says_a_few_numbers() -> None:
    stats = OffloadStats()
    assert stats.reduce() == {}
    stats.add(metric_key("bytes_total", direction="load"), 3_000_000_000)
    stats.add(metric_key("seconds_total", direction="load"), 1.5)
    stats.add(metric_key("failures_total", direction="store"))
    stats.add(HIT, 3)
    stats.add(MISS, 1)
    stats.add(metric_key("declined_stores_total", reason="no_rows"), 2)
    stats.add("a_newer_versions_key", 5)
    stats.set("rows_total", 8)
    stats.set("rows_used", 2)
    assert stats.reduce() == {
        "Loaded (GB)": 3.0,
        "Loaded (GB/s)": 2.0,
        "Stored, failed (jobs)": 1,
        "Chunk hit rate (%)": 75.0,
        "Declined stores": 2,
        "Host rows used (%)": 25.0,
    }


def test_observe(prometheus: Prometheus) -> None:
    assert prometheus.samples() == [], "series are made when first fed"
    stats = OffloadStats({HIT: 3, metric_key("loaded_tokens_total"): 64}, {"rows_used": 5})
    prometheus.metrics.observe(stats.to_dict())
    prometheus.metrics.observe(OffloadStats({HIT: 4}, {"rows_used": 2}).to_dict(), engine_idx=0)
    prometheus.metrics.observe(OffloadStats({HIT: 1}).to_dict(), engine_idx=1)
    name = "vllm:tiered_offload_block_lookups_total"
    assert prometheus.value(name, tier="cpu", result="hit") == 7
    assert prometheus.value(name, engine="1", tier="cpu", result="hit") == 1
    assert prometheus.value("vllm:tiered_offload_loaded_tokens_total") == 64
    assert prometheus.value("vllm:tiered_offload_rows_used") == 2
    assert len(prometheus.samples()) == 4


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"counters": {"newer_total": 4, "bytes_total": 3, "bytes_total|direction=load|x=y": 1}},
        {"counters": {"rows_used": 1}, "gauges": {HIT: 2}},
        {"counters": {HIT: -1, MISS: "x"}},
        {"counters": [1], "gauges": {"rows_used": float("inf")}, "histograms": {}},
    ],
)
def test_observe_passes_over_what_it_does_not_know(prometheus: Prometheus, data: Any) -> None:
    prometheus.metrics.observe(data)
    prometheus.metrics.observe({"counters": {HIT: 1}}, engine_idx=9)
    assert [line for line in prometheus.samples() if not line.endswith(" 0.0")] == []


def test_one_key_under_both_kinds(prometheus: Prometheus) -> None:
    prometheus.metrics.observe({"counters": {"rows_used": 1}, "gauges": {"rows_used": 6}})
    assert prometheus.value("vllm:tiered_offload_rows_used") == 6


def test_without_labels_of_the_engine() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(
        lambda **kwargs: Counter(**kwargs, registry=registry),
        lambda **kwargs: Gauge(**kwargs, registry=registry),
        [],
        {0: []},
    )
    metrics.observe({"counters": {"loaded_tokens_total": 2}})
    assert registry.get_sample_value("vllm:tiered_offload_loaded_tokens_total") == 2
