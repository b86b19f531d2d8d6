"""Every mistake is one clear line at start. Most are tried on the connector alone; one on a real `vllm serve`."""

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .engine import CONNECTOR, Engine
from .workload import SMALL_DEVICE_CACHE

GOOD: dict[str, Any] = {"cpu": {"capacity": "256MiB"}}

MISTAKES = {
    "no capacity": ({}, ["cpu", "capacity"]),
    "unknown key": ({**GOOD, "blocks_per_chnk": 2}, ["blocks_per_chnk", "blocks_per_chunk"]),
    "misspelled capacity": ({"cpu": {"capacty": "1GiB"}}, ["capacity", "capacty"]),
    "unknown key of the tier": ({"cpu": {"capacity": "1GiB", "eviction_polcy": "lru"}}, ["eviction_policy"]),
    "not a size": ({"cpu": {"capacity": "a lot"}}, ["cpu.capacity", "8GiB"]),
    "smaller than a row": ({"cpu": {"capacity": 100}}, ["cpu.capacity"]),
    "larger than this machine": ({"cpu": {"capacity": "900TiB"}}, ["cpu.capacity"]),
    "no such policy": ({"cpu": {"capacity": "256MiB", "eviction_policy": "lruu"}}, ["eviction_policy", "lru"]),
    "no such tier": ({**GOOD, "tiers": [{"type": "tape"}]}, ["tape"]),
    "chunk of no blocks": ({**GOOD, "blocks_per_chunk": 0}, ["blocks_per_chunk"]),
}


@pytest.fixture(scope="module")
def vllm_config(tiny_model: Path) -> Any:
    """What `vllm serve` makes of its command line, with a connector whose settings are right."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(**{**CONNECTOR, "kv_connector_extra_config": GOOD})
    args = EngineArgs(
        model=str(tiny_model), block_size=32, max_model_len=2048, enforce_eager=True, kv_transfer_config=transfer
    )
    return args.create_engine_config()


class OneRank:
    """The rank group of an engine with one worker, without vLLM's distributed start."""

    rank = 0
    size = 1

    def all_gather(self, obj: Any) -> list[Any]:
        return [obj]


def start_both_halves(vllm_config: Any, extra_config: dict[str, Any]) -> None:
    """What an engine does with the connector while it starts: the worker's half first, as vLLM does."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from vllm_tiered_offload.connector.ranks import use_rank_group

    config = copy.copy(vllm_config)
    config.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    config.kv_transfer_config.kv_connector_extra_config = extra_config
    with ExitStack() as stack, use_rank_group(OneRank()):
        for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
            half = KVConnectorFactory.create_connector(config, role, kv_cache_config())
            stack.callback(half.shutdown)
            if role is KVConnectorRole.WORKER:
                half.register_kv_caches({"layer": torch.zeros(64, 2, 32, 128, dtype=torch.bfloat16)})


def kv_cache_config() -> Any:
    """64 blocks of one attention layer, as EngineCore would hand it over."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    tensor = KVCacheTensor(size=64 * page, layers=["layer"], layer_stride=64 * page, block_stride=page)
    return KVCacheConfig(
        num_blocks=64,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line(vllm_config: Any, mistake: str) -> None:
    extra_config, words = MISTAKES[mistake]
    with pytest.raises(ValueError, match=r"\S") as refused:
        start_both_halves(vllm_config, extra_config)
    text = str(refused.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_right_settings_are_taken(vllm_config: Any) -> None:
    """Guards the test above: it is the mistakes that are refused, not the way they are tried."""
    start_both_halves(vllm_config, GOOD)


def test_engine_refuses_to_start(tiny_model: Path, logs: Path) -> None:
    """One line of the log tells what is wrong; what the frontend then says about it is vLLM's."""
    wrong = {**CONNECTOR, "kv_connector_extra_config": {**GOOD, "blocks_per_chnk": 2}}
    engine = Engine(tiny_model, logs / "refused.log", *SMALL_DEVICE_CACHE, connector=wrong)
    with pytest.raises(RuntimeError, match="stopped while starting"), engine:
        pass
    telling = [line for line in engine.log_text().splitlines() if 'did you mean "blocks_per_chunk"?' in line]
    assert telling, engine.log_tail()
    assert all("blocks_per_chnk" in line for line in telling)
    assert engine.wait_empty(30)
    assert engine.leftovers() == []
