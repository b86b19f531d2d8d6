"""Builds the scheduler half out of vLLM's configuration, and speaks vLLM's types to it."""

import logging
from collections import Counter
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vllm_tiered_offload.connector.events import EventWriter, event_ledger, events_enabled
from vllm_tiered_offload.connector.metadata import TieredOffloadMetadata, TieredOffloadWorkerMetadata
from vllm_tiered_offload.connector.overrides import current_overrides
from vllm_tiered_offload.connector.startup import parse_settings, warn_once_at_start
from vllm_tiered_offload.connector.stats import TieredOffloadStats
from vllm_tiered_offload.connector.views import (
    CacheHitSource,
    block_tables_of,
    group_shapes,
    has_true_hashes,
    step_view,
    was_aborted,
    why_not_offloadable,
)
from vllm_tiered_offload.contract.seams import monotonic
from vllm_tiered_offload.hierarchy.build import build_manager
from vllm_tiered_offload.scheduler.grouped_scheduler import GroupedScheduler
from vllm_tiered_offload.scheduler.scheduler import OffloadingConnectorScheduler, Role

logger = logging.getLogger(__name__)

# Tiers' media in vLLM's vocabulary.
_SOURCES = {
    "cpu": CacheHitSource.HOST,
    "fs": CacheHitSource.DISK,
    "disk": CacheHitSource.DISK,
    "p2p": CacheHitSource.P2P,
}


def build_scheduler_half(vllm_config: Any, kv_cache_config: KVCacheConfig) -> OffloadingConnectorScheduler | None:
    """The scheduler half, or None (said once) where this model is served without offloading."""
    settings = parse_settings(vllm_config)
    reason = why_not_offloadable(vllm_config, kv_cache_config)
    if reason is not None:
        logger.warning("nothing is offloaded: %s", reason)
        return None
    warn_once_at_start(vllm_config)
    transfer = vllm_config.kv_transfer_config
    overrides = current_overrides()
    clock = overrides.clock or monotonic
    region_access = overrides.region_access_factory() if overrides.region_access_factory is not None else None
    events = events_enabled(vllm_config)
    manager = build_manager(
        settings, engine_id=transfer.engine_id, events=events, clock=clock, region_access=region_access
    )
    shapes = group_shapes(vllm_config, kv_cache_config, settings.blocks_per_chunk)
    if settings.blocks_per_chunk > 1 and any(shape.recurrent for shape in shapes):
        logger.warning(
            "blocks_per_chunk is %d and the model has recurrent layers: few of the states that vLLM keeps lie at a "
            "chunk's end, and only those bring anything back; set it to 1",
            settings.blocks_per_chunk,
        )
    if settings.blocks_per_chunk > 1 and any(shape.reads_next_token for shape in shapes):
        logger.warning(
            "blocks_per_chunk is %d and a draft model's layers are cached: a chunk that begins in what a request found "
            "on the device is stored only once it was computed as a whole; set it to 1",
            settings.blocks_per_chunk,
        )
    role = Role(stores=transfer.is_kv_producer, loads=transfer.is_kv_consumer)
    ledger = event_ledger(manager, shapes) if events else None
    first = shapes[0]
    if len(shapes) == 1 and first.reads_all and first.group_idx == 0 and not first.reads_next_token:
        return OffloadingConnectorScheduler(settings, manager, first, role=role, clock=clock, events=ledger)
    return GroupedScheduler(settings, manager, shapes, role=role, clock=clock, events=ledger)


class SchedulerHalf:
    """Hooks of vLLM's scheduler, in vLLM's types. Without an `inner` half every hook answers "nothing"."""

    def __init__(self, vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
        self.inner = build_scheduler_half(vllm_config, kv_cache_config)
        self._speculates = vllm_config.speculative_config is not None
        self._event_writer = EventWriter(kv_cache_config) if self.inner is not None else None

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        if self.inner is not None:
            self.inner.bind_device(kv_cache_manager.block_pool, block_tables_of(kv_cache_manager))

    def on_new_request(self, request: Request) -> None:
        if self.inner is not None:
            self.inner.on_new_request(request, skip=not has_true_hashes(request, self._speculates))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.inner is None:
            return 0, False
        return self.inner.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        if self.inner is not None:
            self.inner.update_state_after_alloc(request, blocks.blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Tokens of the load just planned, by vLLM's name for where they came from."""
        sources: Counter[CacheHitSource] = Counter()
        for medium, tokens in (self.inner.loaded_from(request.request_id) if self.inner else {}).items():
            sources[_SOURCES.get(medium, CacheHitSource.EXTERNAL_UNSPECIFIED)] += tokens
        return dict(sources) if sources.total() == num_external_tokens else {CacheHitSource.HOST: num_external_tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TieredOffloadMetadata:
        if self.inner is None:
            return TieredOffloadMetadata()
        return TieredOffloadMetadata(self.inner.build_connector_meta(step_view(scheduler_output)))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self.inner is None:
            return
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, TieredOffloadWorkerMetadata) else None
        self.inner.update_connector_output(report, connector_output.invalid_block_ids, connector_output.failed_recving)

    def request_finished(self, request: Request) -> None:
        if self.inner is not None:
            self.inner.request_finished(request, aborted=was_aborted(request))

    def has_pending_push_work(self) -> bool:
        return self.inner is not None and self.inner.has_pending_work()

    def has_pending_block_frees(self) -> bool:
        return self.inner is not None and self.inner.has_pending_block_frees()

    def take_events(self) -> list[KVCacheEvent]:
        if self.inner is None or self._event_writer is None:
            return []
        return self._event_writer.write(self.inner.take_events())

    def get_stats(self) -> TieredOffloadStats | None:
        stats = self.inner.take_stats() if self.inner is not None else None
        return TieredOffloadStats(data=stats.to_dict()) if stats is not None else None

    def reset_cache(self) -> bool:
        if self.inner is not None:
            self.inner.reset_cache()
        return True

    def shutdown(self) -> None:
        if self.inner is not None:
            self.inner.shutdown()
