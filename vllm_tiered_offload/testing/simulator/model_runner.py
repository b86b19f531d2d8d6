"""In place of the model: writes slots, reads them back, and answers with tokens that depend on every slot before.

Like vLLM's runner it keeps its own block tables and token lists, fed by the scheduler's outputs alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vllm_tiered_offload.testing.simulator import chain
from vllm_tiered_offload.testing.simulator.config import SimConfig
from vllm_tiered_offload.testing.simulator.story import Story

if TYPE_CHECKING:
    import torch

# (req_id, block ids about to be written, whether any byte changes)
WriteHook = Callable[[str, list[int], Callable[[], bool]], None]
Slots = npt.NDArray[np.int64]  # slot numbers: block * block size + offset in the block


@dataclass(slots=True)
class Sequence:
    """One request as the runner knows it."""

    req_id: str
    tokens: list[int]  # prompt and what was sampled so far
    blocks: list[int]  # device block of each block position
    epoch: int  # weights that `values` and `want` were computed with
    values: list[int] = field(default_factory=list)  # chain value per position, a prefix of `tokens`
    want: chain.Words | None = None  # the words of `values`: [rank, layer, position, word], longer than needed


class SimModelRunner:
    """The forward pass of all ranks.

    `kv[rank, layer, block, offset, word]` is the KV cache; `tensors(rank)` shows it to connectors the way vLLM does.
    """

    def __init__(self, config: SimConfig, story: Story) -> None:
        self.config = config
        self._story = story
        self._code = chain.SlotCode(config.ranks, config.layers)
        shape = (config.ranks, config.layers, config.num_blocks, config.block_size, chain.WORDS_PER_SLOT)
        self.kv: chain.Words = np.full(shape, chain.POISON, dtype=np.uint64)
        self._slots = self.kv.reshape(config.ranks, config.layers, -1, chain.WORDS_PER_SLOT)  # the same, by slot
        self._offsets = np.arange(config.block_size)
        self.epoch = 0
        self.sequences: dict[str, Sequence] = {}  # requests the worker was told of, until it is told they finished
        self.before_write: WriteHook = lambda _req, _blocks, _changes: None
        self.slots_checked = 0

    def layer_names(self) -> list[str]:
        """Names of the attention layers."""
        return [f"model.layers.{i}.self_attn.attn" for i in range(self.config.layers)]

    def tensors(self, rank: int) -> "dict[str, torch.Tensor]":
        """Rank `rank`'s KV cache, one [blocks, heads, tokens, 2 * head size] tensor of bfloat16 per layer."""
        import torch

        shape = (self.config.num_blocks, 1, self.config.block_size, self.config.slot_bytes // 2)
        return {
            name: torch.from_numpy(self.kv[rank, layer].view(np.int16).reshape(shape)).view(torch.bfloat16)
            for layer, name in enumerate(self.layer_names())
        }

    def new_weights(self) -> None:
        """Every slot written from now on differs from all before."""
        self.epoch += 1

    def poison(self, block_ids: Iterable[int]) -> None:
        """These blocks were handed out afresh: whatever they held is gone."""
        self.kv[:, :, list(block_ids)] = chain.POISON

    # -- one step ------------------------------------------------------------------------------------------------

    def update_states(self, output: Any) -> None:
        """Take over what the scheduler says of new, continued and resumed requests."""
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.sequences[new.req_id] = Sequence(new.req_id, list(tokens), list(new.block_ids[0]), self.epoch)
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            sequence = self.sequences[req_id]
            new_blocks = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                sequence.blocks = list(new_blocks[0])
            elif new_blocks is not None:
                sequence.blocks.extend(new_blocks[0])
            if req_id in cached.all_token_ids:
                # Not part of the previous step: what was sampled meanwhile may have been dropped (a reset).
                self._replace_tokens(sequence, cached.all_token_ids[req_id])

    def forward(self, output: Any) -> dict[str, list[int]]:
        """Read, check, write and sample for every scheduled request; the sampled tokens of each."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {
            req_id: self._run(self.sequences[req_id], computed[req_id], count)
            for req_id, count in output.num_scheduled_tokens.items()
        }

    def forget(self, req_ids: Iterable[str]) -> None:
        """These requests finished."""
        for req_id in req_ids:
            self.sequences.pop(req_id, None)

    def expected(self, req_id: str, start: int, end: int) -> chain.Words | None:
        """What positions start..end of a known request must hold now; None if its tokens do not reach that far."""
        sequence = self.sequences.get(req_id)
        if sequence is None or len(sequence.tokens) < end:
            return None
        return self._want(sequence, end)[:, :, start:end]

    def words_for(self, tokens: list[int]) -> chain.Words:
        """What a prefix of these tokens must hold, whoever computed it: [rank, layer, position, word]."""
        values: list[int] = []
        chain.extend(values, tokens, self.epoch)
        return self._code.words(values)

    # -- inside --------------------------------------------------------------------------------------------------

    def _run(self, sequence: Sequence, start: int, count: int) -> list[int]:
        end = start + count
        if len(sequence.tokens) < end or len(sequence.blocks) * self.config.block_size < end:
            raise self._story.violation(
                "runner", f"scheduled up to {end}: {len(sequence.tokens)} tokens, blocks {sequence.blocks}",
                sequence.req_id,
            )  # fmt: skip
        want = self._want(sequence, end)
        slots = (np.array(sequence.blocks)[:, None] * self.config.block_size + self._offsets).ravel()
        if start:
            self._check(sequence, want[:, :, :start], slots[:start])
        self._write(sequence, want[:, :, start:end], slots[start:end], start)
        if end < len(sequence.tokens):
            return []
        token = chain.sample(sequence.values[end - 1])
        sequence.tokens.append(token)
        return [token]

    def _check(self, sequence: Sequence, want: chain.Words, slots: Slots) -> None:
        """The slots before the ones that this step writes hold what they must."""
        got = self._slots[:, :, slots]
        self.slots_checked += len(slots)
        if (got == want).all():
            return
        rank, layer, position, word = (int(i) for i in np.argwhere(got != want)[0])
        raise self._story.violation(
            "bytes",
            f"request {sequence.req_id} position {position} of {len(slots)} (rank {rank}, layer {layer}, block "
            f"{slots[position] // self.config.block_size}): "
            f"{self.describe(rank, layer, int(got[rank, layer, position, word]))}; block table {sequence.blocks}",
            sequence.req_id,
        )

    def _write(self, sequence: Sequence, new: chain.Words, slots: Slots, start: int) -> None:
        size = self.config.block_size
        touched = sequence.blocks[start // size : -(-(start + len(slots)) // size)]
        self.before_write(sequence.req_id, touched, lambda: not (self._slots[:, :, slots] == new).all())
        self._slots[:, :, slots] = new

    def _want(self, sequence: Sequence, end: int) -> chain.Words:
        if sequence.epoch != self.epoch:
            sequence.values.clear()
            sequence.epoch = self.epoch
        known = len(sequence.values)
        if known < end:
            chain.extend(sequence.values, sequence.tokens[known:], sequence.epoch)
            new = self._code.words(sequence.values[known:])
            old = sequence.want[:, :, :known] if sequence.want is not None else new[:, :, :0]
            sequence.want = np.concatenate([old, new], axis=2)
        assert sequence.want is not None
        return sequence.want

    def _replace_tokens(self, sequence: Sequence, tokens: list[int]) -> None:
        same = 0
        for mine, theirs in zip(sequence.tokens, tokens, strict=False):
            if mine != theirs:
                break
            same += 1
        sequence.tokens = list(tokens)
        del sequence.values[same:]

    def describe(self, rank: int, layer: int, word: int) -> str:
        """Whose word this is, if anybody's that is known."""
        if word == int(chain.POISON):
            return "poison: not written since the block was allocated"
        for sequence in self.sequences.values():
            if sequence.want is None or not sequence.values:
                continue
            for other_rank, other_layer, position, _ in np.argwhere(
                sequence.want[:, :, : len(sequence.values)] == word
            ):
                return f"holds position {position} of {sequence.req_id} (rank {other_rank}, layer {other_layer})"
        return f"holds {word:#018x}, nobody's word now (rank {rank}, layer {layer})"
