"""Models whose KV cache is not one plain full-attention group: what a hit needs of each. Pure functions of plain data.

Rules.
 - A prefix hit ends where every group has a chunk's end: at a multiple of the *stride*, the least common multiple of
   the groups' chunks. Requests are counted in strides where a model with one full-attention group counts chunks.
 - A hit that ends at token E needs, of each group, what the token at E reads: all before E with full attention, the
   tail that lies within the window otherwise, the state at E with recurrent layers. The first token of that tail
   never moves back as E grows.
 - So the earliest end for which a chunk can be of use is the end of its stride, and what that one needs of the chunk
   (its last blocks, maybe none) is all that is ever stored of it, and all that any later hit reads. The blocks in
   front, which vLLM may have given up by then, stay unwritten in the row.
 - A recurrent layer leaves a state at a block's end only where a scheduled step ended there, or where its kernel was
   told to. vLLM knows: the block then has a hash that covers exactly the tokens up to its end. No other is stored, so
   hits of such a model end where some request's state was kept.
 - A draft model's layers (EAGLE, MTP) keep for a token what depends on the token after it: of the last slot of a chunk
   the hash at its end says too little. So such a chunk has the hash that follows as its key, which covers that token.
   A chunk without its key is none: strides are stored, and hits end, where every group's chunks have theirs.
 - What vLLM's own prefix cache hands out of such a group may end, at each block's end, with the slot of a request that
   went another way, since vLLM finds blocks by the hash at their end (it costs drafts, not answers). A request
   therefore stores of them only what it computed or loaded, never the blocks of its device hit. (What it computed is
   right as far as vLLM gives its drafts the right tokens, see docs/decisions.md.)
 - Which blocks vLLM holds after a hit follows from the same `first_needed`: lookup, store and allocation agree.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from vllm_tiered_offload.contract.jobs import LookupResult
from vllm_tiered_offload.contract.messages import GroupTransfer
from vllm_tiered_offload.scheduler.lookup_planner import ChunkRange
from vllm_tiered_offload.scheduler.views import BlockView, GroupShape


def stride_of(shapes: Sequence[GroupShape]) -> GroupShape:
    """The granularity of hits, in the form of a group whose chunks are strides."""
    tokens = lcm(*(shape.chunk_tokens for shape in shapes))
    ahead = any(shape.reads_next_token for shape in shapes)
    return GroupShape(tokens, tokens, shapes[0].hash_tokens, reads_next_token=ahead)


def needed_chunks(shape: GroupShape, local_tokens: int, end: int) -> ChunkRange:
    """Chunks of a group that a hit at `end` reads and that a local prefix of `local_tokens` does not supply."""
    return ChunkRange(first_loaded_block(shape, local_tokens, end) // shape.blocks_per_chunk, end // shape.chunk_tokens)


def first_loaded_block(shape: GroupShape, local_tokens: int, end: int) -> int:
    """The first block of a group that a load up to token `end` fills; all up to `end` follow."""
    return max(local_tokens, shape.first_needed(end)) // shape.block_tokens


def stored_from(shape: GroupShape, chunk: int, stride_tokens: int) -> int:
    """The first block inside a chunk that any hit may read; blocks_per_chunk where none ever does."""
    chunk_end = (chunk + 1) * shape.chunk_tokens
    earliest_hit = -(-chunk_end // stride_tokens) * stride_tokens
    per_chunk = shape.blocks_per_chunk
    first = shape.first_needed(earliest_hit) // shape.block_tokens - chunk * per_chunk
    return min(max(first, 0), per_chunk)


def stored_chunks(shapes: Sequence[GroupShape], stride: int, stride_tokens: int) -> Iterator[tuple[GroupShape, int]]:
    """The chunks of stride number `stride` that some hit may read, group by group."""
    for shape in shapes:
        count = stride_tokens // shape.chunk_tokens
        for chunk in range(stride * count, (stride + 1) * count):
            if stored_from(shape, chunk, stride_tokens) < shape.blocks_per_chunk:
                yield shape, chunk


def window_start(shapes: Sequence[GroupShape], strides: int, stride_tokens: int) -> int:
    """The first stride into which the windows of a hit of `strides` strides reach; `strides` where none does."""
    end = strides * stride_tokens
    starts = [needed_chunks(shape, 0, end).first * shape.chunk_tokens for shape in shapes if not shape.reads_all]
    return min([end, *starts]) // stride_tokens


Find = Callable[[GroupShape, ChunkRange], int]
"""How many leading chunks of a range may count as present."""


def longest_hit(shapes: Sequence[GroupShape], stride_tokens: int, local_tokens: int, limit: int, find: Find) -> int:
    """The last end, a multiple of the stride and not above `limit`, for which `find` has all that a hit needs.

    `local_tokens` or less: there is no hit.
    """
    end = limit - limit % stride_tokens
    agreed = 0  # groups in a row that have all they need at `end`
    index = 0
    while agreed < len(shapes) and end > local_tokens:
        shape = shapes[index % len(shapes)]
        chunks = needed_chunks(shape, local_tokens, end)
        present = find(shape, chunks) if not chunks.empty else 0
        if chunks.empty or present == chunks.end - chunks.first:
            agreed += 1
            index += 1
            continue
        # No end above the start of the missing chunk will do: each would need it too.
        missing = (chunks.first + present) * shape.chunk_tokens
        end = missing - missing % stride_tokens
        agreed = 0
    return end


def why_wait(results: Sequence[LookupResult]) -> LookupResult | None:
    """What a hit still waits for: RETRY before HIT_PENDING before None."""
    for reason in (LookupResult.RETRY, LookupResult.HIT_PENDING):
        if reason in results:
            return reason
    return None


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk to store: device blocks `blocks` go to its row from block `first_sub_block` of it on."""

    shape: GroupShape
    chunk: int
    first_sub_block: int
    blocks: Sequence[BlockView]

    def stride(self, stride_tokens: int) -> int:
        """The number of the stride that it belongs to."""
        return self.chunk * self.shape.chunk_tokens // stride_tokens

    def leaves(self, position: int) -> bool:
        """Whether its first block is out of reach for the token at `position`: vLLM gives it up to compute that one."""
        first = self.chunk * self.shape.blocks_per_chunk + self.first_sub_block
        return (first + 1) * self.shape.block_tokens <= self.shape.first_needed(position)


def chunks_between(shape: GroupShape, earlier: int, later: int) -> range:
    """The chunks into which the reach of the token at `earlier` goes, and that of the token at `later` not wholly."""
    size = shape.chunk_tokens
    return range(shape.first_needed(earlier) // size, -(-shape.first_needed(later) // size))


def plan_chunk(
    shape: GroupShape, chunk: int, stride_tokens: int, table: Sequence[BlockView], local_tokens: int = 0
) -> StoredChunk | None:
    """How to store a chunk, or None when the request does not hold what a hit would read.

    vLLM has given it up, or never had it, or took it over from another request with the `local_tokens` of a device hit.
    """
    first = stored_from(shape, chunk, stride_tokens)
    begin, end = chunk * shape.blocks_per_chunk + first, (chunk + 1) * shape.blocks_per_chunk
    blocks = table[begin:end]
    if len(blocks) < end - begin or any(block.is_null for block in blocks):
        return None
    if shape.reads_next_token and begin * shape.block_tokens < local_tokens:
        return None
    if shape.recurrent and blocks[-1].block_hash_num_tokens != (chunk + 1) * shape.chunk_tokens:
        return None
    return StoredChunk(shape, chunk, first, blocks)


def plan_stores(chunks: Sequence[StoredChunk], rows: Sequence[int]) -> list[GroupTransfer]:
    """The copies of chunks into rows: one a group, and one more for each row that is not filled from its start."""
    transfers: list[GroupTransfer] = []
    whole: dict[int, GroupTransfer] = {}
    for chunk, row in zip(chunks, rows, strict=True):
        group, ids = chunk.shape.group_idx, [block.block_id for block in chunk.blocks]
        if chunk.first_sub_block:
            transfers.append(GroupTransfer(group, [row], ids, chunk.first_sub_block))
        elif group in whole:
            whole[group].rows.append(row)
            whole[group].device_block_ids += ids
        else:
            whole[group] = GroupTransfer(group, [row], ids)
    return [*whole.values(), *transfers]


def plan_load_of_group(
    shape: GroupShape, local_tokens: int, end: int, rows: Sequence[int], table: Sequence[BlockView]
) -> GroupTransfer | None:
    """The copy of a group's part of a load up to token `end`, or None where vLLM allocated something else.

    The range comes from token counts alone, never from which blocks carry a hash.
    """
    first, last = first_loaded_block(shape, local_tokens, end), end // shape.block_tokens
    target = [block.block_id for block in table[first:last] if not block.is_null]
    if len(target) != last - first:
        return None
    return GroupTransfer(shape.group_idx, list(rows), target, first % shape.blocks_per_chunk)
