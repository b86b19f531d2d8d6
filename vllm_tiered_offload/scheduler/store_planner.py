"""Which chunks of a request may be stored: pure functions of plain data.

D1 is decided here. A slot may be stored only if a forward pass has written it:

    scheduled in this step   num_computed_tokens (before the step) + tokens scheduled in it; the store is submitted
                             after this step's forward pass
    finished                 min(num_computed_tokens, num_tokens - 1): the last token was sampled, not computed
    aborted                  min(num_computed_tokens, num_tokens)
    preempted                nothing new

vLLM counts an external load into num_computed_tokens when the load starts, and another connector's blocks may still be
filling, so num_computed_tokens alone proves nothing: it is capped by `written_tokens`, the end of what was seen in a
scheduled step since the request's last (re)start.

With speculative decoding a step also has draft tokens, and what it writes behind the first that is rejected is of no
use: vLLM takes num_computed_tokens back when the step's output arrives, with async scheduling one step after the next
was scheduled behind it. So `written_tokens` may be too high by the drafts in flight; what caps it then is that only
known tokens are hashed and counted in num_tokens. The last known token was sampled behind the last accepted one, and
its slot is written by the step after, where it comes first. Hence of a step that is scheduled with num_tokens known
tokens all slots before num_tokens are right once it has run, whatever becomes of its drafts, and so are those of a
finished request up to num_tokens - 1. A draft model's own slots are written in the same step, when it has sampled, and
before vLLM asks for what is to be saved.
"""

from collections.abc import Sequence

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.scheduler.views import BlockView


def written_at_finish(num_computed_tokens: int, num_tokens: int, written_tokens: int, aborted: bool) -> int:
    """Tokens whose slots a forward pass has written, for a request that vLLM just finished."""
    known = num_tokens if aborted else num_tokens - 1
    return max(0, min(num_computed_tokens, known, written_tokens))


def storable_chunks(written_tokens: int, hashed_tokens: int, chunk_tokens: int, limit_tokens: int | None) -> int:
    """Full chunks, counted from the start of the request, that are written, hashed and within the request's limit."""
    tokens = hashed_tokens if hashed_tokens < written_tokens else written_tokens
    if limit_tokens is not None and limit_tokens < tokens:
        tokens = limit_tokens
    return tokens // chunk_tokens


def offload_limit(prompt_only: bool, num_prompt_tokens: int, max_offload_tokens: int | None) -> int | None:
    """The last token that may be stored, or None for no limit."""
    limits = [num_prompt_tokens] if prompt_only else []
    if max_offload_tokens is not None:
        limits.append(max_offload_tokens)
    return min(limits, default=None)


def chunks_within_pins(num_chunks: int, blocks_per_chunk: int, room: int) -> int:
    """How many leading chunks may be offered when `room` more device blocks may be pinned (D2)."""
    fitting = max(room, 0) // blocks_per_chunk
    return num_chunks if num_chunks < fitting else fitting


def blocks_of_keys(
    chosen: Sequence[OffloadKey], keys: Sequence[OffloadKey], blocks: Sequence[BlockView], per_chunk: int
) -> Sequence[BlockView]:
    """The device blocks of `chosen`, a subsequence of `keys`; key i has blocks [i * per_chunk, (i + 1) * per_chunk)."""
    wanted = iter(chosen)
    want = next(wanted, None)
    picked: list[BlockView] = []
    for index, key in enumerate(keys):
        if key == want:
            picked.extend(blocks[index * per_chunk : (index + 1) * per_chunk])
            want = next(wanted, None)
    return picked
