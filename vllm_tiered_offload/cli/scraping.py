"""What an engine tells on /metrics."""

import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from vllm_tiered_offload.telemetry.metrics import PREFIX

SECONDS = 5.0
MAX_BYTES = 32 << 20


class ScrapeError(Exception):
    """There is nothing to read: one line."""


class Sample(NamedTuple):
    """One number: the metric's short name, its labels (vLLM's too), the value."""

    name: str
    labels: Mapping[str, str]
    value: float


def scrape(url: str) -> list[Sample]:
    """Our metrics of the engine that answers at `url`. Raises ScrapeError."""
    # An engine is no site on the internet: no proxy is asked.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = url.rstrip("/").removesuffix("/metrics") + "/metrics"
    try:
        with opener.open(url, timeout=SECONDS) as response:
            text = response.read(MAX_BYTES).decode(errors="replace")
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ScrapeError(f"{url}: {reason}") from None
    return [
        Sample(sample.name.removeprefix(PREFIX), sample.labels, sample.value)
        for family in families
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    ]
