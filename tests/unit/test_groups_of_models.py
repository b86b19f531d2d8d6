"""Which KV cache configurations are offloaded, and why another one is not (case 51): said at start, never later."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_tiered_offload.connector.views import (
    SESSIONS_KEEP_TRUE_HASHES,
    group_shapes,
    has_true_hashes,
    kv_replicas,
    offloaded_groups,
    why_not_offloadable,
)
from vllm_tiered_offload.scheduler.views import GroupShape
from vllm_tiered_offload.testing.simulator.builders import REPLICAS_ARE_TOLD

PAGE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}


def engine(prefix_caching: bool = True, speculation: Any = None) -> Any:
    cache = SimpleNamespace(enable_prefix_caching=prefix_caching)
    return SimpleNamespace(cache_config=cache, speculative_config=speculation)


def full(block: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, **PAGE)


def sliding(block: int = 16, **fields: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, sliding_window=64, **fields, **PAGE)


def ring() -> CircularBufferSpec:
    return CircularBufferSpec(block_size=4, **PAGE)


def mamba(mode: str = "align", **fields: Any) -> MambaSpec:
    return MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode=mode, **fields)


def latent(shards: int | None = 1) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=16, **({"max_tp_shards": shards} if REPLICAS_ARE_TOLD else {}), **PAGE)


def draft(spec: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(["l"], spec, is_eagle_group=True)


def speculation(method: str, modules: int = 1, drop: bool = True) -> Any:
    """The questions to vLLM's SpeculativeConfig that matter here, answered as 0.32 does."""
    uses = method in ("eagle", "mtp", "dflash")
    return SimpleNamespace(
        use_eagle=lambda: uses,
        use_eagle_block_drop=lambda: uses and drop,
        use_multi_module_mtp=lambda: method == "mtp" and modules > 1,
    )


def config(*groups: Any) -> KVCacheConfig:
    specs = [group if isinstance(group, KVCacheGroupSpec) else KVCacheGroupSpec(["l"], group) for group in groups]
    made = KVCacheConfig(8, [], specs)
    made.hash_block_size = 16  # no parameter before 0.32
    return made


SERVED: dict[str, tuple[Callable[[], KVCacheConfig], list[GroupShape]]] = {
    "one group": (lambda: config(full()), [GroupShape(16, 32, 16)]),
    "mla": (lambda: config(MLAAttentionSpec(block_size=16, **PAGE)), [GroupShape(16, 32, 16)]),
    "pages of two sizes": (
        lambda: config(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full(), "b": full()})),
        [GroupShape(16, 32, 16)],
    ),
    "gemma 3": (
        lambda: config(sliding(), sliding(), full()),
        [
            GroupShape(16, 32, 16, 0, window=64),
            GroupShape(16, 32, 16, 1, window=64),
            GroupShape(16, 32, 16, 2),
        ],
    ),
    "blocks of 16 and 32": (
        lambda: config(full(), sliding(32)),
        [GroupShape(16, 32, 16, 0), GroupShape(32, 64, 16, 1, window=64)],
    ),
    "llama 4": (
        lambda: config(full(), ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=128, **PAGE)),
        [GroupShape(16, 32, 16, 0), GroupShape(16, 32, 16, 1, local_span=128)],
    ),
    "a window and tokens kept beyond it": (
        lambda: config(sliding(extra_retained_tokens=3)),
        [GroupShape(16, 32, 16, 0, window=67)],
    ),
    "recurrent": (lambda: config(mamba()), [GroupShape(16, 32, 16, 0, recurrent=True)]),
    "hybrid": (
        lambda: config(mamba(), full()),
        [GroupShape(16, 32, 16, 0, recurrent=True), GroupShape(16, 32, 16, 1)],
    ),
    "draft model beside others": (
        lambda: config(full(), draft(full())),
        [GroupShape(16, 32, 16, 0), GroupShape(16, 32, 16, 1, reads_next_token=True)],
    ),
    "draft model in the only group": (
        lambda: config(draft(latent())),
        [GroupShape(16, 32, 16, 0, reads_next_token=True)],
    ),
    "draft model with a window": (
        lambda: config(full(), draft(sliding())),
        [GroupShape(16, 32, 16, 0), GroupShape(16, 32, 16, 1, window=64, reads_next_token=True)],
    ),
    "blocks of 16, and a ring of 4 that nobody caches": (
        lambda: config(ring(), full()),
        [GroupShape(16, 32, 16, 1)],
    ),
}


@pytest.mark.parametrize("case", SERVED)
def test_case_51_offloaded(case: str) -> None:
    make, wanted = SERVED[case]
    assert why_not_offloadable(engine(), make()) is None
    assert list(group_shapes(engine(), make(), 2)) == wanted


NOT_SERVED: dict[str, tuple[Callable[[], KVCacheConfig], str]] = {
    "no cache": (config, "no KV cache"),
    "a ring alone": (lambda: config(ring()), "no KV cache"),
    "recurrent without prefix caching": (
        lambda: config(mamba("none")),
        "^its recurrent state .*turn prefix caching on",
    ),
    "states of an older kind": (lambda: config(full(), mamba("all")), "group 1 of 2: .*leave mamba_cache_mode alone"),
    "recurrent, and drafts": (lambda: config(mamba(num_speculative_blocks=2), full()), "of 2: speculative decoding"),
    "replayed window": (
        lambda: config(full(), SlidingWindowMLASpec(block_size=16, sliding_window=64, bounded_replay=True, **PAGE)),
        "group 1 of 2: .*no part in prefix caching",
    ),
    "not transferred": (
        lambda: config(full(), KVCacheGroupSpec(["l"], full(), enable_kv_transfer=False)),
        "group 1 of 2: .*no part in prefix caching",
    ),
    "in host memory": (
        lambda: config(KVCacheGroupSpec(["l"], full(), role=KVCacheGroupRole.HISPARSE_SOURCE)),
        "host memory",
    ),
    "recurrent draft model": (
        lambda: config(full(), draft(mamba())),
        "group 1 of 2: .*draft model with recurrent layers",
    ),
}
if "bounded_replay" not in SlidingWindowMLASpec.__dataclass_fields__:  # before 0.32
    del NOT_SERVED["replayed window"]


@pytest.mark.parametrize("case", NOT_SERVED)
def test_case_51_served_without_offloading(case: str) -> None:
    make, reason = NOT_SERVED[case]
    said = why_not_offloadable(engine(), make())
    assert said is not None
    assert re.search(reason, said), said


def ahead(speculation: Any, *groups: Any) -> list[bool]:
    return [shape.reads_next_token for shape in group_shapes(engine(speculation=speculation), config(*groups), 1)]


@pytest.mark.parametrize(
    ("method", "drop", "wanted"),
    [("eagle", True, True), ("eagle", False, True), ("mtp", True, True), ("ngram", True, False)],
)
def test_draft_layers_are_in_all_groups_where_vllm_marks_none(method: str, drop: bool, wanted: bool) -> None:
    """Whether or not vLLM's own cache drops a block for them, which can be turned off. Fails when only marks count."""
    assert ahead(speculation(method, drop=drop), full(), sliding()) == [wanted, wanted]
    assert ahead(speculation(method, drop=drop), full(), draft(full())) == [False, True]


def test_drafts_of_the_targets_state_alone_read_no_token() -> None:
    """vLLM 0.33 says so of block diffusion."""
    newer = speculation("dflash")
    newer.needs_eagle_block_drop = lambda: False
    assert ahead(newer, full()) == [False]


def test_a_chain_of_draft_modules_is_refused() -> None:
    """The second module reads one token further than the first, which may have been a guess when it did."""
    chain = engine(speculation=speculation("mtp", modules=2))
    said = why_not_offloadable(chain, config(full(), draft(full())))
    assert said is not None
    assert "group 1 of 2: it belongs to a chain of MTP modules" in said


@pytest.mark.parametrize("session", [False, True])
def test_sessions_that_speculate_are_not_offloaded(session: bool) -> None:
    """More input takes the place of tokens that slots were already written for, and that draft layers have seen."""
    request: Any = SimpleNamespace(resumable=session)
    assert has_true_hashes(request, True) is (not session)
    assert has_true_hashes(request, False) is (SESSIONS_KEEP_TRUE_HASHES or not session)


def test_latent_attention_that_cannot_go_on_from_a_prefix() -> None:
    """vLLM's CPU backend without AMX turns prefix caching off for MLA: answers behind a loaded prefix were others."""
    latent = config(MLAAttentionSpec(block_size=16, **PAGE))
    said = why_not_offloadable(engine(prefix_caching=False), latent)
    assert said is not None
    assert "no prefix caching for MLA" in said
    assert why_not_offloadable(engine(), latent) is None
    assert why_not_offloadable(engine(prefix_caching=False), config(full())) is None


def test_what_is_not_loaded_is_not_said_to_be() -> None:
    """vLLM clears blocks that a load does not fill: what its default says we load is what we do load."""
    for make, _ in SERVED.values():
        assert tuple(offloaded_groups(make())) == make().prefix_cacheable_group_ids


@pytest.mark.skipif(not REPLICAS_ARE_TOLD, reason="vLLM 0.30 does not say which ranks hold the same")
@pytest.mark.parametrize(
    ("groups", "replicas"),
    [
        ((full(),), 1),
        ((latent(),), 4),
        ((latent(None),), 1),
        ((latent(2),), 2),
        ((latent(3),), 1),
        ((latent(), latent(2)), 2),
        ((latent(), full()), 1),
        ((latent(), mamba()), 1),
        ((latent(), mamba(tp_replicated=True)), 4),
        ((ring(), latent()), 4),
    ],
)
def test_ranks_that_hold_the_same(groups: tuple[Any, ...], replicas: int) -> None:
    """What vLLM says of each layer, of 4 ranks; layers that are split keep the ranks of all apart."""
    assert kv_replicas(config(*groups), 4) == replicas


def test_context_parallelism_is_refused() -> None:
    from vllm_tiered_offload.connector.startup import check_engine
    from vllm_tiered_offload.settings import SettingsError

    parallel = SimpleNamespace(
        local_world_size=2, world_size=2, decode_context_parallel_size=2, prefill_context_parallel_size=1
    )
    with pytest.raises(SettingsError, match="context parallelism"):
        check_engine(SimpleNamespace(parallel_config=parallel))
