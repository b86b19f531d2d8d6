"""Jobs between the primary tier and the tiers behind it: what each holds, and who hears of its end.

A job holds rows until its *release*, which may come after its *result* when the tier is late (tiers/guard.py):

    cascade     leases readable rows; the release ends the lease
    promotion   reserves rows; the result makes its keys readable, or abandons them, and the release frees what is left
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_tiered_offload.contract.jobs import JobMetadata, JobResult, PreparedStore, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import Lease
from vllm_tiered_offload.tiers.guard import TierGuard


@dataclass(slots=True)
class TierJob:
    """One cascade (`lease`) or promotion (`prepared`)."""

    job: JobMetadata
    guard: TierGuard
    lease: Lease | None = None
    prepared: PreparedStore | None = None
    abandoned: bool = False  # a promotion that had its result before its release


@dataclass(frozen=True, slots=True)
class JobEnd:
    """A job's result, and whether its rows are free with it."""

    entry: TierJob
    result: JobResult
    is_released: bool


class TierJobs:
    """Submits to guards and sorts what comes back."""

    def __init__(self, guards: Sequence[TierGuard]) -> None:
        self._guards = guards
        self._next_id = 1
        self._entries: dict[int, TierJob] = {}  # submitted, not released

    def __len__(self) -> int:
        return len(self._entries)

    def submit_cascade(self, guard: TierGuard, lease: Lease, req_context: ReqContext) -> None:
        """Store leased rows in a tier."""
        job = JobMetadata(self._take_id(), lease.keys, lease.block_ids, False, req_context)
        self._submit(TierJob(job, guard, lease=lease))

    def submit_promotion(self, guard: TierGuard, prepared: PreparedStore, req_context: ReqContext) -> None:
        """Load reserved rows from a tier."""
        job = JobMetadata(self._take_id(), prepared.keys, prepared.block_ids, True, req_context)
        self._submit(TierJob(job, guard, prepared=prepared))

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _submit(self, entry: TierJob) -> None:
        self._entries[entry.job.job_id] = entry
        entry.guard.submit(entry.job)

    def collect(self) -> tuple[list[JobEnd], list[TierJob]]:
        """(results, late releases) since the last call. A job's late release is in a later call than its result."""
        ends: list[JobEnd] = []
        late: list[TierJob] = []
        for guard in self._guards:
            results, released = guard.collect()
            gone = {job_id: self._entries.pop(job_id) for job_id in released}
            for result in results:
                freed = gone.pop(result.job_id, None)
                ends.append(JobEnd(freed or self._entries[result.job_id], result, freed is not None))
            late.extend(gone.values())
        return ends, late

    def promoting(self) -> set[OffloadKey]:
        """Keys that a promotion may still bring, or not."""
        return {
            key
            for entry in self._entries.values()
            if entry.prepared is not None and not entry.abandoned
            for key in entry.prepared.keys
        }

    def leased_rows(self) -> int:
        """Rows that cascades hold."""
        return sum(len(entry.lease.block_ids) for entry in self._entries.values() if entry.lease is not None)
