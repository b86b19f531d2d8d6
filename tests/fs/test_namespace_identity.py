"""From vLLM's configuration to a directory: what decides the bytes makes a miss, what does not still hits (D5).

The configuration objects, the block hashes and the requests are vLLM's own.
"""

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from fs_kit import HIT, MISS, Bench, content, keys_of
from fs_kit import fingerprint as plain_fingerprint

from vllm_tiered_offload.contract.fingerprint import FIELDS, Fingerprint
from vllm_tiered_offload.contract.keys import make_offload_keys

pytest.importorskip("vllm")
import vllm_process

KEYS = keys_of("a", 2)
ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}

# How the engine is started -> the field that tells.
BYTES = {
    "tensor parallel": ({"tensor_parallel_size": 2}, "tensor_parallel"),
    "pipeline parallel": ({"pipeline_parallel_size": 2}, "pipeline_parallel"),
    "model type": ({"dtype": "float16"}, "model_dtype"),
    "KV type fp8": ({"kv_cache_dtype": "fp8_e4m3"}, "kv_dtype"),
    "block size": ({"block_size": 64}, "block_tokens"),
    "RoPE factor": ({"hf_overrides": ROPE}, "hf_config"),
    "revision": ({"revision": "B"}, "revision"),
    "quantization": ({"quantization": "fp8"}, "quantization"),
    "hash algorithm": ({"prefix_caching_hash_algo": "sha256_cbor"}, "hash_algorithm"),
    "dummy weights": ({"load_format": "dummy"}, "weights"),
}
IRRELEVANT: dict[str, dict[str, Any]] = {
    "executor": {"distributed_executor_backend": "mp"},
    "data parallel": {"data_parallel_size": 2},
    "seed": {"seed": 3},
    "batch": {"max_num_seqs": 5, "max_num_batched_tokens": 4096},
    "context length": {"max_model_len": 1024},
    "KV type by its name": {"kv_cache_dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_process.make_model(tmp_path_factory.mktemp("model"))


def of(model: Path, **arguments: Any) -> Fingerprint:
    return vllm_process.fingerprint(vllm_process.vllm_config(model, **arguments))


def differing(one: Fingerprint, other: Fingerprint) -> set[str]:
    return {difference.name for difference in one.diff(other)}


def stores(root: Path, fingerprint: Fingerprint) -> None:
    assert Bench(root, model=fingerprint).store(KEYS).success


def finds(root: Path, fingerprint: Fingerprint) -> bool:
    answers = Bench(root, model=fingerprint, engine_id="another").lookup(KEYS)
    assert answers in ([HIT] * 2, [MISS] * 2)
    return answers == [HIT] * 2


@pytest.mark.parametrize("change", BYTES)
def test_case_43_44_what_decides_the_bytes_is_a_miss(tmp_path: Path, model: Path, change: str) -> None:
    arguments, field = BYTES[change]
    here, there = of(model), of(model, **arguments)
    assert field in differing(here, there)
    stores(tmp_path, here)
    assert not finds(tmp_path, there)
    assert finds(tmp_path, of(model)), "a restart hits"


@pytest.mark.parametrize("change", IRRELEVANT)
def test_case_43_what_does_not_is_a_hit(tmp_path: Path, model: Path, change: str) -> None:
    here, there = of(model), of(model, **IRRELEVANT[change])
    assert differing(here, there) == set()
    stores(tmp_path, here)
    assert finds(tmp_path, there)


@pytest.mark.parametrize("field", FIELDS)
def test_case_43_44_every_field_has_a_directory_of_its_own(tmp_path: Path, field: str) -> None:
    """Mutation: leaving a field out of the digest."""
    stores(tmp_path, plain_fingerprint())
    assert not finds(tmp_path, plain_fingerprint(**{field: "changed"}))
    assert finds(tmp_path, plain_fingerprint())


def test_case_43_formats_of_one_tensor_type_stay_apart(model: Path) -> None:
    """Both fp8 formats, and more, are kept as torch.uint8. Mutation: taking the spec's type for the format."""
    formats = ["fp8_e4m3", "fp8_e5m2", "bfloat16"]
    fingerprints = [of(model, kv_cache_dtype=name) for name in formats]
    for one, other in combinations(fingerprints, 2):
        assert differing(one, other) == {"kv_dtype"}


def test_case_43_versions_of_vllm_stay_apart(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.31 hashes blocks of LoRA, images and salts otherwise than 0.30. Mutation: a hash scheme without the version."""
    here = of(model)
    monkeypatch.setattr("vllm.__version__", "0.30.0.other")
    assert differing(here, of(model)) == {"hash_scheme"}


def test_case_43_groups_layout_and_chunk(model: Path) -> None:
    config = vllm_process.vllm_config(model)
    here = vllm_process.fingerprint(config)
    for change, fields in [
        ({"layout": "HND"}, {"layout"}),
        ({"blocks_per_chunk": 2}, {"blocks_per_chunk"}),
        ({"groups": 2}, {"kv_groups", "kv_dtype", "block_tokens"}),
    ]:
        assert differing(here, vllm_process.fingerprint(config, **change)) == fields


def test_case_44_other_files_under_the_same_path(tmp_path: Path) -> None:
    """The weights are exchanged, and again for a file of the same size; the config says another RoPE factor."""
    model = vllm_process.make_model(tmp_path / "model")
    seen = [of(model)]
    weights = model / "model.safetensors"
    weights.write_bytes(b"other weights")
    seen.append(of(model))
    weights.write_bytes(b"newer weights")
    os.utime(weights, ns=(1, 1))
    seen.append(of(model))
    vllm_process.make_model(tmp_path / "model", **ROPE)
    os.utime(weights, ns=(1, 1))
    seen.append(of(model))
    assert len({fingerprint.digest for fingerprint in seen}) == 4


# Case 45: hash seeds


def start_process(model: Path, seed: str | None) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    command = [sys.executable, vllm_process.__file__, str(model)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=model
    )


def test_case_45_two_processes_share_exactly_when_their_hashes_agree(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process and two others; seeds unset, equal, different. Sharing a directory without sharing hashes would be
    dead weight; the other way round, hits are lost. Mutations: the seed left out of the fingerprint; a random one taken
    for unset."""
    processes = {seed: start_process(model, seed) for seed in (None, "7")}
    found = [(seed, json.loads(p.communicate(timeout=300)[0].splitlines()[-1])) for seed, p in processes.items()]
    for seed in (None, "7", "8"):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if seed is not None:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.append((seed, vllm_process.names(model)))
    assert {"sha256", "sha256_cbor"} <= found[0][1].keys()
    for algorithm in found[0][1]:
        for (mine, one), (theirs, other) in combinations(found, 2):
            same_keys = one[algorithm]["keys"] == other[algorithm]["keys"]
            same_directory = one[algorithm]["fingerprint"] == other[algorithm]["fingerprint"]
            random = algorithm.startswith("xxhash") and mine is None
            assert same_keys == (mine == theirs and not random), (algorithm, mine, theirs)
            assert same_directory == same_keys, (algorithm, mine, theirs)


def test_case_45_a_random_seed_is_a_directory_for_nobody_else(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without vLLM's optional hash library: the configuration alone decides."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    here = of(model, prefix_caching_hash_algo="xxhash")
    stores(tmp_path, here)
    assert not finds(tmp_path, of(model, prefix_caching_hash_algo="xxhash"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    stores(tmp_path, of(model, prefix_caching_hash_algo="xxhash"))
    assert finds(tmp_path, of(model, prefix_caching_hash_algo="xxhash"))


# Case 46: requests


def request_kinds() -> dict[str, dict[str, Any]]:
    """48 tokens, and everything beside the tokens that a request may bring."""
    import torch
    from vllm.lora.request import LoRARequest

    embeddings = torch.arange(3 * vllm_process.BLOCK * 8, dtype=torch.float32).reshape(3 * vllm_process.BLOCK, 8)
    changed = embeddings.clone()
    changed[0, 0] += 1
    return {
        "plain": {},
        "salt x": {"cache_salt": "x"},
        "salt y": {"cache_salt": "y"},
        "LoRA x": {"lora_request": LoRARequest("x", 1, "/adapters/x")},
        "LoRA y": {"lora_request": LoRARequest("y", 2, "/adapters/y")},
        "LoRA x from elsewhere": {"lora_request": LoRARequest("x", 1, "/adapters/x2")},
        "LoRA x salt x": {"lora_request": LoRARequest("x", 1, "/adapters/x"), "cache_salt": "x"},
        "embeddings": {"prompt_embeds": embeddings},
        "other embeddings": {"prompt_embeds": changed},
    }


@pytest.mark.parametrize("kind", request_kinds())
def test_case_46_a_request_hits_its_own_kind_and_no_other(tmp_path: Path, model: Path, kind: str) -> None:
    """Mutation: keys of tokens alone."""
    keys = {name: make_offload_keys(vllm_process.block_hashes("sha256", **r), 0) for name, r in request_kinds().items()}
    assert {len(some) for some in keys.values()} == {3}
    bench = Bench(tmp_path, model=of(model))
    bench.fill(keys[kind])
    bench.store(keys[kind])
    other = Bench(tmp_path, model=of(model))
    for name, some in keys.items():
        assert other.lookup(some) == [HIT if name == kind else MISS] * 3, name
        other.wipe()
        loaded = other.load(some).successful_keys
        assert loaded == (tuple(some) if name == kind else ())
    assert bytes(bench.rows[0]) == content(keys[kind][0], 4096)
