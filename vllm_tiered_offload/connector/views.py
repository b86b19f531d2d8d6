"""vLLM's objects as the scheduler and worker rooms want to see them. Version differences end here."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    SinkFullAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request, RequestStatus

from vllm_tiered_offload.scheduler.views import BlockTables, GroupShape, ResolveBlockTables, StepView

# Statuses of a request whose last token was sampled and never computed.
_STOPPED = frozenset({RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED})


def was_aborted(request: Request) -> bool:
    """Whether the request ended by any other way than sampling its last token."""
    return request.status not in _STOPPED


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


def why_not_offloadable(kv_cache_config: KVCacheConfig) -> str | None:
    """Why this model's cache is served without offloading, or None."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups and only models with one are offloaded so far"
    spec = groups[0].kv_cache_spec
    specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    for one in specs:
        if not isinstance(one, FullAttentionSpec) or isinstance(one, SinkFullAttentionSpec):
            return f"its KV cache is of type {type(one).__name__} and only full attention is offloaded so far"
        if not one.prefix_cacheable or not groups[0].enable_kv_transfer:
            return "its KV cache group takes no part in prefix caching"
    return None


def group_shape(vllm_config: Any, kv_cache_config: KVCacheConfig, blocks_per_chunk: int) -> GroupShape:
    """Token granularity of the offloaded KV group (the only one)."""
    block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or vllm_config.cache_config.block_size
    return GroupShape(block_tokens, block_tokens * blocks_per_chunk, hash_tokens)
