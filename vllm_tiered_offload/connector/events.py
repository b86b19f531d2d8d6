"""KV events in vLLM's own types.

A chunk is announced as the device would announce its blocks: one hash for each device block of it, the hash of the
block before it, all its tokens, and the extra keys of each block; its removal names the same hashes. That is also the
shape of the in-tree connector's self-describing events.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from vllm_tiered_offload.connector.views import to_event_extra_keys
from vllm_tiered_offload.hierarchy.manager import TieringOffloadingManager
from vllm_tiered_offload.scheduler.views import GroupShape
from vllm_tiered_offload.telemetry.events import Announcement, ChunkPayload, EventLedger

# Tiers' media in vLLM's vocabulary; a medium that it has no word for keeps its own.
_MEDIA = {"cpu": MEDIUM_CPU, "fs": MEDIUM_STORAGE, "disk": MEDIUM_STORAGE}


def events_enabled(vllm_config: Any) -> bool:
    """Whether somebody takes KV events (--kv-events-config)."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


def event_ledger(manager: TieringOffloadingManager, shapes: Sequence[GroupShape]) -> EventLedger:
    """The ledger of an engine whose tiers are those of `manager`."""
    media = Counter([manager.primary.medium, *(guard.tier.medium for guard in manager.guards)])
    return EventLedger(partial(describe_chunk, {shape.group_idx: shape for shape in shapes}), media)


def describe_chunk(shapes: Mapping[int, GroupShape], request: Any, group_idx: int, chunk: int) -> ChunkPayload:
    """The payload of chunk `chunk` of a KV group of a vLLM request."""
    shape = shapes[group_idx]
    start, end = chunk * shape.chunk_tokens, (chunk + 1) * shape.chunk_tokens
    block, hash_tokens = shape.block_tokens, shape.hash_tokens
    hashes, tokens = request.block_hashes, request.all_token_ids[start:end]
    if end // hash_tokens > len(hashes) or len(tokens) != end - start:
        raise ValueError(f"chunk {chunk} of request {request.request_id} is not there")
    extra_keys, mm_index = [], 0
    for first in range(start, end, block):
        keys, mm_index = generate_block_hash_extra_keys(request, first, first + block, mm_index)
        extra_keys.append(keys)
    lora = request.lora_request
    return ChunkPayload(
        block_hashes=tuple(hashes[last // hash_tokens - 1] for last in range(start + block, end + 1, block)),
        parent_hash=hashes[start // hash_tokens - 1] if start else None,
        token_ids=array("i", tokens),
        block_tokens=block,
        group_idx=group_idx,
        lora_id=lora.adapter_id if lora else None,
        lora_name=lora.name if lora else None,
        extra_keys=tuple(to_event_extra_keys(extra_keys) or ()),
        session_id=request.session_id,
    )


class EventWriter:
    """Announcements as vLLM's events."""

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._kinds = [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]

    def write(self, announcements: Iterable[Announcement]) -> list[KVCacheEvent]:
        events: list[KVCacheEvent] = []
        for announcement in announcements:
            medium = _MEDIA.get(announcement.medium, announcement.medium)
            if announcement.stored:
                events += [self._stored(payload, medium) for payload in announcement.payloads]
            else:
                events += self._removed(announcement.payloads, medium)
        return events

    def _stored(self, payload: ChunkPayload, medium: str) -> BlockStored:
        kind, sliding_window = self._kinds[payload.group_idx]
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in payload.block_hashes],
            parent_block_hash=None if payload.parent_hash is None else maybe_convert_block_hash(payload.parent_hash),
            token_ids=payload.token_ids.tolist(),
            block_size=payload.block_tokens,
            lora_id=payload.lora_id,
            medium=medium,
            lora_name=payload.lora_name,
            extra_keys=list(payload.extra_keys) if payload.extra_keys else None,
            group_idx=payload.group_idx,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=sliding_window,
            session_id=payload.session_id,
        )

    def _removed(self, payloads: Iterable[ChunkPayload], medium: str) -> list[BlockRemoved]:
        by_group: dict[int, list[Any]] = {}
        for payload in payloads:
            hashes = by_group.setdefault(payload.group_idx, [])
            hashes += [maybe_convert_block_hash(block_hash) for block_hash in payload.block_hashes]
        return [BlockRemoved(hashes, medium, group_idx=group) for group, hashes in by_group.items()]
