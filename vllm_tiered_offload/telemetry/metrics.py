"""Every metric of the connector, in one table.

A value travels under a flat key, the metric's short name followed by its labels in the table's order:
`block_lookups_total|tier=cpu|result=hit`. On /metrics it is `vllm:tiered_offload_` and the short name.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

PREFIX = "vllm:tiered_offload_"

# Values of the label `direction`.
STORE = "store"  # device -> host memory
LOAD = "load"  # host memory -> device

# Counters are summed over ranks and steps; of a gauge the latest value counts, and only the scheduler half sets any.
Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    key: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name on /metrics."""
        return PREFIX + self.key


_TABLE = (
    Metric("bytes_total", "counter", "KV bytes moved between device and host memory.", ("direction",)),
    Metric("seconds_total", "counter", "Seconds spent moving them, summed over ranks.", ("direction",)),
    Metric("jobs_total", "counter", "Device jobs that ended, failed ones included, summed over ranks.", ("direction",)),
    Metric("failures_total", "counter", "Device jobs that failed, summed over ranks.", ("direction",)),
    Metric("block_lookups_total", "counter", "Chunks looked up, by tier and answer.", ("tier", "result")),
    Metric("promoted_chunks_total", "counter", "Chunks that a tier was asked to bring back.", ("tier",)),
    Metric("cascades_skipped_total", "counter", "Chunks not handed on to a tier that was too far behind.", ("tier",)),
    Metric("tier_faults_total", "counter", "What a tier did that its guard had to catch, by kind.", ("tier", "kind")),
    Metric("tier_bytes_total", "counter", "Bytes a tier moved, on disk with their frames.", ("tier", "direction")),
    Metric("tier_seconds_total", "counter", "Seconds that a tier's threads spent moving them.", ("tier", "direction")),
    Metric(
        "tier_failures_total", "counter", "Chunks that a tier could not move, by kind.", ("tier", "direction", "kind")
    ),
    Metric("fs_buffered_io_total", "counter", "Files that had to go through the page cache, by reason.", ("reason",)),
    Metric("fs_already_stored_total", "counter", "Chunks that somebody had stored before."),
    Metric("fs_discarded_files_total", "counter", "Files that were not what they should be, and went."),
    Metric("fs_skipped_stores_total", "counter", "Chunks that were not worth a write, by reason.", ("reason",)),
    Metric("p2p_pulled_bytes_total", "counter", "Bytes of chunks pulled from a peer.", ("peer",)),
    Metric("p2p_pull_seconds_total", "counter", "Seconds during which a peer owed us rows.", ("peer",)),
    Metric("p2p_peer_failures_total", "counter", "What went wrong with a peer, by kind.", ("peer", "kind")),
    Metric("p2p_rows_read_total", "counter", "Rows that were read out of a peer's memory, without the peer."),
    Metric("p2p_served_bytes_total", "counter", "Bytes of chunks that peers got from us."),
    Metric("p2p_served_rows_total", "counter", "Rows sent to peers."),
    Metric("p2p_refused_total", "counter", "What peers asked for and did not get, by reason.", ("reason",)),
    Metric("p2p_promises_expired_total", "counter", "Leases that ended because nobody fetched the rows in time."),
    Metric("p2p_dropped_peers_total", "counter", "Peers that did not take what they had asked for."),
    Metric("evictions_total", "counter", "Chunks that left a tier to make room.", ("tier",)),
    Metric("declined_stores_total", "counter", "Stores declined in whole or in part, by reason.", ("reason",)),
    Metric("declined_chunks_total", "counter", "Chunks that a tier had no room for.", ("tier",)),
    Metric("lookup_tokens_total", "counter", "Prompt tokens that the device cache did not have and we were asked for."),
    Metric("loaded_tokens_total", "counter", "Prompt tokens whose load was started."),
    Metric("lifecycle_violations_total", "counter", "Broken lifecycle rules; each skipped one request's offload."),
    Metric("contract_violations_total", "counter", "Calls that a tier ignored because they broke its contract."),
    Metric("tier_off", "gauge", "1 while a tier is switched off after failures in a row.", ("tier",)),
    Metric("tier_bytes_used", "gauge", "Bytes that a tier holds, as far as it knows.", ("tier",)),
    Metric("tier_chunks", "gauge", "Chunks that a tier holds, as far as it knows.", ("tier",)),
    Metric("fs_stores_paused", "gauge", "1 while the fs tier stores nothing because its medium refused a write."),
    Metric("fs_elsewhere_bytes", "gauge", "Bytes in the fs tier's root that are not of the directory in use."),
    Metric(
        "p2p_peers_up", "gauge", "Engines behind an entry of `peers` that talk to us; 0 until one was asked.", ("peer",)
    ),
    Metric("p2p_sessions", "gauge", "Peers that have greeted us."),
    Metric("p2p_promised_rows", "gauge", "Rows that are leased to peers."),
    Metric("p2p_offered_chunks", "gauge", "Chunks that peers may pull while they are in host memory."),
    Metric("tier_jobs_in_flight", "gauge", "Jobs of a tier that may still touch their rows.", ("tier",)),
    Metric("rows_total", "gauge", "Rows of the host region."),
    Metric("rows_used", "gauge", "Rows that hold a chunk or are being filled."),
    Metric("rows_pinned", "gauge", "Rows that may not be evicted now."),
    Metric("rows_orphaned", "gauge", "Rows whose chunk was forgotten and that somebody still reads or writes."),
    Metric("copy_engine_broken", "gauge", "1 once a worker's copy engine broke: nothing is offloaded until a restart."),
    Metric("device_blocks_pinned", "gauge", "Device blocks held back until their store has read them."),
)

METRICS: dict[str, Metric] = {metric.key: metric for metric in _TABLE}


@lru_cache(maxsize=1024)
def metric_key(key: str, /, **labels: str) -> str:
    """The flat key of a metric with these label values. Raises ValueError when the table says otherwise."""
    metric = METRICS.get(key)
    if metric is None:
        raise ValueError(f"no metric {key}")
    if labels.keys() != set(metric.labels):
        raise ValueError(f"metric {key} has the labels {metric.labels}, got {tuple(labels)}")
    return "".join([key, *(f"|{name}={labels[name].replace('|', '_')}" for name in metric.labels)])


@lru_cache(maxsize=1024)
def parse_key(flat_key: str) -> tuple[Metric, tuple[str, ...]] | None:
    """The metric and its label values in the table's order; None for a key that this version does not know."""
    key, *parts = flat_key.split("|")
    metric = METRICS.get(key)
    if metric is None:
        return None
    pairs = [part.partition("=") for part in parts]
    if tuple(name for name, _, _ in pairs) != metric.labels:
        return None
    return metric, tuple(value for _, _, value in pairs)
