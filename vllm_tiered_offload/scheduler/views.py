"""What the scheduler half sees of the engine, as structural types.

vLLM's own objects fit them as they are (the connector room shims what differs between versions), so nothing is wrapped
or copied per request and step.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class RequestView(Protocol):
    """A live request. `block_hashes` grows as tokens arrive and shrinks when a streaming session takes new input."""

    @property
    def request_id(self) -> str: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...
    @property
    def lora_request(self) -> Any | None: ...


class BlockView(Protocol):
    """A device block: its physical id, its reference count in the pool, and whether it is the placeholder block.

    `block_hash_num_tokens`: how many tokens of a prompt the block's hash covers, where it has one.
    """

    @property
    def block_id(self) -> int: ...
    @property
    def ref_cnt(self) -> int: ...
    @property
    def is_null(self) -> bool: ...
    @property
    def block_hash_num_tokens(self) -> int | None: ...


class BlockPoolView(Protocol):
    """vLLM's device block pool."""

    @property
    def num_gpu_blocks(self) -> int: ...

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None: ...
    def get_num_free_blocks(self) -> int: ...


# The live block table of a request, one list per KV group.
BlockTables = tuple[Sequence[BlockView], ...]


@dataclass(frozen=True, slots=True)
class StepView:
    """One scheduling step, as `build_connector_meta` sees it (num_computed_tokens are from before the step)."""

    num_scheduled_tokens: Mapping[str, int]
    preempted_req_ids: Collection[str]
    finished_req_ids: Collection[str]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Token granularity of one KV group, and how far back its attention reads.

    `block_tokens` a device block, `chunk_tokens` a chunk (= blocks_per_chunk blocks), `hash_tokens` an entry of
    `block_hashes`. A chunk's key is made of the hash at its last token, or of the one after it (`reads_next_token`).

    At most one of these three is set: `window`, a token attends to itself and the `window - 1` before it (sliding
    window); `local_span`, it attends to what came before it in its own span of that many tokens (chunked local
    attention); `recurrent`, it reads the state after the token before it (Mamba and its kin), and a whole block is the
    state after its last token. vLLM puts the placeholder block in place of whole blocks that are out of reach.

    `reads_next_token`: what is kept for a token depends on the token after it, too (layers of an EAGLE or MTP draft
    model; see `scheduler.groups`).
    """

    block_tokens: int
    chunk_tokens: int
    hash_tokens: int
    group_idx: int = 0
    window: int | None = None
    local_span: int | None = None
    recurrent: bool = False
    reads_next_token: bool = False

    def first_needed(self, position: int) -> int:
        """The first token whose KV a token at `position` reads. Never falls as `position` grows."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        if self.local_span is not None:
            return position - position % self.local_span
        if self.recurrent:
            return max(0, position - 1)
        return 0

    @property
    def reads_all(self) -> bool:
        """Full attention: a hit needs every chunk from the start."""
        return self.window is None and self.local_span is None and not self.recurrent

    @property
    def hashes_per_chunk(self) -> int:
        return self.chunk_tokens // self.hash_tokens

    @property
    def hashes_ahead(self) -> int:
        """How many entries of `block_hashes` behind a chunk's last one its key is made of."""
        return 1 if self.reads_next_token else 0

    @property
    def tokens_ahead(self) -> int:
        """Tokens behind a chunk's end that its key covers: it has none before they are known."""
        return self.hashes_ahead * self.hash_tokens

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens


ResolveBlockTables = Callable[[str], BlockTables]
