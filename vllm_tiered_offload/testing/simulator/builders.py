"""vLLM's own objects, built in process: configuration, scheduler, requests. Imports vLLM."""

import atexit
import copy
import json
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_tiered_offload.testing.simulator.config import SimConfig

EOS = 2  # never sampled by the simulated model

_TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "tie_word_embeddings": True,
}


@lru_cache(maxsize=1)
def _model_config() -> ModelConfig:
    """A made-up two-layer model; only its config.json is ever read."""
    folder = tempfile.mkdtemp(prefix="sim_model_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Path(folder, "config.json").write_text(json.dumps(_TINY_MODEL))
    return ModelConfig(model=folder, dtype="bfloat16", seed=0, skip_tokenizer_init=True)


def kv_transfer_config(config: SimConfig, world: str) -> KVTransferConfig | None:
    """The connector under test alone, or beside the neighbour inside MultiConnector."""
    if config.connector is None:
        return None
    name, module = config.connector
    ours = {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": config.kv_role,
        "kv_load_failure_policy": config.load_failure_policy,
        "kv_connector_extra_config": config.connector_settings() if config.connector[1].startswith("vllm_tiered") else
        {"world": world, "blocks_per_chunk": config.blocks_per_chunk, **config.extra},
    }  # fmt: skip
    if config.neighbour is None:
        return KVTransferConfig(**ours)
    neighbour = {
        "kv_connector": "NeighbourConnector",
        "kv_connector_module_path": "vllm_tiered_offload.testing.simulator.neighbour",
        "kv_role": "kv_both",
        "kv_load_failure_policy": config.load_failure_policy,
        "kv_connector_extra_config": {"world": world},
    }
    children = [neighbour, ours] if config.neighbour_first else [ours, neighbour]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy=config.load_failure_policy,
        kv_connector_extra_config={"connectors": children},
    )


def vllm_config(config: SimConfig, world: str) -> VllmConfig:
    """The engine's configuration."""
    built = VllmConfig(
        model_config=_model_config(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.token_budget,
            max_model_len=config.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(
            block_size=config.block_size, cache_dtype="auto", enable_prefix_caching=True, gpu_memory_utilization=0.9
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=config.ranks),
        kv_transfer_config=kv_transfer_config(config, world),
        device_config=DeviceConfig("cpu"),
    )
    built.cache_config.num_gpu_blocks = config.num_blocks
    if any(group.recurrent for group in config.groups):
        built.cache_config.mamba_cache_mode = "align"  # as vLLM chooses it for such a model
    if config.speculative_tokens:
        built.speculative_config = _speculation(config, built)
    # Set afterwards: the CPU platform turns async scheduling off, while the scheduler's logic does not depend on it.
    built.scheduler_config.async_scheduling = config.depth > 1
    built.scheduler_config.scheduler_reserve_full_isl = False  # else a full pool admits nobody, and nobody is preempted
    return built


def _speculation(config: SimConfig, built: VllmConfig) -> SpeculativeConfig:
    """As if there were a draft model, which vLLM would want to see; the scheduler asks how many tokens it guesses."""
    made = SpeculativeConfig(
        method="ngram",
        prompt_lookup_max=2,
        num_speculative_tokens=config.speculative_tokens,
        target_model_config=built.model_config,
        target_parallel_config=built.parallel_config,
    )
    if any(group.draft for group in config.groups):
        made.method = "eagle"
    return made


def for_rank(built: VllmConfig, rank: int) -> VllmConfig:
    """The same configuration as worker `rank` has it."""
    mine = copy.copy(built)
    mine.parallel_config = copy.copy(built.parallel_config)
    mine.parallel_config.rank = rank
    return mine


def kv_cache_config(config: SimConfig, layers: list[list[str]]) -> KVCacheConfig:
    """The KV groups over their layers; nothing in it needs the tensors themselves."""
    groups = [
        KVCacheGroupSpec(names, _spec(config, index), is_eagle_group=config.groups[index].draft)
        for index, names in enumerate(layers)
    ]
    built = KVCacheConfig(num_blocks=config.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    built.hash_block_size = config.hash_tokens
    return built


# Whether vLLM can say that all ranks hold the same. 0.30 cannot, and each rank stores its own there.
REPLICAS_ARE_TOLD = "max_tp_shards" in MLAAttentionSpec.__dataclass_fields__
_ONE_SHARD: dict[str, Any] = {"max_tp_shards": 1} if REPLICAS_ARE_TOLD else {}


def _spec(config: SimConfig, index: int) -> KVCacheSpec:
    group, block_tokens = config.groups[index], config.block_tokens(index)
    if group.recurrent:
        state = ((block_tokens * group.words_per_slot,),)
        return MambaSpec(shapes=state, dtypes=(torch.int64,), block_size=block_tokens, mamba_cache_mode="align")
    shape: dict[str, Any] = {
        "block_size": block_tokens,
        "num_kv_heads": 1,
        "head_size": group.words_per_slot * 2,  # K and V, two bytes each
        "dtype": torch.bfloat16,
    }
    if group.window is not None:
        return SlidingWindowSpec(sliding_window=group.window, **shape)
    if group.local_span is not None:
        return ChunkedLocalAttentionSpec(attention_chunk_size=group.local_span, **shape)
    if group.replicated:
        return MLAAttentionSpec(**shape, **_ONE_SHARD)
    return FullAttentionSpec(**shape)


def scheduler(config: SimConfig, built: VllmConfig, kv_config: KVCacheConfig) -> Scheduler:
    """vLLM's scheduler, which makes the connector's scheduler half itself."""
    kind = AsyncScheduler if config.depth > 1 else Scheduler
    return kind(
        vllm_config=built,
        kv_cache_config=kv_config,
        structured_output_manager=StructuredOutputManager(built),
        block_size=config.hit_tokens,
        hash_block_size=config.hash_tokens,
        log_stats=config.log_stats,
    )


@lru_cache(maxsize=8)
def _hasher(block_size: int) -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(block_size, sha256)


@lru_cache(maxsize=256)
def _sampling(max_tokens: int, skip_reading: bool) -> SamplingParams:
    """Nobody changes them, and vLLM takes its time to make them."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, skip_reading_prefix_cache=skip_reading)
    sampling.update_from_generation_config({}, EOS)
    return sampling


def request(
    req_id: str,
    tokens: list[int],
    max_tokens: int,
    block_size: int,
    params: dict[str, Any] | None = None,
    salt: str | None = None,
    skip_reading: bool = False,
    session: bool = False,
) -> Request:
    """A request that ends by length alone. `skip_reading`: it must compute its whole prompt itself. `session`: more
    input may follow under the same id."""
    sampling = _sampling(max_tokens, skip_reading)
    if params:
        sampling = copy.copy(sampling)
        sampling.extra_args = {"kv_transfer_params": params}
    return Request(
        request_id=req_id,
        prompt_token_ids=list(tokens),
        sampling_params=sampling,
        pooling_params=None,
        cache_salt=salt,
        block_hasher=_hasher(block_size),
        resumable=session,
    )
