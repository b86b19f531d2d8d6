"""`TieredOffloadConnector`: vLLM's hooks. Picks the half by role and delegates; there is no logic here."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vllm_tiered_offload.connector.metadata import TieredOffloadMetadata
from vllm_tiered_offload.connector.plugin import register
from vllm_tiered_offload.connector.scheduler_half import SchedulerHalf
from vllm_tiered_offload.connector.startup import check_engine, share_vllm_log
from vllm_tiered_offload.connector.stats import TieredOffloadPromMetrics, TieredOffloadStats
from vllm_tiered_offload.connector.views import CacheHitSource
from vllm_tiered_offload.connector.worker_half import WorkerHalf
from vllm_tiered_offload.scheduler.scheduler import OffloadingConnectorScheduler

# Whoever came here by kv_connector_module_path needs the name too: MultiConnector finds stats types by class name.
register()


class TieredOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """KV-cache offloading to host memory and what lies behind it.

    Raises SettingsError (one clear line per mistake) when the configuration or the engine cannot be served.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        share_vllm_log()
        check_engine(vllm_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config)
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a dropped store is a future miss, so a preempted request need not be recomputed for us."""
        return False

    @property
    def connector_scheduler(self) -> OffloadingConnectorScheduler | None:
        """The scheduler half proper, in the process that has it."""
        return self._scheduler.inner if self._scheduler is not None else None

    # ---- worker side -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33 calls it before sleep. Older versions release the KV cache only after a reset of it that succeeded,
        which none does while a copy holds device blocks."""
        assert self._worker is not None
        self._worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        assert self._worker is not None
        self._worker.restore_kv_caches()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None
        assert isinstance(connector_metadata, TieredOffloadMetadata)
        self._worker.bind(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        assert self._worker is not None
        self._worker.unbind()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no request is scheduled before its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores are submitted for whole blocks after the forward pass, in wait_for_save."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.submit_stores()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        finished, failed = self._worker.take_transfer_results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        return self._worker.build_report()

    # ---- scheduler side ----------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self._scheduler is not None
        self._scheduler.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        assert self._scheduler is not None
        return (
            self._scheduler.get_external_cache_hit_sources(request, num_external_tokens) if num_external_tokens else {}
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Pins what the final store reads; vLLM may free the blocks at once."""
        assert self._scheduler is not None
        self._scheduler.request_finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.has_pending_push_work()

    def has_pending_block_frees(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.has_pending_block_frees()

    def take_events(self) -> Iterable[KVCacheEvent]:
        assert self._scheduler is not None
        return self._scheduler.take_events()

    def reset_cache(self) -> bool | None:
        assert self._scheduler is not None
        return self._scheduler.reset_cache()

    # ---- both sides --------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        half = self._scheduler or self._worker
        assert half is not None
        return half.get_stats()

    def shutdown(self) -> None:
        half = self._scheduler or self._worker
        assert half is not None
        half.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return TieredOffloadStats(data=data) if data is not None else TieredOffloadStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return TieredOffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
