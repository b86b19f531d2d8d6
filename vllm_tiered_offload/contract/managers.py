"""The three contracts below the scheduler half.

    OffloadingManager     what the scheduler half talks to
    PrimaryTier           an OffloadingManager that owns the host region's rows
    SecondaryTierManager  a medium behind the primary tier (files, peers, anybody's)

All of them follow the submission contract of `contract.lifecycle`: `on_new_request` comes first for every request,
`on_request_finished` comes exactly once, and after it no prepare_store, prepare_load, submit_store or submit_load
for that request. Completions may still come.

Every method runs on the scheduler thread, must not block, and must not raise because of a medium's trouble, unless its
docstring says otherwise.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import (
    JobMetadata,
    JobResult,
    LookupResult,
    PreparedLoad,
    PreparedStore,
    ReqContext,
    RequestOffloadingContext,
)
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.messages import RegionAnnouncement

PRIMARY_MEDIUM = "cpu"

StoreOffer = tuple[Sequence[OffloadKey], ReqContext]
"""Chunks of one request, in prefix order, that may be stored."""


@dataclass(frozen=True, slots=True)
class ResidencyEvent:
    """Keys that became resident in (`stored`) or left (not `stored`) a medium."""

    keys: tuple[OffloadKey, ...]
    medium: str
    stored: bool


class OffloadingManager(ABC):
    """Decides where chunks live. It moves no bytes: it hands out region rows and is told when a move has ended."""

    @abstractmethod
    def bind_region(self, geometry: RegionGeometry) -> None:
        """The region exists and has this shape. Called once, before any prepare_*; until then everything misses."""

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request that this layer has not seen (or has seen finished) begins. First call for it."""

    @abstractmethod
    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        """One result per key (prefix order), from memory alone. Has no effect on eviction order (see `touch`).

        What another tier has may be set off to the rows, and is HIT_PENDING then.
        """

    def probe(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        """What is known of these chunks, and nothing is moved for it: HIT means that some tier has it.

        Most prompts are new, and nothing behind a chunk that is nowhere, or not known of yet, is of use.
        """
        return self.lookup(keys, req_context)

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """The request uses these keys (prefix order). One recency touch, however often the request calls it (V6)."""

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PreparedLoad:
        """Pin the rows of the longest leading part of `keys` that is readable now. Submit-side."""

    @abstractmethod
    def complete_load(self, prepared: PreparedLoad, failed_keys: Collection[OffloadKey] = ()) -> None:
        """Unpin. `failed_keys` could not be read and are misses from now on (D7). Exactly once per `prepared`."""

    @abstractmethod
    def prepare_stores(self, offers: Sequence[StoreOffer]) -> PreparedStore:
        """Reserve rows for the leading part of each offer that fits, evicting if need be. Submit-side.

        One call for all that a step stores, because a call per request costs more than the answer. Keys that are
        present or being stored get no row and count as accepted. Never evicts a key of this very call, evicts tails
        before heads, and changes nothing but the reservation when no row can be had (V3, V6).
        """

    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PreparedStore:
        """`prepare_stores` for one request."""
        return self.prepare_stores([(keys, req_context)])

    @abstractmethod
    def complete_store(self, prepared: PreparedStore, failed_keys: Collection[OffloadKey] = ()) -> None:
        """The store ended: its keys become readable. `failed_keys` are forgotten, their rows reusable. Exactly once."""

    def open_region(self, announcement: RegionAnnouncement) -> None:
        """Where the region is, for layers that read its bytes. Called once, after bind_region; must not block."""

    def hit_media(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[str]:  # noqa: ARG002
        """The medium that each readable key came from for this request, for attribution."""
        return [PRIMARY_MEDIUM] * len(keys)

    def on_schedule_end(self) -> None:
        """All lookups of this scheduling pass have been made (a good moment to send batched questions)."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No more submit-side calls for this request. Exactly once per on_new_request."""

    def has_pending_work(self) -> bool:
        """Whether work of this layer's own will end only if somebody polls it. Never true for ever (V5)."""
        return False

    def leftovers(self) -> dict[str, int]:
        """Sizes of what must be empty once every request is over and every job has ended, by name. For checks."""
        return {}

    @abstractmethod
    def reset_cache(self) -> None:
        """Forget every key. Rows that somebody still reads or writes are reused only after their completion (L6)."""

    def take_events(self) -> list[ResidencyEvent]:
        """Residency changes since the last call, oldest first."""
        return []

    def get_stats(self) -> Mapping[str, int | float]:
        """Counters and gauges by name; names are the layer's own."""
        return {}

    def shutdown(self) -> None:
        """Release what the layer holds. Bounded in time. May be called more than once."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Readable rows pinned for a peer: `keys[i]` is in row `block_ids[i]` until `PrimaryTier.release`.

    `versions[i]`, from 0 to 2**63 - 1, tells what the row holds from all that it held before: as long as a row's number
    is the same, so is every byte of it, and what was worked out from them still holds.
    """

    lease_id: int
    keys: tuple[OffloadKey, ...]
    block_ids: tuple[int, ...]
    versions: tuple[int, ...]


class RowLeases(Protocol):
    """The part of a PrimaryTier that any thread may use. `PrimaryTier` says what the two do."""

    def lease(self, keys: Sequence[OffloadKey]) -> Lease: ...

    def release(self, lease: Lease) -> None: ...


class PrimaryTier(OffloadingManager):
    """Owns the rows of the host region.

    Everything belongs to the scheduler thread except `lease` and `release`, which any thread may call.
    """

    medium: str

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows of the bound region; 0 before bind_region."""

    @property
    @abstractmethod
    def num_unpinned_rows(self) -> int:
        """Rows that a store could have now: free ones, and ones whose chunk may be evicted."""

    @abstractmethod
    def abandon(self, prepared: PreparedStore) -> None:
        """Forget the keys of a store that is late. Its rows stay taken until its `complete_store` (D4)."""

    @abstractmethod
    def lease(self, keys: Sequence[OffloadKey]) -> Lease:
        """Thread-safe: pin the longest leading part of `keys` that is readable now, under a short lock, without I/O."""

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Thread-safe: end a lease. A second release of the same lease changes nothing."""


class SecondaryTierManager(ABC):
    """A medium behind the primary tier. Moves bytes between region rows and itself on its own threads.

    on_new_request, on_request_finished, get_finished_jobs and shutdown may come before bind_region, everything else
    comes after it. A job's `success` is true exactly when every key of it succeeded.
    """

    medium: str

    @classmethod
    @abstractmethod
    def from_settings(
        cls, raw: Mapping[str, Any], path: str, *, engine_id: str, events: bool = False
    ) -> "SecondaryTierManager":
        """From the tier's own settings block (without `type`), found at `path` of the configuration.

        Raises ValueError with one line that names the key. `engine_id` is unique among live engines. Must not block.
        With `events` somebody takes the residency events; without it none must be kept.
        """

    @abstractmethod
    def bind_region(self, rows: Sequence[memoryview], geometry: RegionGeometry, fingerprint: Fingerprint) -> None:
        """The region can be read and written: `rows[i]` is row i, `geometry.row_bytes` bytes, all ranks' slots.

        `fingerprint` names everything that decides the bytes: what outlives or leaves the process is told apart by it.
        Called once, before any lookup or job.
        """

    def bind_leases(self, leases: RowLeases) -> None:
        """The primary tier's leases, for a tier that hands out rows while the scheduler thread sleeps.

        Called once, after bind_region. A lease pins whatever key is resident: it is the tier's part to hand out only
        chunks that were offered to it, because others may not leave the process (`ReqContext.memory_only`).
        """

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request begins. First call for it. Says which blocks the tier wants to be offered."""

    @abstractmethod
    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        """One result per key, from memory alone; RETRY while the answer is worked out elsewhere."""

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """The request uses these keys (prefix order)."""

    def note_promoted(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """These keys came to host memory from another tier. There is nothing to store: it is for a tier that hands out
        rows of host memory, and may hand out these from now on."""

    @abstractmethod
    def submit_store(self, job: JobMetadata) -> None:
        """Copy rows to the medium. The rows stay pinned until the job's result. Submit-side."""

    @abstractmethod
    def submit_load(self, job: JobMetadata) -> None:
        """Copy from the medium into rows. The rows are the tier's until the job's result. Submit-side."""

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Results since the last call: exactly one per submitted job."""

    def on_schedule_end(self) -> None:
        """All lookups of this scheduling pass have been made."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No more submit_store or submit_load for this request. Exactly once."""

    def has_pending_work(self) -> bool:
        """Whether a submitted job has no result yet. For tests and tools: the hierarchy counts jobs itself."""
        return False

    @abstractmethod
    def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for all jobs; whether all ended. May block: only reset and shutdown call it."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every key. Jobs that are still under way end as failed and leave nothing behind (L6).

        A tier that raises here is not used until a later reset succeeds.
        """

    def take_events(self) -> list[ResidencyEvent]:
        """Residency changes since the last call, oldest first."""
        return []

    def get_stats(self) -> Mapping[str, int | float]:
        """Counters and gauges by name."""
        return {}

    def shutdown(self) -> None:
        """Stop threads, close what is open. Bounded in time. May be called more than once."""
