"""vLLM's objects as the scheduler and worker rooms want to see them. Version differences end here."""

from collections.abc import Iterable
from enum import Enum
from math import gcd
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request, RequestStatus

from vllm_tiered_offload.scheduler.views import BlockTables, GroupShape, ResolveBlockTables, StepView

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as CacheHitSource
except ImportError:  # before 0.32 vLLM has no names for sources of hits, and never asks for them

    class CacheHitSource(Enum):  # type: ignore[no-redef]
        """The names that this package uses."""

        HOST = "host"
        DISK = "disk"
        P2P = "p2p"
        EXTERNAL_UNSPECIFIED = "external_unspecified"


try:
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys as to_event_extra_keys
except ImportError:  # in 0.30 the extra keys of block hashes have no tags that events leave out

    def to_event_extra_keys(extra_keys: Iterable[Any]) -> list[Any]:
        """Extra keys of blocks as events publish them."""
        return list(extra_keys)


# Kinds of layers whose blocks stay where they are in a request's table; derived kinds that behave otherwise.
_OFFLOADED = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
_NOT_OFFLOADED = (SinkFullAttentionSpec, RSWASpec)

# Before 0.32 a session that gets more input drops its last token and keeps the hash of the block which that token
# completed: from there on its hashes are those of another content.
SESSIONS_KEEP_TRUE_HASHES = hasattr(KVCacheConfig, "hash_block_size")

# Statuses of a request whose last token was sampled and never computed.
_STOPPED = frozenset({RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED})


def was_aborted(request: Request) -> bool:
    """Whether the request ended by any other way than sampling its last token."""
    return request.status not in _STOPPED


def has_true_hashes(request: Request, speculates: bool) -> bool:
    """Whether the request's block hashes will always be those of what its blocks hold (D5).

    A session that gets more input replaces its last token, which was never computed; but what a draft model's layers
    keep for the token before depends on it, and is not written again. And where an answer ended in the middle of
    accepted guesses, vLLM 0.32 counts those behind the end as computed: new tokens get their slots.
    """
    return not request.resumable or (SESSIONS_KEEP_TRUE_HASHES and not speculates)


def step_view(output: SchedulerOutput) -> StepView:
    """The parts of a scheduler output that the scheduler half reads."""
    return StepView(output.num_scheduled_tokens, output.preempted_req_ids or (), output.finished_req_ids)


def block_tables_of(kv_cache_manager: Any) -> ResolveBlockTables:
    """A function from request id to its live block tables (vLLM's own lists, not copies)."""

    managers = kv_cache_manager.coordinator.single_type_managers
    live = managers[0].req_to_blocks if len(managers) == 1 else None

    def resolve(req_id: str) -> BlockTables:
        if live is not None:
            return (live.get(req_id, ()),)
        tables: BlockTables = kv_cache_manager.get_blocks(req_id).blocks
        return tables

    return resolve


def offloaded_groups(kv_cache_config: KVCacheConfig) -> dict[int, KVCacheGroupSpec]:
    """The KV groups that a prefix hit consists of, by index. A ring of scratch memory is rebuilt by its request."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return {index: group for index, group in groups if not isinstance(group.kv_cache_spec, CircularBufferSpec)}


def why_not_offloadable(vllm_config: Any, kv_cache_config: KVCacheConfig) -> str | None:
    """Why this model's cache is served without offloading, or None. A hit needs every group, so one is enough."""
    groups = offloaded_groups(kv_cache_config)
    if not groups:
        return "the model has no KV cache"
    drafts = draft_groups(vllm_config, kv_cache_config)
    for index, group in groups.items():
        reason = _why_not(group) or (_why_no_drafts(vllm_config, group) if index in drafts else None)
        if reason is not None:
            return reason if len(groups) == 1 else f"KV cache group {index} of {len(groups)}: {reason}"
    if (
        current_platform.is_cpu()
        and not vllm_config.cache_config.enable_prefix_caching
        and _any_latent(groups.values())
    ):
        # Its reference kernels give other answers behind a prefix than for the whole prompt (0.32, float32).
        return (
            "vLLM's CPU backend has no prefix caching for MLA here, and without it its attention cannot go on from a "
            "prefix: a CPU with AMX has it, and VLLM_MLA_DISABLE=1 keeps keys and values per head, which are offloaded"
        )
    return None


def _any_latent(groups: Iterable[KVCacheGroupSpec]) -> bool:
    return any(isinstance(spec, MLAAttentionSpec) for group in groups for spec in _specs_of(group))


def draft_groups(vllm_config: Any, kv_cache_config: KVCacheConfig) -> set[int]:
    """The KV groups with layers of a draft model whose slots depend on the next token (EAGLE, MTP), by index.

    All of them where vLLM does not say which: what its own prefix cache does then.
    """
    groups = kv_cache_config.kv_cache_groups
    marked = {index for index, group in enumerate(groups) if group.is_eagle_group}
    speculation = vllm_config.speculative_config
    if marked or speculation is None:
        return marked
    # Whether or not vLLM drops a block for it, which can be turned off. Before 0.33 block-diffusion drafts count too.
    reads_ahead = getattr(speculation, "needs_eagle_block_drop", speculation.use_eagle)
    return set(range(len(groups))) if reads_ahead() else set()


def _why_no_drafts(vllm_config: Any, group: KVCacheGroupSpec) -> str | None:
    if any(isinstance(spec, MambaSpec) for spec in _specs_of(group)):
        return "it belongs to a draft model with recurrent layers, and a state cannot say which token came next"
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.use_multi_module_mtp():
        return "it belongs to a chain of MTP modules, the later of which keep what depends on tokens that were guesses"
    return None


def _why_not(group: KVCacheGroupSpec) -> str | None:
    for one in _specs_of(group):
        if not isinstance(one, _OFFLOADED) or isinstance(one, _NOT_OFFLOADED):
            return f"its KV cache is of type {type(one).__name__}, which is not offloaded so far"
        if not one.prefix_cacheable or not group.enable_kv_transfer:
            return "its KV cache group takes no part in prefix caching"
        if isinstance(one, MambaSpec) and (reason := _why_no_states(one)) is not None:
            return reason
    if group.role is not KVCacheGroupRole.DEFAULT or group.host_resident:
        return "its KV cache lies in host memory in part"
    return None


def _why_no_states(spec: MambaSpec) -> str | None:
    """Why no block of these recurrent layers is known to hold the state at its end when a store would read it."""
    if spec.mamba_cache_mode != "align":
        return (
            f"its recurrent state is kept with mamba_cache_mode {spec.mamba_cache_mode!r}, and only 'align' keeps what"
            " a prompt can go on from: turn prefix caching on and leave mamba_cache_mode alone"
        )
    if spec.num_speculative_blocks:
        return "speculative decoding moves its recurrent state after the step in which it would be stored"
    return None


def _specs_of(group: KVCacheGroupSpec) -> list[Any]:
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def group_shapes(vllm_config: Any, kv_cache_config: KVCacheConfig, blocks_per_chunk: int) -> tuple[GroupShape, ...]:
    """Token granularity and reach of the offloaded KV groups."""
    hash_tokens = _hash_tokens(vllm_config, kv_cache_config)
    drafts = draft_groups(vllm_config, kv_cache_config)
    return tuple(
        GroupShape(
            block_tokens=group.kv_cache_spec.block_size,
            chunk_tokens=group.kv_cache_spec.block_size * blocks_per_chunk,
            hash_tokens=hash_tokens,
            group_idx=index,
            reads_next_token=index in drafts,
            **_reach(_specs_of(group)[0]),
        )
        for index, group in offloaded_groups(kv_cache_config).items()
    )


def _hash_tokens(vllm_config: Any, kv_cache_config: KVCacheConfig) -> int:
    """Tokens of one block hash. Before 0.32 the configuration does not say it; each part of vLLM works it out."""
    told: int | None = getattr(kv_cache_config, "hash_block_size", None)
    return told or resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]


def _reach(spec: Any) -> dict[str, Any]:
    """How far back this kind of layer reads; blocks that vLLM keeps beyond the window count as read."""
    if isinstance(spec, SlidingWindowSpec):
        return {"window": spec.sliding_window + spec.extra_retained_tokens}
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return {"local_span": spec.attention_chunk_size}
    if isinstance(spec, MambaSpec):
        return {"recurrent": True}
    return {}


def kv_replicas(kv_cache_config: KVCacheConfig, tp_size: int) -> int:
    """How many tensor-parallel ranks in a row hold the very same KV, as vLLM says of each layer (with MLA all)."""
    specs = [spec for group in offloaded_groups(kv_cache_config).values() for spec in _specs_of(group)]
    return gcd(*(_replicas(spec, tp_size) for spec in specs))


def _replicas(spec: Any, tp_size: int) -> int:
    shards = 1 if getattr(spec, "tp_replicated", False) else getattr(spec, "max_tp_shards", None) or tp_size
    return 1 if tp_size % shards else tp_size // shards
