"""The pure planners of the scheduler half."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.contract.jobs import LookupResult
from vllm_tiered_offload.scheduler.lookup_planner import (
    ChunkRange,
    LookupWait,
    Prefix,
    loadable_tokens,
    lookup_range,
    readable_prefix,
)
from vllm_tiered_offload.scheduler.store_planner import (
    chunks_within_pins,
    offload_limit,
    storable_chunks,
    written_at_finish,
)

HIT, MISS, PENDING, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.RETRY


def test_lookup_range_leaves_the_last_token_to_compute() -> None:
    assert lookup_range(8, 0, 4, None) == ChunkRange(0, 1)
    assert lookup_range(9, 0, 4, None) == ChunkRange(0, 2)
    assert lookup_range(4, 0, 4, None).empty


def test_lookup_range_starts_inside_a_chunk() -> None:
    """Case 23: chunk = 4 blocks of 4, device keeps 5 blocks: chunk 1 is looked up and its first block skipped."""
    chunks = lookup_range(49, 20, 16, None)
    assert chunks == ChunkRange(1, 3)
    assert loadable_tokens(chunks, 2, 20, 16, 0) == 28


@given(st.integers(1, 200), st.integers(0, 40), st.sampled_from([4, 8, 16]), st.none() | st.integers(0, 100))
def test_a_load_never_passes_the_last_token_nor_the_limit(
    num_tokens: int, local_blocks: int, chunk_tokens: int, limit: int | None
) -> None:
    local = local_blocks * 4
    chunks = lookup_range(num_tokens, local, chunk_tokens, limit)
    for hits in range(max(0, chunks.end - chunks.first) + 1):
        tokens = loadable_tokens(chunks, hits, local, chunk_tokens, 0)
        assert tokens == 0 or local + tokens < num_tokens
        assert limit is None or tokens <= limit


def test_only_the_readable_prefix_counts() -> None:
    assert readable_prefix([HIT, HIT, MISS, HIT]) == Prefix(2, MISS)
    assert readable_prefix([PENDING, HIT]) == Prefix(0, PENDING)
    assert readable_prefix([HIT]) == Prefix(1, None)
    assert readable_prefix([]) == Prefix(0, None)


def test_a_short_hit_is_recomputed() -> None:
    chunks = ChunkRange(0, 8)
    assert loadable_tokens(chunks, 3, 0, 4, 12) == 12
    assert loadable_tokens(chunks, 2, 0, 4, 12) == 0


def test_retry_is_bounded_from_the_first_question() -> None:
    """Case 25: also over a preemption, which does not restart the clock."""
    wait = LookupWait()
    assert wait.should_wait(0, RETRY, 10.0, 1.0, 1.0)
    wait.answered()
    assert wait.should_wait(0, RETRY, 10.9, 1.0, 1.0)
    assert not wait.should_wait(0, RETRY, 11.0, 1.0, 1.0)


def test_pending_is_bounded_from_the_last_new_chunk() -> None:
    wait = LookupWait()
    assert wait.should_wait(0, PENDING, 0.0, 1.0, 1.0)
    assert wait.should_wait(1, PENDING, 0.5, 1.0, 1.0)
    assert wait.should_wait(1, PENDING, 1.25, 1.0, 1.0)
    assert not wait.should_wait(1, PENDING, 1.5, 1.0, 1.0)


def test_written_tokens_at_finish() -> None:
    """Case 4 (D1): 5 prompt + 3 sampled tokens, block 4: the eighth was sampled and never computed."""
    assert written_at_finish(7, 8, 7, aborted=False) == 7
    assert written_at_finish(8, 8, 8, aborted=False) == 7
    assert written_at_finish(8, 8, 8, aborted=True) == 8
    assert storable_chunks(7, 8, 4, None) == 1


def test_a_load_that_only_started_proves_nothing() -> None:
    """D1: vLLM counts an external load into num_computed_tokens when it starts (case 10)."""
    assert written_at_finish(16, 20, 0, aborted=True) == 0


def test_limits() -> None:
    assert offload_limit(False, 10, None) is None
    assert offload_limit(True, 10, None) == 10
    assert offload_limit(True, 10, 6) == 6
    assert storable_chunks(100, 100, 4, 10) == 2
    assert chunks_within_pins(5, 4, 11) == 2
    assert chunks_within_pins(5, 4, -1) == 0
