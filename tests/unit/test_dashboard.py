"""docs/metrics.md and docs/grafana-dashboard.json against the metric table.

`python tests/unit/test_dashboard.py` writes the table of docs/metrics.md anew.
"""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_tiered_offload.telemetry.metrics import METRICS

DOCS = Path(__file__).resolve().parents[2] / "docs"
METRICS_MD = DOCS / "metrics.md"
BEGIN, END = "<!-- metrics:begin -->\n", "<!-- metrics:end -->"

BY_NAME = {metric.name: metric for metric in METRICS.values()}

# vLLM's own metrics that the dashboard shows, and the labels it uses of them.
VLLM = {
    "vllm:kv_cache_usage_perc": set(),
    "vllm:num_requests_running": set(),
    "vllm:num_requests_waiting": set(),
    "vllm:prompt_tokens_cached_by_source_total": {"source"},
    "vllm:time_to_first_token_seconds_bucket": {"le"},
}

ENGINE_LABELS = {"model_name", "engine"}

LEFT_OUT = {
    "declined_chunks_total",  # the same moments as declined_stores_total, counted in chunks
    "fs_elsewhere_bytes",  # a part of tier_bytes_used
    "fs_skipped_stores_total",  # what a setting asked for
    "fs_already_stored_total",  # neither good nor bad: another engine was faster
}


def metrics_table() -> str:
    """The table as docs/metrics.md has it."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.documentation} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}{metrics_table()}{END}{rest.split(END)[1]}"


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DOCS / "grafana-dashboard.json").read_text())
    return loaded


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    yield from (var["definition"] for var in dashboard()["templating"]["list"] if "definition" in var)


def names_in(expression: str) -> list[str]:
    return re.findall(r"\bvllm:\w+", expression)


def test_the_table_of_metrics_is_the_tables() -> None:
    text = METRICS_MD.read_text()
    assert text == with_table(text), f"docs/metrics.md is old: python {Path(__file__).name}"


def test_the_text_around_the_table_names_real_metrics() -> None:
    """Short names in backticks that look like ours are ours; short names of ours occur."""
    around = METRICS_MD.read_text().replace(metrics_table(), "")
    named = set(re.findall(r"`(?:vllm:)?(\w+_total|tier_off|rows_\w+)\b", around))
    vllms = {name.removeprefix("vllm:") for name in VLLM}
    assert named - METRICS.keys() - vllms == set()
    assert named & METRICS.keys()


def test_the_dashboard_uses_known_metrics_only() -> None:
    used = {name for expression in expressions() for name in names_in(expression)}
    assert used - BY_NAME.keys() - VLLM.keys() == set()
    assert VLLM.keys() - used == set(), "listed here and not used"


def test_every_metric_is_shown_or_left_out_on_purpose() -> None:
    used = {name for expression in expressions() for name in names_in(expression)}
    missing = {metric.key for metric in METRICS.values() if metric.name not in used}
    assert missing == LEFT_OUT


def test_labels_are_those_of_the_metrics() -> None:
    for expression in expressions():
        allowed = set(ENGINE_LABELS)
        for name in names_in(expression):
            allowed |= set(BY_NAME[name].labels) if name in BY_NAME else VLLM[name]
        groups = [group.split(",") for group in re.findall(r"\bby \(([^)]*)\)", expression)]
        selected = re.findall(r"(\w+)\s*=~?\s*\"", expression)
        used = {label.strip() for group in groups for label in group} | set(selected)
        assert used <= allowed, expression


def test_legends_show_labels_that_are_there() -> None:
    for panel in panels():
        for target in panel["targets"]:
            kept = {
                label.strip() for group in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for label in group.split(",")
            }
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, panel["title"]


def test_counters_are_shown_as_rates_and_gauges_as_they_are() -> None:
    for expression in expressions():
        for name in names_in(expression):
            counted = BY_NAME[name].kind == "counter" if name in BY_NAME else name.endswith(("_total", "_bucket"))
            assert (f"rate({name}" in expression or f"increase({name}" in expression) == counted, expression


def test_it_can_be_imported_anywhere() -> None:
    """A datasource variable instead of somebody's id; ids and places of panels do not clash."""
    board = dashboard()
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables[0] == "datasource"
    for panel in panels():
        for place in (panel, *panel["targets"]):
            assert place["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not mine & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= mine
    for name in re.findall(r"\$(\w+)", " ".join(expressions())):
        assert name in variables or name == "__rate_interval"


def test_vllm_still_has_its_own_metrics() -> None:
    """A tripwire: vLLM's source names them (counters without _total, histograms without _bucket)."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    metrics = Path(spec.origin).parent / "v1" / "metrics"
    source = (metrics / "loggers.py").read_text()
    before_0_32 = (
        {"vllm:prompt_tokens_cached_by_source_total"} if not (metrics / "cache_hit_source.py").exists() else set()
    )
    for name in VLLM.keys() - before_0_32:
        assert f'"{name.removesuffix("_total").removesuffix("_bucket")}"' in source, name


if __name__ == "__main__":
    METRICS_MD.write_text(with_table(METRICS_MD.read_text()))
