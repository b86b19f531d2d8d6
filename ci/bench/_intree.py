"""Builders for scheduler.py: vLLM's objects, the scheduler half of its in-tree offloading connector, and ours.

Everything is the real class; only the worker is missing. Both halves are driven through the same hooks, those of
KVConnectorBase_V1; a `Half` adds what differs: how the CPU tier is filled, what a worker would acknowledge, how a
chunk comes to be on disk alone.
"""

import atexit
import dataclasses
import itertools
import json
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload import base as intree_offload
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vllm_tiered_offload.connector.metadata import TieredOffloadWorkerMetadata
from vllm_tiered_offload.contract.fingerprint import FIELDS, Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import JobMetadata, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey, make_offload_key
from vllm_tiered_offload.contract.messages import JobAck, RegionAnnouncement, WorkerReport
from vllm_tiered_offload.region.host_region import HostRegion

BLOCK = 16  # tokens; a chunk is one block
ROW = 4096  # bytes; the hooks move none of them
EOS = 2
DEVICE_BLOCKS = 1 << 16

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 65536,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "tie_word_embeddings": True,
}
_ids = itertools.count(1)


# ---- vLLM's objects ------------------------------------------------------------------------------------------------


def model_folder() -> str:
    """A made-up two-layer model; only its config.json is ever read."""
    folder = tempfile.mkdtemp(prefix="bench_model_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Path(folder, "config.json").write_text(json.dumps(_MODEL))
    return folder


def vllm_config(model: str, transfer: dict[str, Any] | None, max_tokens: int = 65536) -> VllmConfig:
    """`transfer` None: no connector."""
    model_config = ModelConfig(model=model, dtype="bfloat16", seed=0, skip_tokenizer_init=True)
    settings = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=1024,
            max_num_batched_tokens=max_tokens,
            max_model_len=model_config.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(
            block_size=BLOCK, gpu_memory_utilization=0.9, cache_dtype="auto", enable_prefix_caching=True
        ),
        kv_transfer_config=None if transfer is None else KVTransferConfig(**settings, **transfer),
        device_config=DeviceConfig("cpu"),
    )


def kv_cache_config(num_blocks: int) -> KVCacheConfig:
    """One full-attention group of one layer; a page is ROW bytes."""
    head_size = ROW // (2 * BLOCK * 2)  # K and V, two bytes each
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=head_size, dtype=torch.bfloat16)
    group = KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])


def our_transfer(chunks: int, root: str | None = None, **more: Any) -> dict[str, Any]:
    """Our connector with a CPU tier of `chunks` rows, and an fs tier behind it where `root` is given."""
    tiers = {} if root is None else {"tiers": [{"type": "fs", "root": root}]}
    return {
        "kv_connector": "TieredOffloadConnector",
        "kv_connector_module_path": "vllm_tiered_offload.connector.connector",
        "kv_connector_extra_config": {"cpu": {"capacity": chunks * ROW}, **tiers, **more},
    }


def intree_transfer(chunks: int, root: str | None = None, **more: Any) -> dict[str, Any]:
    """The same of vLLM's own connector."""
    tiers = {} if root is None else {"secondary_tiers": [{"type": "fs", "root_dir": root}]}
    spec = "CPUOffloadingSpec" if root is None else "TieringOffloadingSpec"
    extra = {"spec_name": spec, "cpu_bytes_to_use": chunks * ROW, **tiers, **more}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


class NoOpConnector(KVConnectorBase_V1, SupportsHMA):
    """What vLLM itself pays for having any connector at all."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        return False, None


def noop_transfer() -> dict[str, Any]:
    """A connector that does nothing."""
    return {"kv_connector": "NoOpConnector", "kv_connector_module_path": __name__}


def new_request(tokens: list[int], hashes: Sequence[bytes] | None = None, max_tokens: int = 100_000) -> Request:
    """A request whose blocks have these hashes: hashing is vLLM's work and not part of what is measured."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    sampling.update_from_generation_config({}, EOS)

    def known_hashes(request: Request) -> list[Any]:
        return list(hashes[len(request.block_hashes) : request.num_tokens // BLOCK])

    return Request(
        request_id=f"r{next(_ids)}",
        prompt_token_ids=tokens,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=known_hashes if hashes is not None else None,
    )


def random_hashes(rng: np.random.Generator, count: int) -> list[bytes]:
    """Block hashes that nobody has seen."""
    raw = rng.bytes(32 * count)
    return [raw[32 * index : 32 * index + 32] for index in range(count)]


def keys_of(hashes: Sequence[bytes]) -> list[OffloadKey]:
    """The keys of these blocks; both halves make the same bytes."""
    return [make_offload_key(one, 0) for one in hashes]


def announcement(chunks: int, region: HostRegion | None = None) -> RegionAnnouncement:
    """What the first worker would report. Without tiers behind, nobody opens the region, and there need not be one."""
    fingerprint = Fingerprint.of(dict.fromkeys(FIELDS, "bench"))
    if region is None:
        return RegionAnnouncement(0, 0, 0, RegionGeometry(chunks, (ROW,), 1), fingerprint)
    return dataclasses.replace(region.announcement(), fingerprint=fingerprint)


# ---- the two halves ------------------------------------------------------------------------------------------------


class Half(ABC):
    """One scheduler half with its device pool and a CPU tier of `chunks` rows."""

    name: str
    prompts: Any  # that its CPU tier was filled with

    def __init__(self, model: str, transfer: dict[str, Any]) -> None:
        config = vllm_config(model, transfer)
        blocks = kv_cache_config(DEVICE_BLOCKS)
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, blocks)
        self.device = KVCacheManager(
            blocks, max_model_len=65536, scheduler_block_size=BLOCK, hash_block_size=BLOCK, log_stats=True
        )
        self._tables = self.device.coordinator.single_type_managers[0].req_to_blocks
        self.connector.bind_kv_cache_manager(self.device)

    def allocate(self, request: Request, count: int) -> list[int]:
        """`count` more device blocks for a request; their ids."""
        new = self.device.block_pool.get_new_blocks(count)
        self._tables[request.request_id].extend(new)
        return [block.block_id for block in new]

    def free(self, request: Request) -> None:
        """The request's device blocks go back, as vLLM frees them: tail first."""
        self.device.block_pool.free_blocks(reversed(self._tables.pop(request.request_id, [])))

    def table(self, request: Request) -> list[int]:
        """Ids of the request's device blocks."""
        return [block.block_id for block in self._tables[request.request_id]]

    def fill(self, prompts: Sequence[Sequence[OffloadKey]], step: int = 20) -> None:
        """Make whole prompts resident in the CPU tier, many of them at a time, as running requests would."""
        for begin in range(0, len(prompts), 50):
            together = [(self.begin(f"fill{next(_ids)}"), keys) for keys in prompts[begin : begin + 50]]
            for first in range(0, max(len(keys) for _, keys in together), step):
                for ctx, keys in together:
                    self.store(keys[first : first + step], ctx)
            for ctx, _ in together:
                self.primary.on_request_finished(ctx)

    def shutdown(self) -> None:
        self.connector.shutdown()

    # What differs.

    @property
    @abstractmethod
    def primary(self) -> Any:
        """The CPU tier."""

    @abstractmethod
    def begin(self, req_id: str) -> Any:
        """A request at the CPU tier."""

    @abstractmethod
    def store(self, keys: Sequence[OffloadKey], ctx: Any) -> None:
        """Make keys readable in the CPU tier."""

    @staticmethod
    @abstractmethod
    def ack(meta: Any) -> KVConnectorOutput | None:
        """A worker that has done everything; None where there was nothing to do."""

    @staticmethod
    @abstractmethod
    def num_jobs(meta: Any) -> int:
        """Device jobs of a step."""

    @staticmethod
    @abstractmethod
    def num_rows(meta: Any) -> int:
        """Rows that a step stores into."""

    @abstractmethod
    def put_on_disk(self, keys: Sequence[OffloadKey]) -> None:
        """Chunks that the fs tier has and the CPU tier does not."""

    def settle(self) -> None:
        """Let the threads behind finish what nobody waits for any more, or they slow what is measured next."""
        time.sleep(0.1)


class Ours(Half):
    """Our scheduler half."""

    name = "ours"

    def __init__(self, model: str, chunks: int, root: str | None = None) -> None:
        super().__init__(model, our_transfer(chunks, root))
        self.inner = self.connector.connector_scheduler
        self._region = None
        if root is not None:
            self._region = HostRegion.create(RegionGeometry(chunks, (ROW,), 1), populate=False)
        self.inner.bind_region(announcement(chunks, self._region))
        if root is not None:
            self._wait_for_tier()

    def _wait_for_tier(self) -> None:
        """Until the tier behind knows the region, and a key that its first scan did not find is asked for again."""
        tier = self.inner.manager.guards[0].tier
        deadline = time.monotonic() + 60
        while not self.inner.manager._tiers_ready:
            assert time.monotonic() < deadline, "the region was never opened"
            self.inner.manager.on_schedule_end()
            time.sleep(0.01)
        time.sleep(tier.settings.share_refresh + 0.2)
        self.inner.manager.on_schedule_end()

    @property
    def primary(self) -> Any:
        return self.inner.manager.primary

    def begin(self, req_id: str) -> Any:
        ctx = ReqContext(req_id)
        self.primary.on_new_request(ctx)
        return ctx

    def store(self, keys: Sequence[OffloadKey], ctx: Any) -> None:
        self.primary.complete_store(self.primary.prepare_store(keys, ctx))

    @staticmethod
    def ack(meta: Any) -> KVConnectorOutput | None:
        message = meta.message
        acks = {job.job_id: JobAck() for job in (*message.loads, *message.stores)}
        if not acks:
            return None
        return KVConnectorOutput(kv_connector_worker_meta=TieredOffloadWorkerMetadata(WorkerReport(acks)))

    @staticmethod
    def num_jobs(meta: Any) -> int:
        return len(meta.message.loads) + len(meta.message.stores)

    @staticmethod
    def num_rows(meta: Any) -> int:
        return sum(len(transfer.rows) for job in meta.message.stores for transfer in job.transfers)

    def put_on_disk(self, keys: Sequence[OffloadKey]) -> None:
        tier = self.inner.manager.guards[0].tier
        tier.submit_store(JobMetadata(-next(_ids), tuple(keys), tuple(range(len(keys))), False, ReqContext("disk")))
        assert tier.drain(60)
        assert all(result.success for result in tier.get_finished_jobs())

    def settle(self) -> None:
        tier = self.inner.manager.guards[0].tier
        while (left := tier.leftovers())["asked"] or left["questions"]:
            self.inner.manager.on_schedule_end()
            time.sleep(0.02)

    def shutdown(self) -> None:
        super().shutdown()
        if self._region is not None:
            self._region.close()


class InTree(Half):
    """vLLM's own."""

    name = "in-tree"

    def __init__(self, model: str, chunks: int, root: str | None = None) -> None:
        super().__init__(model, intree_transfer(chunks, root))
        self._manager = self.connector.connector_scheduler.manager

    @property
    def primary(self) -> Any:
        return getattr(self._manager, "primary_tier", self._manager)

    @property
    def heap_entries(self) -> int:
        """Of the LRU order, which is rebuilt in one call whenever it has grown to twice the keys."""
        return len(self.primary._policy._heap)

    def begin(self, req_id: str) -> Any:
        ctx = intree_offload.ReqContext(req_id=req_id)
        self.primary.on_new_request(ctx)
        return ctx

    def store(self, keys: Sequence[OffloadKey], ctx: Any) -> None:
        out = self.primary.prepare_store(keys, ctx)
        assert out is not None
        self.primary.complete_store(keys, ctx)

    @staticmethod
    def ack(meta: Any) -> KVConnectorOutput | None:
        done = OffloadingWorkerMetadata()
        for job_id in (*meta.load_jobs, *meta.store_jobs):
            done.mark_completed(job_id)
        return KVConnectorOutput(kv_connector_worker_meta=done) if InTree.num_jobs(meta) else None

    @staticmethod
    def num_jobs(meta: Any) -> int:
        return len(meta.load_jobs) + len(meta.store_jobs)

    @staticmethod
    def num_rows(meta: Any) -> int:
        return len(meta.store_jobs)

    def put_on_disk(self, keys: Sequence[OffloadKey]) -> None:
        tier = self._manager.secondary_tiers[0]
        ctx = intree_offload.ReqContext(req_id="disk")
        tier.submit_store(TransferJob(10**9 + next(_ids), list(keys), np.arange(len(keys)), False, ctx))
        tier.drain_jobs()
        assert all(result.success for result in tier.get_finished_jobs())


def step_ack(metadata: Any) -> KVConnectorOutput | None:
    """What a worker answers to one step's metadata, whichever connector wrote it."""
    kind = {"TieredOffloadMetadata": Ours, "OffloadingConnectorMetadata": InTree}.get(type(metadata).__name__)
    return None if kind is None else kind.ack(metadata)
