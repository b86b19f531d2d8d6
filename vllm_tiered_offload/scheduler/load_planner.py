"""Which bytes a load moves, and where they came from: pure functions of plain data."""

from collections.abc import Sequence

from vllm_tiered_offload.contract.messages import GroupTransfer
from vllm_tiered_offload.scheduler.request_state import Reservation
from vllm_tiered_offload.scheduler.views import BlockView, GroupShape


def plan_load(
    shape: GroupShape, reservation: Reservation, blocks: Sequence[BlockView], num_external_tokens: int
) -> GroupTransfer | None:
    """The copy of `num_external_tokens` tokens after the local prefix, or None where the reserved rows fall short.

    The local prefix may end inside a chunk: its leading sub-blocks are skipped. The range comes from token counts
    alone, never from which blocks carry a hash.
    """
    first_block = reservation.num_computed_tokens // shape.block_tokens
    end_block = -(-(reservation.num_computed_tokens + num_external_tokens) // shape.block_tokens)
    first_sub_block = first_block - reservation.first_chunk * shape.blocks_per_chunk
    num_rows = -(-(first_sub_block + end_block - first_block) // shape.blocks_per_chunk)
    target = [block.block_id for block in blocks[first_block:end_block] if not block.is_null]
    if num_rows > len(reservation.prepared.block_ids) or len(target) != end_block - first_block:
        return None
    return GroupTransfer(0, list(reservation.prepared.block_ids[:num_rows]), target, first_sub_block)


def tokens_by_medium(
    shape: GroupShape, reservation: Reservation, media: Sequence[str], num_external_tokens: int
) -> dict[str, int]:
    """How many of the loaded tokens each medium supplied; the sum is `num_external_tokens`."""
    start = reservation.num_computed_tokens
    end = start + num_external_tokens
    tokens: dict[str, int] = {}
    for index, medium in enumerate(media):
        first = (reservation.first_chunk + index) * shape.chunk_tokens
        count = min(end, first + shape.chunk_tokens) - max(start, first)
        if count > 0:
            tokens[medium] = tokens.get(medium, 0) + count
    return tokens
