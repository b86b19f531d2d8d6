"""Which chunks to look up for a request, and what to answer vLLM: pure functions of plain data.

The last token of a request is always left to compute, as in vLLM's own prefix cache: its logits are needed, and a
prefix taken from a tier then has the very shape of a prefix taken from the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_tiered_offload.contract.jobs import LookupResult

# An Enum's member costs more to look up than most of what is done with it here.
_HIT, _HIT_PENDING, _RETRY = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY


class ChunkRange(NamedTuple):
    """Chunks [first, end) of a request; empty when end <= first."""

    first: int
    end: int

    @property
    def empty(self) -> bool:
        return self.end <= self.first


def lookup_range(
    num_tokens: int, num_computed_tokens: int, chunk_tokens: int, max_load_tokens: int | None
) -> ChunkRange:
    """Chunks that could extend a local prefix of `num_computed_tokens`. The first may be in part on the device."""
    usable_tokens = num_tokens - 1
    if max_load_tokens is not None:
        usable_tokens = min(usable_tokens, num_computed_tokens + max_load_tokens)
    return ChunkRange(num_computed_tokens // chunk_tokens, usable_tokens // chunk_tokens)


class Prefix(NamedTuple):
    """How far the looked-up chunks are readable: `hits` leading ones; `stop` is what ended them (None: nothing did)."""

    hits: int
    stop: LookupResult | None


_NOTHING_READABLE = Prefix(0, None)


def readable_prefix(results: Sequence[LookupResult], before: int = 0) -> Prefix:
    """Only what is readable now counts as a hit (D8). `before`: readable chunks in front of those asked for."""
    if results.count(_HIT) == len(results):
        return Prefix(before + len(results), None)
    hits = next(index for index, result in enumerate(results) if result is not _HIT)
    return Prefix(before + hits, results[hits])


@dataclass(slots=True)
class LookupWait:
    """How long a request has been told to ask again (V1).

    RETRY is bounded from the request's first lookup and is not restarted by a preemption. HIT_PENDING is bounded from
    the last time that a new chunk became readable.

    What was readable before `stop` need not be asked again while the request waits: it is looked at once more when the
    load is prepared.
    """

    first_asked: float | None = None
    best_end: int = -1  # end of the readable prefix, in chunks of the request
    last_progress: float = 0.0
    chunks: ChunkRange | None = None  # that the last question was about, while it is not answered
    stop: Prefix = _NOTHING_READABLE  # what ended the readable prefix of `chunks`
    all_known: bool = True  # no tier was still looking for one of `chunks`

    def resume_at(self, chunks: ChunkRange) -> int:
        """How many leading ones of `chunks` were readable the last time."""
        return self.stop.hits if self.chunks == chunks else 0

    def waits_for_one(self, chunks: ChunkRange) -> bool:
        """Whether all that was to be learnt about `chunks` is known, but when the chunk arrives that stopped them."""
        return self.chunks == chunks and self.stop.stop is _HIT_PENDING and self.all_known

    def note(self, chunks: ChunkRange, prefix: Prefix, *, all_known: bool) -> Prefix:
        """Remember how far `chunks` are readable, and whether a tier still looks for one of them."""
        self.chunks, self.stop, self.all_known = chunks, prefix, all_known
        return prefix

    def should_wait(
        self, end: int, stop: LookupResult | None, now: float, retry_timeout: float, pending_timeout: float
    ) -> bool:
        """Whether to answer "ask again" when chunks up to `end` are readable. Records the question."""
        if self.first_asked is None:
            self.first_asked = now
        if end > self.best_end:
            self.best_end = end
            self.last_progress = now
        if stop is _RETRY:
            return now - self.first_asked < retry_timeout
        if stop is _HIT_PENDING:
            return now - self.last_progress < pending_timeout
        return False

    def answered(self) -> None:
        """The request got its answer: a later lookup counts progress anew, but not the first question."""
        self.best_end = -1
        self.chunks = None


def loadable_tokens(chunks: ChunkRange, hits: int, num_computed_tokens: int, chunk_tokens: int, minimum: int) -> int:
    """Tokens that `hits` chunks add to the local prefix; 0 when fewer than `minimum` (recomputing is faster then)."""
    tokens = (chunks.first + hits) * chunk_tokens - num_computed_tokens
    return tokens if hits and tokens >= max(minimum, 1) else 0
