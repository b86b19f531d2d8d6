"""Device blocks held in vLLM's block pool while a store still reads them (D2).

A pin is taken when the store is planned, before vLLM frees the block, and given back on the workers' acknowledgement.
Pins never exceed a share of the pool; beyond it stores are declined.
"""

from collections.abc import Sequence

from vllm_tiered_offload.scheduler.views import BlockPoolView, BlockView


class BlockPins:
    """Counts and takes pins. `bind` comes once, before any other call."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._pool: BlockPoolView | None = None
        self._limit = 0
        self._blocks: dict[int, BlockView] = {}  # pinned blocks by id
        self._more: dict[int, int] = {}  # our references to some of them beyond the first, all > 0

    def bind(self, pool: BlockPoolView) -> None:
        """`pool` is the engine's device block pool. One of its blocks is the placeholder and never usable."""
        self._pool = pool
        self._limit = int((pool.num_gpu_blocks - 1) * self._max_share)

    @property
    def bound(self) -> bool:
        return self._pool is not None

    @property
    def num_blocks(self) -> int:
        """Device blocks pinned now."""
        return len(self._blocks)

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return self._limit - len(self._blocks)

    def pin(self, blocks: Sequence[BlockView]) -> None:
        """Take one reference to each block."""
        assert self._pool is not None
        self._pool.touch(blocks)
        held, more = self._blocks, self._more
        for block in blocks:
            block_id = block.block_id
            if block_id in held:
                more[block_id] = more.get(block_id, 0) + 1
            else:
                held[block_id] = block

    def unpin(self, blocks: Sequence[BlockView]) -> None:
        """Give one reference back for each block. Tails first: vLLM evicts what was freed first."""
        assert self._pool is not None
        held, more = self._blocks, self._more
        for block in blocks:
            block_id = block.block_id
            if block_id not in more:
                del held[block_id]
            elif more[block_id] == 1:
                del more[block_id]
            else:
                more[block_id] -= 1
        self._pool.free_blocks(blocks[::-1])

    def hold_back_memory(self) -> bool:
        """Whether giving all pins back would free at least one block now."""
        more = self._more
        return any(block.ref_cnt == 1 + more.get(block_id, 0) for block_id, block in self._blocks.items())

    def pool_is_empty(self) -> bool:
        """Whether no block is in use: right after vLLM's own reset this tells that it succeeded."""
        assert self._pool is not None
        return self._pool.get_num_free_blocks() == self._pool.num_gpu_blocks - 1
