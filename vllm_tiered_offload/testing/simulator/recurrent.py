"""Recurrent layers (Mamba and its kin) in place of the model's: a block holds one state, not a slot a token.

As vLLM's runner does in cache mode "align", a step that begins behind token p reads the state after it, from the block
that p lies in, and leaves the state after its own last token in the block of that one; nothing else is written. So the
block of a position holds the state at its end only if some step ended there.
"""

import numpy as np

from vllm_tiered_offload.testing.simulator import chain
from vllm_tiered_offload.testing.simulator.group_memory import GroupMemory, Slots


class StateMemory(GroupMemory):
    """The state after position p is p's word, in every slot of the block: a state is as large as a block."""

    def read_by(self, start: int) -> range:
        """The last position before the step."""
        return range(max(0, start - 1), start)

    def written_by(self, start: int, end: int) -> range:
        return range(max(start, end - 1), end)

    def slots_of(self, blocks: list[int], positions: range) -> Slots:
        """All slots of the blocks that hold the states after these positions."""
        return self.slot_numbers([blocks[position // self.block_tokens] for position in positions])

    def content(self, words: chain.Words) -> chain.Words:
        return np.repeat(words, self.block_tokens, axis=2)

    def whole_block(self, words: chain.Words) -> chain.Words:
        return self.content(words[:, :, -1:])
