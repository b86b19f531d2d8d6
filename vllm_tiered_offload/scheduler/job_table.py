"""Device jobs in flight: what each one holds, and when it counts as ended.

A job ends when every rank has acknowledged it, exactly once. Acknowledgements of unknown jobs (none of ours, or
already ended) change nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vllm_tiered_offload.contract.jobs import PreparedLoad, PreparedStore
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.messages import JobAck
from vllm_tiered_offload.scheduler.request_state import RequestState
from vllm_tiered_offload.scheduler.views import BlockView


@dataclass(slots=True)
class JobRecord:
    """One store or load. Exactly one of `store` and `load` is set."""

    job_id: int
    state: RequestState
    deadline: float  # after it the job no longer counts as pending work (V5); what it holds stays held (D4)
    store: PreparedStore | None = None
    load: PreparedLoad | None = None
    pinned: list[BlockView] = field(default_factory=list)  # device blocks that the store reads
    acks: int = 0  # ranks that have ended the job
    error: str | None = None  # first failure
    cancelled: bool = False  # a reset made its bytes unwanted


class JobTable:
    """Jobs by id. `num_ranks` acknowledgements end a job."""

    def __init__(self) -> None:
        self.num_ranks = 1
        self._next_id = 1
        self._jobs: dict[int, JobRecord] = {}  # submitted or queued, not yet acknowledged by every rank
        self._loading: dict[OffloadKey, int] = {}  # loads in _jobs by key, all > 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(self._jobs.values())

    def add(
        self,
        state: RequestState,
        deadline: float,
        *,
        store: PreparedStore | None = None,
        load: PreparedLoad | None = None,
        pinned: list[BlockView] | None = None,
    ) -> JobRecord:
        """A new job of `state`'s request."""
        record = JobRecord(self._next_id, state, deadline, store, load, pinned or [])
        self._next_id += 1
        self._jobs[record.job_id] = record
        state.jobs.add(record.job_id)
        loading = self._loading
        for key in load.keys if load is not None else ():
            loading[key] = loading.get(key, 0) + 1
        return record

    def is_loading(self, key: OffloadKey) -> bool:
        """Whether a load of `key` is in flight, for whatever request."""
        return key in self._loading

    @property
    def num_loading(self) -> int:
        """Keys of loads in flight."""
        return len(self._loading)

    def acknowledge(self, acks: Mapping[int, JobAck]) -> list[JobRecord]:
        """Count acknowledgements; the jobs that ended with them, in order of their ids (loads and stores alike)."""
        ended = []
        for job_id in sorted(acks):
            record = self._jobs.get(job_id)
            if record is None:
                continue
            record.acks += acks[job_id].ranks
            record.error = record.error or acks[job_id].error
            if record.acks >= self.num_ranks:
                ended.append(self.remove(job_id))
        return ended

    def remove(self, job_id: int) -> JobRecord:
        """Take a job out of the table."""
        record = self._jobs.pop(job_id)
        record.state.jobs.discard(job_id)
        loading = self._loading
        for key in record.load.keys if record.load is not None else ():
            loading[key] -= 1
            if not loading[key]:
                del loading[key]
        return record

    def any_within_deadline(self, now: float) -> bool:
        """Whether a job is in flight that may still be waited for."""
        return any(record.deadline > now for record in self._jobs.values())
