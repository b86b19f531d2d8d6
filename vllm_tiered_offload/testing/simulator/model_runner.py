"""In place of the model: writes slots, reads them back, and answers with tokens that depend on every slot before.

A layer reads what its kind reaches: all slots before with full attention, those in its window, or the last state; none
of the others may matter, whatever they hold.

A draft model's layers run when the step has sampled, as in vLLM: what they write at a position depends on the next
token, which is then known: the prompt's, or the sampled one. All that they read has to be exact, but for this: vLLM's
device cache finds blocks by the hash at their end and not behind it. So where a request took over blocks as a device
hit, the last slot of each of them may be that of another request, with the same tokens up to there and another one
next. (vLLM drops the last block that it finds; a block in the middle may be the wrong one of two with one hash.) What a
load brought is never excused.

With speculative decoding a step has the last guesses as its last tokens, and samples at each until one was wrong. What
it writes behind that is spoilt here, and so is the room of a draft model's further guesses. With two batches in flight
the scheduler counts all guesses as right until it hears of the output; where a request really is, its tokens say.

Like vLLM's runner it keeps its own block tables and token lists, fed by the scheduler's outputs alone.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_tiered_offload.testing.simulator import chain
from vllm_tiered_offload.testing.simulator.config import SimConfig
from vllm_tiered_offload.testing.simulator.group_memory import GroupMemory
from vllm_tiered_offload.testing.simulator.recurrent import StateMemory
from vllm_tiered_offload.testing.simulator.speculation import guesses
from vllm_tiered_offload.testing.simulator.story import Story

if TYPE_CHECKING:
    import torch

# (req_id, block ids about to be written, whether any byte changes)
WriteHook = Callable[[str, list[int], Callable[[], bool]], None]


@dataclass(slots=True)
class Sequence:
    """One request as the runner knows it."""

    req_id: str
    tokens: list[int]  # prompt and what was sampled so far
    blocks: list[list[int]]  # device block of each block position, by KV group
    device_hit: int  # tokens whose blocks it took over when it (re)started
    epoch: int  # weights that `values` and `want` were computed with
    guesses: list[int] = field(default_factory=list)  # what may follow `tokens`
    values: list[int] = field(default_factory=list)  # chain value per position, a prefix of `tokens`
    want: list[chain.Words] = field(
        default_factory=list
    )  # their words by group: [rank, layer, position, word], or more


class SimModelRunner:
    """The forward pass of all ranks.

    `kv[rank, layer, block, offset, word]` is the KV cache; `tensors(rank)` shows it to connectors the way vLLM does.
    """

    def __init__(self, config: SimConfig, story: Story) -> None:
        self.config = config
        self._story = story
        shape = (config.ranks, config.layers, config.num_blocks, config.block_size, chain.WORDS_PER_SLOT)
        self.kv: chain.Words = np.full(shape, chain.POISON, dtype=np.uint64)
        kinds = [StateMemory if group.recurrent else GroupMemory for group in config.groups]
        self.groups = [kind(config, index, self.kv) for index, kind in enumerate(kinds)]  # views of `kv`
        self.epoch = 0
        self.sequences: dict[str, Sequence] = {}  # requests the worker was told of, until it is told they finished
        self.before_write: WriteHook = lambda _req, _blocks, _changes: None
        self.slots_checked = 0
        self._next_tokens: dict[int, set[int]] = {}  # chain value -> tokens that some request had behind it

    def layer_names(self) -> list[list[str]]:
        """Names of the attention layers, by KV group."""
        layers, groups = self.config.layers, range(len(self.config.groups))
        return [[f"model.layers.{g * layers + i}.self_attn.attn" for i in range(layers)] for g in groups]

    def tensors(self, rank: int) -> "dict[str, torch.Tensor]":
        """Rank `rank`'s KV cache, one [blocks, heads, tokens, 2 * head size] tensor of bfloat16 per layer."""
        import torch

        shapes = [(self.config.num_blocks, 1, group.block_tokens, -1) for group in self.groups]
        return {
            name: torch.from_numpy(self.kv[rank, layer].view(np.int16).reshape(shape)).view(torch.bfloat16)
            for names, shape in zip(self.layer_names(), shapes, strict=True)
            for layer, name in enumerate(names)
        }

    def new_weights(self) -> None:
        """Every slot written from now on differs from all before."""
        self.epoch += 1

    def poison(self, block_ids: Iterable[int]) -> None:
        """These blocks were handed out afresh: whatever they held is gone."""
        self.kv[:, :, list(block_ids)] = chain.POISON

    # -- one step ------------------------------------------------------------------------------------------------

    def update_states(self, output: Any, device_hits: Mapping[str, int]) -> None:
        """Take over what the scheduler says of new, continued and resumed requests.

        `device_hits`: tokens that requests which (re)start found on the device; where it says nothing, all they have.
        """
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            hit = device_hits.get(new.req_id, new.num_computed_tokens)
            tables = [list(ids) for ids in new.block_ids]
            self.sequences[new.req_id] = Sequence(new.req_id, list(tokens), tables, hit, self.epoch)
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            sequence = self.sequences[req_id]
            new_blocks = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                sequence.blocks = [list(ids) for ids in new_blocks]
                sequence.device_hit = device_hits.get(req_id, cached.num_computed_tokens[i])
            elif new_blocks is not None:
                for blocks, ids in zip(sequence.blocks, new_blocks, strict=True):
                    blocks.extend(ids)
            if req_id in cached.all_token_ids:
                # Not part of the previous step: what was sampled meanwhile may have been dropped (a reset).
                self._replace_tokens(sequence, cached.all_token_ids[req_id])

    def forward(self, output: Any) -> dict[str, list[int]]:
        """Read, check, write and sample for every scheduled request; the sampled tokens of each."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        guessed = output.scheduled_spec_decode_tokens
        return {
            req_id: self._run(self.sequences[req_id], computed[req_id], count, len(guessed.get(req_id, ())))
            for req_id, count in output.num_scheduled_tokens.items()
        }

    def guesses(self, req_ids: Iterable[str]) -> dict[str, list[int]]:
        """What may follow the tokens of these requests."""
        return {req_id: self.sequences[req_id].guesses for req_id in req_ids if req_id in self.sequences}

    def forget(self, req_ids: Iterable[str]) -> None:
        """These requests finished."""
        for req_id in req_ids:
            self.sequences.pop(req_id, None)

    def expected(self, req_id: str, start: int, end: int, group: int = 0) -> chain.Words | None:
        """What positions start..end of a known request must hold now; None if its tokens do not reach that far."""
        sequence = self.sequences.get(req_id)
        if sequence is None or len(sequence.tokens) < end + self.groups[group].ahead:
            return None
        return self._want(sequence, end)[group][:, :, start:end]

    def words_for(self, tokens: list[int], group: int = 0) -> chain.Words:
        """What a prefix of these tokens must hold, whoever computed it: [rank, layer, position, word].

        Of a draft group without the last position: nobody says which token comes next.
        """
        values: list[int] = []
        self._extend(values, tokens, self.epoch)
        return self.groups[group].words(values)

    # -- inside --------------------------------------------------------------------------------------------------

    def _run(self, sequence: Sequence, start: int, count: int, num_guesses: int) -> list[int]:
        """One step of `count` tokens, the last of which are guesses; what it sampled."""
        start = min(start, len(sequence.tokens) - 1)
        end = start + count - num_guesses
        reach = min(len(ids) * group.block_tokens for ids, group in zip(sequence.blocks, self.groups, strict=True))
        if len(sequence.tokens) < end or reach < end:
            raise self._story.violation(
                "runner", f"scheduled up to {end}: {len(sequence.tokens)} tokens, blocks {sequence.blocks}",
                sequence.req_id,
            )  # fmt: skip
        sampled = self._sample(sequence, num_guesses) if end == len(sequence.tokens) else []
        right = end + max(len(sampled) - 1, 0)
        want = self._want(sequence, right)
        for group, blocks, words in zip(self.groups, sequence.blocks, want, strict=True):
            self._check(sequence, group, blocks, words, group.read_by(start))
            self._write(sequence, group, blocks, words, group.written_by(start, right))
            further = self.config.speculative_tokens * group.ahead
            self._spoil(sequence, group, blocks, range(right, start + count + further))
        return sampled

    def _sample(self, sequence: Sequence, num_guesses: int) -> list[int]:
        """The next token, and for as long as it was guessed the one after it; then what may follow is guessed."""
        sampled: list[int] = []
        for guess in (*sequence.guesses[:num_guesses], None):
            value = self._values(sequence, len(sequence.tokens))[-1]
            sampled.append(chain.sample(value))
            sequence.tokens.append(sampled[-1])
            if sampled[-1] != guess:
                break
        sequence.guesses = guesses(value, sampled[-1], self.config.speculative_tokens, self.epoch)
        return sampled

    def _check(
        self, sequence: Sequence, group: GroupMemory, blocks: list[int], words: chain.Words, read: range
    ) -> None:
        """What this step reads and does not write is what it must be."""
        if not read:
            return
        slots, want = group.slots_of(blocks, read), group.content(words[:, :, read.start : read.stop])
        got = group.slots[:, :, slots]
        self.slots_checked += len(slots)
        wrong = got != want
        if group.ahead:
            for index in np.flatnonzero(wrong.any(axis=(0, 1, 3))):
                wrong[:, :, index] &= not self._is_anothers(sequence, group, read.start + int(index), got[:, :, index])
        if not wrong.any():
            return
        rank, layer, index, word = (int(i) for i in np.argwhere(wrong)[0])
        position = read.start + index * len(read) // len(slots)
        raise self._story.violation(
            "bytes",
            f"request {sequence.req_id} position {position} of {read.stop} (group {group.index}, "
            f"rank {rank}, layer {layer}, block {slots[index] // group.block_tokens}): "
            f"{self.describe(rank, layer, int(got[rank, layer, index, word]), group.index)}; "
            f"block table {blocks}",
            sequence.req_id,
        )

    def _is_anothers(self, sequence: Sequence, group: GroupMemory, position: int, got: chain.Words) -> bool:
        """Whether the slot ends a block of a device hit, and is what a request had there that went another way."""
        if position >= sequence.device_hit or (position + 1) % group.block_tokens:
            return False
        value = sequence.values[position]
        others = [chain.mix(token, value, self.epoch) for token in self._next_tokens.get(value, ())]
        return bool((group.code.words(others) == got[:, :, None]).all(axis=(0, 1, 3)).any())

    def _write(
        self, sequence: Sequence, group: GroupMemory, blocks: list[int], words: chain.Words, written: range
    ) -> None:
        size = group.block_tokens
        slots, new = group.slots_of(blocks, written), group.content(words[:, :, written.start : written.stop])
        touched = blocks[written.start // size : -(-written.stop // size)]
        self.before_write(sequence.req_id, touched, lambda: not (group.slots[:, :, slots] == new).all())
        group.slots[:, :, slots] = new

    def _spoil(self, sequence: Sequence, group: GroupMemory, blocks: list[int], written: range) -> None:
        """Slots of tokens that were guessed wrong, as far as there are blocks."""
        size = group.block_tokens
        written = range(written.start, min(written.stop, len(blocks) * size))
        if written:
            touched = blocks[written.start // size : -(-written.stop // size)]
            self.before_write(sequence.req_id, touched, lambda: True)
            group.slots[:, :, group.slots_of(blocks, written)] = chain.POISON

    def _values(self, sequence: Sequence, end: int) -> list[int]:
        """The chain values of all its tokens, of which there are `end` at least; with the words that go with them."""
        values = sequence.values
        if sequence.epoch != self.epoch:
            values.clear()
            sequence.epoch = self.epoch
        known = len(values)
        if known < end:
            self._extend(values, sequence.tokens[known:], sequence.epoch)
            done = [max(known - group.ahead, 0) for group in self.groups]
            new = [group.words(values[first:]) for group, first in zip(self.groups, done, strict=True)]
            old = sequence.want or new
            sequence.want = [
                np.concatenate([words[:, :, :first], more], axis=2)
                for words, first, more in zip(old, done, new, strict=True)
            ]
        return values

    def _want(self, sequence: Sequence, end: int) -> list[chain.Words]:
        """What positions up to `end`, at least, must hold, by group."""
        self._values(sequence, min(end + 1, len(sequence.tokens)))
        return sequence.want

    def _extend(self, values: list[int], tokens: list[int], epoch: int) -> None:
        first = max(len(values), 1)
        chain.extend(values, tokens, epoch)
        if any(group.ahead for group in self.groups):
            for position in range(first, len(values)):
                token = tokens[position - len(values)]
                self._next_tokens.setdefault(values[position - 1], set()).add(token)

    def _replace_tokens(self, sequence: Sequence, tokens: list[int]) -> None:
        same = 0
        for mine, theirs in zip(sequence.tokens, tokens, strict=False):
            if mine != theirs:
                break
            same += 1
        sequence.tokens = list(tokens)
        del sequence.values[same:]

    def describe(self, rank: int, layer: int, word: int, group: int = 0) -> str:
        """Whose word this is, if anybody's that is known."""
        if word == int(chain.POISON):
            return "poison: not written since the block was allocated"
        for sequence in self.sequences.values():
            if not sequence.want or not sequence.values:
                continue
            known = len(sequence.values) - self.groups[group].ahead
            for other_rank, other_layer, position, _ in np.argwhere(sequence.want[group][:, :, :known] == word):
                return f"holds position {position} of {sequence.req_id} (rank {other_rank}, layer {other_layer})"
        return f"holds {word:#018x}, nobody's word now (rank {rank}, layer {layer})"
