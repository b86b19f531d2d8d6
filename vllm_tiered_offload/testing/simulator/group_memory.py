"""One KV group's part of the simulated KV cache: where a step reads and writes, and what must be there."""

import numpy as np
import numpy.typing as npt

from vllm_tiered_offload.testing.simulator import chain
from vllm_tiered_offload.testing.simulator.config import SimConfig

Slots = npt.NDArray[np.int64]  # slot numbers: block * block size + offset in the block


class GroupMemory:
    """One KV group's view of the KV cache: its slots, what they must hold, and how far back its layers read."""

    def __init__(self, config: SimConfig, index: int, kv: chain.Words) -> None:
        self.index = index
        self.block_tokens = config.block_tokens(index)
        self._group = config.groups[index]
        self.code = chain.SlotCode(
            config.ranks, config.layers, index, self._group.words_per_slot, self._group.replicated
        )
        self.ahead = int(self._group.draft)  # a position's words are those of the chain value that many positions on
        self.slots = kv.reshape(config.ranks, config.layers, -1, self._group.words_per_slot)  # by slot number
        self._offsets = np.arange(self.block_tokens)

    def slot_numbers(self, blocks: list[int]) -> Slots:
        """The slots of these blocks."""
        return (np.array(blocks, np.int64)[:, None] * self.block_tokens + self._offsets).ravel()

    def words(self, values: list[int]) -> chain.Words:
        """What the first len(values) - ahead positions hold, given their chain values."""
        return self.code.words(values[self.ahead :])

    def read_by(self, start: int) -> range:
        """Positions whose content a step from `start` on reads and does not write."""
        if self._group.window is not None:
            return range(max(0, start + 1 - self._group.window), start)
        if self._group.local_span is not None:
            return range(start // self._group.local_span * self._group.local_span, start)
        return range(start)

    def written_by(self, start: int, end: int) -> range:
        """Positions whose content a step over start..end writes."""
        return range(start, end)

    def slots_of(self, blocks: list[int], positions: range) -> Slots:
        """Where a request with these blocks has the content of these positions."""
        return self.slot_numbers(blocks)[positions.start : positions.stop]

    def content(self, words: chain.Words) -> chain.Words:
        """What `slots_of` must hold, given the words of the positions: [rank, layer, position, word]."""
        return words

    def whole_block(self, words: chain.Words) -> chain.Words:
        """What a full block holds, given the words of its positions."""
        return words

    def block(self, block_id: int) -> chain.Words:
        """[rank, layer, offset, word] of one device block."""
        return self.slots[:, :, block_id * self.block_tokens : (block_id + 1) * self.block_tokens]
