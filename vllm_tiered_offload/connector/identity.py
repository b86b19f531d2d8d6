"""The fingerprint of this engine's KV bytes (D5), read from vLLM's configuration."""

import json
import os
import uuid
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_tiered_offload.connector.views import draft_groups
from vllm_tiered_offload.connector.weights import weights_identity
from vllm_tiered_offload.contract.fingerprint import Fingerprint

# What a Hugging Face config says of where it came from.
_SAID_ELSEWHERE = {"_name_or_path", "_commit_hash", "transformers_version"}


def fingerprint_of(vllm_config: Any, kv_cache_config: KVCacheConfig, blocks_per_chunk: int, layout: str) -> Fingerprint:
    """Everything that decides the bytes of a chunk. `layout` is the workers' word for order and strides of a page.

    Hashing starts from NONE_HASH, which vLLM derives from the algorithm and PYTHONHASHSEED; it sets it after the
    connector is built, so its two sources stand here instead.
    """
    from vllm import __version__ as vllm_version
    from vllm.platforms import current_platform

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    return Fingerprint.of(
        {
            "model": model.model,
            "revision": model.revision,
            "weights": weights_identity(model, vllm_config.load_config) + _draft_model(vllm_config),
            "hf_config": _hf_config(model.hf_config),
            "quantization": None if model.quantization is None else str(model.quantization),
            "model_dtype": str(model.dtype),
            "kv_dtype": [_kv_dtype(cache.cache_dtype, group.kv_cache_spec) for group in groups],
            "block_tokens": [group.kv_cache_spec.block_size for group in groups],
            "blocks_per_chunk": blocks_per_chunk,
            "kv_groups": [[type(group.kv_cache_spec).__name__, *group.layer_names] for group in groups],
            "layout": layout,
            "device": f"{current_platform.device_type} {current_platform.get_cpu_architecture().name} {_isa()}",
            "tensor_parallel": parallel.tensor_parallel_size,
            "pipeline_parallel": parallel.pipeline_parallel_size,
            "context_parallel": parallel.decode_context_parallel_size,
            "hash_algorithm": str(cache.prefix_caching_hash_algo),
            # A random seed makes this process's hashes its own: nobody else may take them for theirs.
            "hash_seed": f"random {uuid.uuid4()}" if has_random_hash_seed(cache) else os.environ.get("PYTHONHASHSEED"),
            "hash_scheme": f"vllm {vllm_version}{_keyed_ahead(vllm_config, kv_cache_config)}",
            "generation": None,
        }
    )


def _draft_model(vllm_config: Any) -> list[list[Any]]:
    """The model that writes the slots of draft layers, which are cached as all others are; [] where there is none."""
    speculation = vllm_config.speculative_config
    if speculation is None or not (speculation.use_eagle() or speculation.uses_draft_model()):
        return []
    draft = speculation.draft_model_config
    said = [speculation.method, draft.model, draft.revision, str(draft.quantization), _hf_config(draft.hf_config)]
    return [["draft model", *said], *weights_identity(draft, vllm_config.load_config)]


def _keyed_ahead(vllm_config: Any, kv_cache_config: KVCacheConfig) -> str:
    """Which groups' chunks have the hash behind their end as a key; before, they had the one at their end."""
    drafts = draft_groups(vllm_config, kv_cache_config)
    return f", one hash ahead in groups {sorted(drafts)}" if drafts else ""


def has_random_hash_seed(cache_config: Any) -> bool:
    """Whether block hashes differ from process to process (case 45): vLLM seeds the xxhash variants at random."""
    return str(cache_config.prefix_caching_hash_algo).startswith("xxhash") and "PYTHONHASHSEED" not in os.environ


def _kv_dtype(cache_dtype: str, spec: Any) -> str:
    """The format of the bytes. Both kinds of fp8, and more, are kept in tensors of one type, so that is not enough."""
    stored = str(getattr(spec, "dtype", cache_dtype))
    return stored if cache_dtype == "auto" or stored == f"torch.{cache_dtype}" else f"{cache_dtype} in {stored}"


def _hf_config(config: Any) -> dict[str, Any]:
    """All values, so that a difference can be named. Infinities, which some models have, become text."""
    values = json.loads(config.to_json_string(use_diff=False), parse_constant=str)
    return {name: value for name, value in values.items() if name not in _SAID_ELSEWHERE}


def _isa() -> str:
    """The instruction sets that decide how vLLM's CPU backend packs the cache."""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())
