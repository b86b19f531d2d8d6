"""Which chunks to look up for a request, and what to answer vLLM: pure functions of plain data.

The last token of a request is always left to compute, as in vLLM's own prefix cache: its logits are needed, and a
prefix taken from a tier then has the very shape of a prefix taken from the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_tiered_offload.contract.jobs import LookupResult


@dataclass(frozen=True, slots=True)
class ChunkRange:
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


@dataclass(frozen=True, slots=True)
class Prefix:
    """How far the looked-up chunks are readable: `hits` leading ones; `stop` is what ended them (None: nothing did)."""

    hits: int
    stop: LookupResult | None


def readable_prefix(results: Iterable[LookupResult]) -> Prefix:
    """Only what is readable now counts as a hit (D8)."""
    hits = 0
    for result in results:
        if result is not LookupResult.HIT:
            return Prefix(hits, result)
        hits += 1
    return Prefix(hits, None)


@dataclass(slots=True)
class LookupWait:
    """How long a request has been told to ask again (V1).

    RETRY is bounded from the request's first lookup and is not restarted by a preemption. HIT_PENDING is bounded from
    the last time that a new chunk became readable.
    """

    first_asked: float | None = None
    best_hits: int = -1
    last_progress: float = 0.0

    def should_wait(self, prefix: Prefix, now: float, retry_timeout: float, pending_timeout: float) -> bool:
        """Whether to answer "ask again". Records the question."""
        if self.first_asked is None:
            self.first_asked = now
        if prefix.hits > self.best_hits:
            self.best_hits = prefix.hits
            self.last_progress = now
        if prefix.stop is LookupResult.RETRY:
            return now - self.first_asked < retry_timeout
        if prefix.stop is LookupResult.HIT_PENDING:
            return now - self.last_progress < pending_timeout
        return False

    def answered(self) -> None:
        """The request got its answer: a later lookup counts progress anew, but not the first question."""
        self.best_hits = -1


def loadable_tokens(chunks: ChunkRange, hits: int, num_computed_tokens: int, chunk_tokens: int, minimum: int) -> int:
    """Tokens that `hits` chunks add to the local prefix; 0 when fewer than `minimum` (recomputing is faster then)."""
    tokens = (chunks.first + hits) * chunk_tokens - num_computed_tokens
    return tokens if hits and tokens >= max(minimum, 1) else 0
