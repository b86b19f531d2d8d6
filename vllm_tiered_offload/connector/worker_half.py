"""Builds the worker half from vLLM's configuration and KV tensors; agrees with its siblings on the host region."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_tiered_offload.connector.identity import fingerprint_of, has_random_hash_seed
from vllm_tiered_offload.connector.metadata import TieredOffloadMetadata, TieredOffloadWorkerMetadata
from vllm_tiered_offload.connector.overrides import current_overrides
from vllm_tiered_offload.connector.ranks import RankGroup, current_rank_group
from vllm_tiered_offload.connector.startup import parse_settings
from vllm_tiered_offload.connector.stats import TieredOffloadStats
from vllm_tiered_offload.connector.views import kv_replicas, offloaded_groups, why_not_offloadable
from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.contract.seams import JobExecutor
from vllm_tiered_offload.region import HostRegion, fit_geometry, read_memory_budget
from vllm_tiered_offload.settings import SettingsError
from vllm_tiered_offload.telemetry.metrics import METRICS, metric_key
from vllm_tiered_offload.telemetry.stats import OffloadStats
from vllm_tiered_offload.worker.copy_engines.base import CopyEngine, EngineFactory
from vllm_tiered_offload.worker.copy_engines.cuda import device_engine
from vllm_tiered_offload.worker.copy_engines.host import HostCopyEngine
from vllm_tiered_offload.worker.copy_engines.torch_device import BatchedOp
from vllm_tiered_offload.worker.layout import GroupLayout, build_group_layout
from vllm_tiered_offload.worker.worker import OffloadingConnectorWorker

logger = logging.getLogger(__name__)


class WorkerHalf:
    """Hooks of vLLM's worker, in vLLM's types. Where nothing is offloaded every hook does nothing."""

    def __init__(self, vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = parse_settings(vllm_config)
        self._ranks = current_rank_group()
        self._executor_factory = current_overrides().executor_factory
        self._region: HostRegion | None = None
        self._worker: OffloadingConnectorWorker | None = None
        self._signature = ""  # of all KV groups' layouts, once they are registered

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make or open the host region and start copying. Collective over the engine's ranks; raises with a reason.

        Called again, with other memory of the same shape: copies of the former end first, the region stays.
        """
        if why_not_offloadable(self._vllm_config, self._kv_cache_config) is not None:
            return
        layouts = self._layouts(kv_caches)
        signature = "|".join(layout.signature for layout in layouts)
        if self._worker is None or self._region is None:
            self._signature = signature
            self._start(layouts)
        elif signature == self._signature:
            self._worker.attach(layouts, self._region.rank_view(self._writer()))
        else:
            raise RuntimeError(
                "the KV cache was registered again in another layout, in which nobody can read what host memory holds: "
                f"restart the engine ({self._signature} became {signature})"
            )

    def _start(self, layouts: Sequence[GroupLayout]) -> None:
        config = self._settings.worker_config()
        rank, writer = self._ranks.rank, self._writer()
        slot_bytes = max(layout.block_bytes for layout in layouts) * config.blocks_per_chunk
        self._region, announcement = agree_on_region(self._ranks, config, slot_bytes if rank == writer else 0)
        factory = engine_factory(self._executor_factory)
        self._worker = OffloadingConnectorWorker(config, rank, factory, writes=rank == writer)
        self._worker.attach(layouts, self._region.rank_view(writer))
        if self._ranks.rank == 0:
            slots = [str(size) for size in self._region.geometry.slot_bytes]
            chunk = config.blocks_per_chunk
            fingerprint = fingerprint_of(
                self._vllm_config, self._kv_cache_config, chunk, "|".join([self._signature, *slots])
            )
            self._worker.set_announcement(replace(announcement, fingerprint=fingerprint))
            self._say_summary(layouts, fingerprint)

    def unregister_kv_caches(self) -> None:
        """The KV cache loses its memory next (sleep). RuntimeError when copies do not end in a bounded time."""
        if self._worker is not None:
            self._worker.release()

    def restore_kv_caches(self) -> None:
        """The KV cache has memory again, at the same addresses."""
        if self._worker is not None:
            self._worker.restore()

    def _writer(self) -> int:
        """The rank whose slot has this rank's KV: the first of those that hold the same."""
        rank = self._ranks.rank
        return rank - rank % kv_replicas(self._kv_cache_config, self._vllm_config.parallel_config.tensor_parallel_size)

    def _layouts(self, kv_caches: dict[str, torch.Tensor]) -> list[GroupLayout]:
        num_blocks, layouts = self._kv_cache_config.num_blocks, []
        for index, group in offloaded_groups(self._kv_cache_config).items():
            layers = {name: kv_caches[name] for name in group.layer_names if name in kv_caches}
            layouts.append(build_group_layout(index, layers, num_blocks, group.kv_cache_spec.block_size))
        return layouts

    def _say_summary(self, layouts: Sequence[GroupLayout], fingerprint: Fingerprint) -> None:
        assert self._region is not None
        assert self._worker is not None
        geometry, settings = self._region.geometry, self._settings
        chunk_tokens = min(layout.geometry.block_tokens for layout in layouts) * settings.blocks_per_chunk
        logger.info(
            "tiered offload: %.2f GiB of host memory (%.0f%% huge pages) for %d tokens "
            "(%d rows of %d bytes, %d tokens a row); "
            "tiers: %s; policy %s; layout: %d KV groups, %d layers, %d bytes a block and rank, %d ranks; "
            "copy engine: %s; "
            "fingerprint %s",
            geometry.total_bytes / 2**30,
            100 * self._region.huge_page_bytes / geometry.total_bytes,
            geometry.num_rows * chunk_tokens // len(layouts),
            geometry.num_rows,
            geometry.row_bytes,
            chunk_tokens,
            " > ".join(["cpu", *(tier.type for tier in settings.tiers)]),
            settings.cpu.eviction_policy,
            len(layouts),
            sum(len(layout.tensors) for layout in layouts),
            max(layout.block_bytes for layout in layouts),
            geometry.num_ranks,
            self._worker.describe_engine(),
            fingerprint.short,
        )
        if settings.tiers and has_random_hash_seed(self._vllm_config.cache_config):
            logger.warning(
                "block hashes are seeded at random, so nothing that this engine stores is found again after a restart "
                "or by another engine: set PYTHONHASHSEED to one value for all, or prefix_caching_hash_algo to sha256"
            )

    def bind(self, metadata: TieredOffloadMetadata) -> None:
        if self._worker is not None:
            self._worker.bind(metadata.message)

    def start_loads(self) -> None:
        if self._worker is not None:
            self._worker.start_loads()

    def submit_stores(self) -> None:
        if self._worker is not None:
            self._worker.submit_stores()

    def take_transfer_results(self) -> tuple[set[str], set[str]]:
        return self._worker.take_transfer_results() if self._worker is not None else (set(), set())

    def build_report(self) -> TieredOffloadWorkerMetadata | None:
        return TieredOffloadWorkerMetadata(self._worker.build_report()) if self._worker is not None else None

    def unbind(self) -> None:
        if self._worker is not None:
            self._worker.unbind()

    def get_stats(self) -> TieredOffloadStats | None:
        """This rank's transfers since the last call."""
        stats = OffloadStats()
        for name, amount in (self._worker.take_stats() if self._worker is not None else {}).items():
            direction, _, what = name.partition("_")
            if amount and f"{what}_total" in METRICS:
                stats.add(metric_key(f"{what}_total", direction=direction), amount)
        return None if stats.is_empty() else TieredOffloadStats(data=stats.to_dict())

    def shutdown(self) -> None:
        """A region that a copy may still touch stays mapped: the end of the process frees it."""
        stopped = self._worker is None or self._worker.shutdown()
        if self._region is not None and stopped:
            self._region.close()


def engine_factory(executor_factory: Callable[[], JobExecutor] | None) -> EngineFactory:
    """The engine for the device that the KV cache is on; `executor_factory` (tests) replaces the host engine's threads.

    Layouts of one worker are on one device.
    """

    def make(config: WorkerConfig, layouts: Sequence[GroupLayout], slots: np.ndarray) -> CopyEngine:
        if layouts[0].device.type != "cpu":
            return device_engine(config, layouts, slots, _batched_copy())
        executor = executor_factory() if executor_factory is not None else None
        return HostCopyEngine(layouts, slots, config.blocks_per_chunk, config.copy_threads, executor)

    return make


def _batched_copy() -> BatchedOp | None:
    """vLLM's own batched copy, a fallback of the device engine; None where this version has none."""
    from vllm import _custom_ops

    op: BatchedOp | None = getattr(_custom_ops, "swap_blocks_batch", None)
    return op


def agree_on_region(ranks: RankGroup, config: WorkerConfig, slot_bytes: int) -> tuple[HostRegion, RegionAnnouncement]:
    """The engine's one host region: rank 0 makes it, the others open it. Raises the same error on every rank.

    Three collective rounds, taken by every rank whatever happened to it in between, so that a failure on one rank ends
    all of them with its reason instead of leaving the others waiting.
    """
    told = ranks.all_gather((slot_bytes, _host_identity()))
    region: HostRegion | None = None
    problem: str | None = None
    if len({host for _, host in told}) > 1:
        problem = "the engine's workers run on several hosts; the host region is shared memory of one"
    elif ranks.rank == 0:
        region, problem = _create(config, [size for size, _ in told])
    announcement, problem = ranks.all_gather((region.announcement() if region else None, problem))[0]
    if problem is None and region is None:
        region, problem = _open(announcement)
    problems = [text for text in ranks.all_gather(problem) if text is not None]
    if problems or region is None:
        if region is not None:
            region.close()
        raise SettingsError(list(dict.fromkeys(problems)))
    return region, announcement


def _create(config: WorkerConfig, slot_bytes: list[int]) -> tuple[HostRegion | None, str | None]:
    try:
        budget = read_memory_budget()
        geometry = fit_geometry(config.capacity, slot_bytes, config.blocks_per_chunk, budget)
        return HostRegion.create(geometry, populate=config.populate, budget=budget), None
    except (ValueError, RuntimeError, OSError) as error:
        return None, str(error)


def _open(announcement: RegionAnnouncement) -> tuple[HostRegion | None, str | None]:
    try:
        return HostRegion.open(announcement), None
    except (ValueError, RuntimeError, OSError) as error:
        return None, str(error)


def _host_identity() -> str:
    """Equal for processes that can share memory through /proc: one boot of one kernel, one PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
