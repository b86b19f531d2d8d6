"""What a hit needs of each KV group: lookup, store mask and vLLM's own allocation agree."""

from collections.abc import Callable
from dataclasses import replace
from math import lcm
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_offload.contract.jobs import LookupResult
from vllm_tiered_offload.scheduler.groups import (
    first_loaded_block,
    longest_hit,
    needed_chunks,
    plan_chunk,
    plan_load_of_group,
    plan_stores,
    stored_chunks,
    stored_from,
    stride_of,
    why_wait,
    window_start,
)
from vllm_tiered_offload.scheduler.lookup_planner import ChunkRange
from vllm_tiered_offload.scheduler.request_state import ChunkKeys
from vllm_tiered_offload.scheduler.views import GroupShape

from .harness import Block, Request


def full(block: int = 4, per_chunk: int = 1, group: int = 0) -> GroupShape:
    return GroupShape(block, block * per_chunk, 4, group)


def sliding(window: int, block: int = 4, per_chunk: int = 1, group: int = 1) -> GroupShape:
    return GroupShape(block, block * per_chunk, 4, group, window=window)


def local(span: int, block: int = 4, per_chunk: int = 1, group: int = 2) -> GroupShape:
    return GroupShape(block, block * per_chunk, 4, group, local_span=span)


def recurrent(block: int = 4, per_chunk: int = 1, group: int = 3) -> GroupShape:
    return GroupShape(block, block * per_chunk, 4, group, recurrent=True)


KINDS = [
    sliding,
    local,
    lambda _reach, block, per_chunk: full(block, per_chunk),
    lambda _reach, block, per_chunk: recurrent(block, per_chunk),
]
ANY_SHAPE = st.builds(
    lambda kind, reach, block, per_chunk: kind(reach, block, per_chunk),
    st.sampled_from(KINDS),
    st.integers(1, 40),
    st.sampled_from([4, 8, 12]),
    st.integers(1, 4),
)


def vllm_manager(shape: GroupShape) -> Any:
    """vLLM's manager of such a group: what it gives up is what no later token reads."""
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import (
        ChunkedLocalAttentionManager,
        FullAttentionManager,
        MambaManager,
        SlidingWindowManager,
    )
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

    common: dict[str, Any] = {
        "block_size": shape.block_tokens,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.bfloat16,
    }
    pool = BlockPool(8, enable_caching=True, hash_block_size=4)
    kinds: dict[str, Callable[[], tuple[Any, Any]]] = {
        "window": lambda: (SlidingWindowManager, SlidingWindowSpec(sliding_window=shape.window or 0, **common)),
        "span": lambda: (
            ChunkedLocalAttentionManager,
            ChunkedLocalAttentionSpec(attention_chunk_size=shape.local_span or 0, **common),
        ),
        "state": lambda: (
            MambaManager,
            MambaSpec(shapes=((8,),), dtypes=(torch.float32,), block_size=shape.block_tokens),
        ),
        "full": lambda: (FullAttentionManager, FullAttentionSpec(**common)),
    }
    kind, spec = kinds[
        "window" if shape.window else "span" if shape.local_span else "state" if shape.recurrent else "full"
    ]()
    return kind(
        kv_cache_spec=spec,
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=shape.block_tokens,
    )


@pytest.mark.parametrize(
    "shape", [full(), sliding(32, 16), sliding(5), sliding(9, 8), local(8), local(12, 8), recurrent()]
)
def test_case_33_reach_is_that_of_vllm_at_every_token_count(shape: GroupShape) -> None:
    """One token less or more in `first_needed` fails it."""
    manager = vllm_manager(shape)
    for position in range(200):
        assert shape.first_needed(position) == max(0, manager.get_num_skipped_tokens(position))


def test_case_33_tokens_kept_beyond_the_window_count() -> None:
    """Block 16, window 32, 3 extra retained tokens, a hit of 64 tokens: vLLM keeps blocks 1 to 3 of it.

    Fails when the extra tokens are left out of the window: block 1 then would not be loaded.
    """
    import torch
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    from vllm_tiered_offload.connector.views import group_shapes

    spec = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=32, extra_retained_tokens=3
    )
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], spec)])
    config.hash_block_size = 16  # no parameter before 0.32
    (shape,) = group_shapes(SimpleNamespace(speculative_config=None), config, 1)
    skipped = SlidingWindowManager.get_num_skipped_tokens
    for position in range(200):
        wanted = skipped(type("M", (), {"sliding_window": 32, "extra_retained_tokens": 3})(), position)
        assert shape.first_needed(position) == wanted
    assert first_loaded_block(shape, 0, 64) == 30 // 16
    assert [chunk for number in range(4) for _, chunk in stored_chunks([shape], number, 16)] == [0, 1, 2, 3]


@settings(max_examples=300, deadline=None)
@given(st.lists(ANY_SHAPE, min_size=1, max_size=3), st.integers(0, 6), st.integers(1, 6))
def test_case_32_what_the_store_policy_writes_is_all_that_any_hit_reads(
    shapes: list[GroupShape], local_strides: int, more: int
) -> None:
    """Every block that a hit loads was stored, and every chunk that is stored is of use to the hit at its stride's end.

    Fails when `stored_from` looks one block too far, or when a chunk is left out of the mask that the window touches.
    """
    stride = stride_of(shapes).chunk_tokens
    begin, end = local_strides * stride, (local_strides + more) * stride
    for shape in shapes:
        per_chunk = shape.blocks_per_chunk
        stored = {chunk for number in range(end // stride) for one, chunk in stored_chunks([shape], number, stride)}
        chunks = needed_chunks(shape, begin, end)
        loaded = range(first_loaded_block(shape, begin, end), end // shape.block_tokens)
        assert {block // per_chunk for block in loaded} == set(range(chunks.first, chunks.end))
        for block in loaded:
            assert block // per_chunk in stored
            assert block % per_chunk >= stored_from(shape, block // per_chunk, stride)
        for chunk in stored:
            hit = -(-(chunk + 1) * shape.chunk_tokens // stride) * stride
            first = chunk * per_chunk + stored_from(shape, chunk, stride)
            assert first == max(first_loaded_block(shape, 0, hit), chunk * per_chunk)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_longest_hit_is_the_one_that_trying_every_end_finds(data: st.DataObject) -> None:
    """Against the definition, for any pattern of missing chunks."""
    shapes = data.draw(st.lists(ANY_SHAPE, min_size=1, max_size=3))
    stride = lcm(*(shape.chunk_tokens for shape in shapes))
    begin = data.draw(st.integers(0, 2)) * stride
    limit = begin + data.draw(st.integers(0, 5)) * stride + data.draw(st.integers(0, stride - 1))
    missing = [data.draw(st.sets(st.integers(0, limit // shape.chunk_tokens + 1), max_size=4)) for shape in shapes]
    gone = {id(shape): chunks for shape, chunks in zip(shapes, missing, strict=True)}

    def find(shape: GroupShape, chunks: ChunkRange) -> int:
        present = [chunk not in gone[id(shape)] for chunk in range(chunks.first, chunks.end)]
        return present.index(False) if False in present else len(present)

    def is_hit(end: int) -> bool:
        ranges = [(shape, needed_chunks(shape, begin, end)) for shape in shapes]
        return all(chunks.empty or find(shape, chunks) == chunks.end - chunks.first for shape, chunks in ranges)

    ends = [end for end in range(begin + stride, limit + 1, stride) if is_hit(end)]
    found = longest_hit(shapes, stride, begin, limit, find)
    assert (found if found > begin else None) == (ends[-1] if ends else None)


def test_a_chunk_whose_window_vllm_gave_up_is_not_stored() -> None:
    """Case 17: the window moved on while its store was refused. A placeholder is never stored."""
    null, blocks = Block(0, is_null=True), [Block(index) for index in range(1, 5)]
    shape = sliding(5, per_chunk=2)
    whole = plan_chunk(shape, 1, 8, [null, null, *blocks])
    assert whole is not None
    assert (whole.first_sub_block, [block.block_id for block in whole.blocks]) == (1, [2])
    assert plan_chunk(shape, 0, 8, [null, null, *blocks]) is None
    assert plan_chunk(shape, 0, 8, [null, *blocks]) is not None  # its first block is out of every hit's reach
    assert plan_chunk(shape, 3, 8, [null, null, *blocks]) is None  # not there yet
    assert plan_chunk(full(per_chunk=2), 0, 8, [null, *blocks]) is None


@pytest.mark.parametrize("hashed_tokens", [None, 8, 12, 15, 32])
def test_a_state_at_another_place_is_not_stored(hashed_tokens: int | None) -> None:
    """Chunk 1 ends at token 16. vLLM has a block there that holds no state, or one from before or behind its end, where
    a kernel exports states inside a step, or hits end inside blocks.

    Fails when a block that is there counts as holding the state at its end.
    """
    null = Block(0, is_null=True)
    shape, table = recurrent(per_chunk=2), [null, null, null, Block(7, block_hash_num_tokens=hashed_tokens)]
    assert plan_chunk(shape, 1, 8, table) is None
    table[3].block_hash_num_tokens = 16
    kept = plan_chunk(shape, 1, 8, table)
    assert kept is not None
    assert (kept.first_sub_block, [block.block_id for block in kept.blocks]) == (1, [7])
    assert plan_chunk(shape, 0, 8, table) is None


@pytest.mark.parametrize("local_tokens", [0, 8, 9, 16, 40])
def test_drafts_of_a_device_hit_are_not_stored(local_tokens: int) -> None:
    """Chunk 1 has tokens 8 to 15, of which a window of 5 leaves block 3: what is stored of it has to be its own.

    Fails when the chunk's start counts instead of the first block that is stored, and when other groups are left out.
    """
    table = [Block(index) for index in range(1, 5)]
    whole, tail = (
        replace(full(per_chunk=2), reads_next_token=True),
        replace(sliding(5, per_chunk=2), reads_next_token=True),
    )
    assert (plan_chunk(whole, 1, 8, table, local_tokens) is not None) == (local_tokens <= 8)
    assert (plan_chunk(tail, 1, 8, table, local_tokens) is not None) == (local_tokens <= 12)
    assert plan_chunk(full(per_chunk=2), 1, 8, table, local_tokens) is not None


def test_the_key_of_a_draft_chunk_covers_the_next_token() -> None:
    """Prompts that are equal up to the end of a chunk and differ right behind it share it with plain layers, not with
    those that read the next token. A chunk of these has no key before the hash that follows it is there.

    Fails when the key is made of the hash at the chunk's end.
    """
    plain, drafts = full(per_chunk=2), replace(full(per_chunk=2), reads_next_token=True)
    one, other = (Request("r", [*range(16), *rest], 24) for rest in ([7] * 5, [8] * 5))
    assert ChunkKeys(one, 0, plain).upto(2) == ChunkKeys(other, 0, plain).upto(2)
    mine, theirs = ChunkKeys(one, 0, drafts), ChunkKeys(other, 0, drafts)
    assert [a == b for a, b in zip(mine.upto(9), theirs.upto(9), strict=True)] == [True, False]
    assert mine.anew(0, 9) == mine.slice(0, 9)
    for known, keys in ((20, 2), (19, 1), (12, 1), (11, 0), (0, 0)):
        assert len(ChunkKeys(Request("r", list(range(known)), known), 0, drafts).upto(9)) == keys


def test_a_session_forgets_the_keys_behind_its_fork() -> None:
    """The first token behind chunk 1 is another one now: its key is, too, and that of chunk 0 stands."""
    request = Request("r", list(range(24)), 24)
    keys = ChunkKeys(request, 0, replace(full(per_chunk=2), reads_next_token=True))
    before = list(keys.upto(2))
    del request.tokens[16:], request.block_hashes[4:]
    assert keys.upto(2) == before[:1]
    request.tokens += [1, 2, 3, 4]
    request.hash_blocks()
    assert len(keys.upto(2)) == 2
    assert (keys.upto(2)[0], keys.upto(2)[1] != before[1]) == (before[0], True)


def test_one_group_of_drafts_makes_all_wait_for_the_next_hash() -> None:
    assert stride_of([full(), sliding(5, per_chunk=3)]).tokens_ahead == 0
    assert stride_of([full(), replace(sliding(5, per_chunk=3), reads_next_token=True)]) == GroupShape(
        12, 12, 4, reads_next_token=True
    )


def test_chunks_of_a_group_share_a_transfer_unless_their_front_is_left_out() -> None:
    blocks = [Block(index) for index in range(1, 9)]
    both = full(per_chunk=2), sliding(5, per_chunk=2)
    planned = [plan_chunk(shape, chunk, 8, blocks) for chunk in range(2) for shape in both]
    transfers = plan_stores([chunk for chunk in planned if chunk is not None], [70, 71, 72, 73])
    assert [(t.group_idx, t.rows, t.device_block_ids, t.first_sub_block) for t in transfers] == [
        (0, [70, 72], [1, 2, 3, 4], 0),
        (1, [71], [2], 1),
        (1, [73], [4], 1),
    ]


def test_case_19_range_comes_from_token_counts() -> None:
    """A window of which the device has a part: only what is missing is loaded, whatever the blocks' hashes say."""
    table = [Block(0, is_null=True), *[Block(index) for index in range(1, 6)]]
    transfer = plan_load_of_group(sliding(13, per_chunk=2), 12, 24, [7, 8], table)
    assert transfer is not None
    assert (transfer.device_block_ids, transfer.first_sub_block, transfer.rows) == ([3, 4, 5], 1, [7, 8])
    assert plan_load_of_group(full(), 0, 24, list(range(6)), table) is None  # vLLM holds less than full attention needs


def test_windows_reach_into_the_last_strides_only() -> None:
    assert window_start([full(), sliding(9), local(8)], 10, 4) == 8
    assert window_start([full(), local(8)], 10, 4) == 10  # the next token begins a span: nothing behind it is read
    assert window_start([full()], 10, 4) == 10
    assert window_start([sliding(400)], 10, 4) == 0


def test_waiting_has_the_reason_that_takes_longer() -> None:
    hit, pending, retry = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY
    assert why_wait([hit, hit]) is None
    assert why_wait([hit, pending]) is pending
    assert why_wait([pending, retry, hit]) is retry
