"""What the layers below the scheduler half are asked for, and what they answer.

Directions: store = device -> CPU tier, cascade = CPU tier -> secondary tier, promotion = secondary tier -> CPU tier,
load = CPU tier -> device.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm_tiered_offload.contract.keys import OffloadKey


class LookupResult(Enum):
    """What a layer knows about one key."""

    HIT = "hit"  # present and readable now
    MISS = "miss"
    HIT_PENDING = "hit_pending"  # present, not readable yet: something that will end is filling it
    RETRY = "retry"  # not known yet: the answer is being worked out elsewhere

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call


class OffloadPolicy(Enum):
    """Which blocks of a request a tier wants to be offered."""

    BLOCK_LEVEL = "block_level"  # only newly computed blocks
    REQUEST_LEVEL = "request_level"  # every block of the request, prefix hits too


@dataclass(frozen=True, slots=True)
class RequestOffloadingContext:
    """A layer's answer to `on_new_request`."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


@dataclass(frozen=True, slots=True)
class ReqContext:
    """What a layer may know about a request: its id and the client's kv_transfer_params.

    With `memory_only` its keys do not name its bytes well enough to outlive or to leave the process (D5).
    """

    req_id: str
    kv_transfer_params: Mapping[str, Any] | None = None
    memory_only: bool = False


@dataclass(slots=True, eq=False)
class PreparedStore:
    """Rows reserved for the offers of one call; hand it back to `complete_store` exactly once if `keys` is non-empty.

    `keys[i]` goes to row `block_ids[i]`. `taken[n]` of the keys are of offer n, offers in order. `accepted[n]` counts
    the leading keys of offer n that need no further offer: each is in `keys`, already present, or already being stored.
    The rest was declined for want of room (V3).
    """

    keys: tuple[OffloadKey, ...]
    block_ids: tuple[int, ...]
    accepted: Sequence[int]
    taken: Sequence[int]
    generation: int = 0

    @property
    def num_accepted(self) -> int:
        """Accepted keys of all offers."""
        return sum(self.accepted)

    def parts(self) -> Iterator[tuple[OffloadKey, ...]]:
        """The keys of each offer that has any."""
        end = 0
        for count in self.taken:
            if count:
                end += count
                yield self.keys[end - count : end]


@dataclass(slots=True, eq=False)
class PreparedLoad:
    """Rows pinned for a load; hand it back to `complete_load` exactly once if `keys` is non-empty.

    `keys[i]` is read from row `block_ids[i]`. `keys` is a leading part of what was asked for: it ends before the
    first key that is not readable, so a row that vanished shortens the answer and never the load (D8).
    """

    keys: tuple[OffloadKey, ...]
    block_ids: tuple[int, ...]
    generation: int = 0


@dataclass(frozen=True, slots=True)
class JobMetadata:
    """One job for a secondary tier: move `keys[i]` between the medium and region row `block_ids[i]`."""

    job_id: int
    keys: tuple[OffloadKey, ...]
    block_ids: tuple[int, ...]
    is_promotion: bool
    req_context: ReqContext


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended: each job has exactly one. `successful_keys` may be a part of the job's keys (D6).

    `skipped_keys` are others that a store left out on purpose, because they are not worth a write: no failure.
    """

    job_id: int
    success: bool
    successful_keys: tuple[OffloadKey, ...]
    skipped_keys: tuple[OffloadKey, ...] = ()
