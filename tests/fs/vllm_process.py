"""What a vLLM process would call its chunks: `python vllm_process.py MODEL` prints it as JSON, by hash algorithm.

Imported, it makes vLLM's configuration objects for a model that has a config.json and nothing else.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm_tiered_offload.connector.identity import fingerprint_of
from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.contract.keys import make_offload_keys

BLOCK = 16
TOKENS = list(range(100, 100 + 3 * BLOCK))

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def make_model(directory: Path, **changes: Any) -> Path:
    """A directory with a config.json and a file that passes for weights."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def vllm_config(model: Path, **arguments: Any) -> Any:
    """What `vllm serve` makes of its command line."""
    from vllm.engine.arg_utils import EngineArgs

    defaults = {"block_size": BLOCK, "max_model_len": 2048, "enforce_eager": True, "skip_tokenizer_init": True}
    return EngineArgs(model=str(model), **{**defaults, **arguments}).create_engine_config()


def kv_cache_config(config: Any, groups: int = 1) -> Any:
    """What EngineCore makes of that."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    dtype = kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, config.model_config)
    spec = FullAttentionSpec(block_size=config.cache_config.block_size, num_kv_heads=2, head_size=64, dtype=dtype)
    names = [[f"layer.{index}"] for index in range(groups)]
    return KVCacheConfig(
        num_blocks=64,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec) for layers in names],
    )


def fingerprint(config: Any, *, groups: int = 1, blocks_per_chunk: int = 1, layout: str = "NHD") -> Fingerprint:
    return fingerprint_of(config, kv_cache_config(config, groups), blocks_per_chunk, layout)


def block_hashes(algorithm: str, **request: Any) -> list[bytes]:
    """vLLM's own hashes of a prompt's full blocks. `request` overrides the arguments of its Request."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    arguments = {"prompt_token_ids": TOKENS, "sampling_params": SamplingParams(max_tokens=1), "pooling_params": None}
    made = Request("id", **{**arguments, **request}, block_hasher=get_request_block_hasher(BLOCK, function))
    return list(made.block_hashes)


def names(model: Path) -> dict[str, dict[str, Any]]:
    """Fingerprint and keys of this process, by hash algorithm."""
    found = {}
    for algorithm in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
        try:
            keys = make_offload_keys(block_hashes(algorithm), 0)
        except ModuleNotFoundError:
            continue  # vLLM does not bring the library of every algorithm
        config = vllm_config(model, prefix_caching_hash_algo=algorithm)
        found[algorithm] = {"fingerprint": fingerprint(config).digest, "keys": [key.hex() for key in keys]}
    return found


if __name__ == "__main__":
    print(json.dumps(names(Path(sys.argv[1]))))
