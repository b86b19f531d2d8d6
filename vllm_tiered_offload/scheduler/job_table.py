"""Device jobs in flight: what each one holds, and when it counts as ended.

A job ends when every rank has acknowledged it, exactly once. Acknowledgements of unknown jobs (none of ours, or
already ended) change nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_tiered_offload.contract.jobs import PreparedLoad, PreparedStore
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.messages import JobAck
from vllm_tiered_offload.scheduler.request_state import RequestState
from vllm_tiered_offload.scheduler.views import BlockView


@dataclass(slots=True, eq=False)
class JobRecord:
    """A load of one request, or what one step stores, of any number of them: part i of the handle is `states[i]`'s.

    Exactly one of `store` and `load` is set.
    """

    job_id: int
    deadline: float  # after it the job no longer counts as pending work (V5); what it holds stays held (D4)
    states: Sequence[RequestState]
    store: PreparedStore | None = None
    load: PreparedLoad | None = None
    pinned: Sequence[BlockView] = ()  # device blocks that the store reads
    acks: int = 0  # ranks that have ended the job, a bit for each
    error: str | None = None  # first failure
    cancelled: bool = False  # a reset made its bytes unwanted
    distrusted: set[OffloadKey] = field(default_factory=set)  # keys of the store whose bytes must not count (D1)


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

    def add_load(self, state: RequestState, load: PreparedLoad, deadline: float) -> JobRecord:
        """A new job that loads for `state`'s request."""
        loading = self._loading
        for key in load.keys:
            loading[key] = loading.get(key, 0) + 1
        return self._add(JobRecord(self._next_id, deadline, (state,), load=load))

    def add_store(
        self, states: Sequence[RequestState], store: PreparedStore, pinned: Sequence[BlockView], deadline: float
    ) -> JobRecord:
        """A new job that stores for these requests."""
        return self._add(JobRecord(self._next_id, deadline, states, store, pinned=pinned))

    def _add(self, record: JobRecord) -> JobRecord:
        self._next_id += 1
        self._jobs[record.job_id] = record
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
            record.acks |= acks[job_id].ranks
            record.error = record.error or acks[job_id].error
            if record.acks.bit_count() >= self.num_ranks:
                ended.append(self.remove(job_id))
        return ended

    def remove(self, job_id: int) -> JobRecord:
        """Take a job out of the table."""
        record = self._jobs.pop(job_id)
        loading = self._loading
        for key in record.load.keys if record.load is not None else ():
            loading[key] -= 1
            if not loading[key]:
                del loading[key]
        return record

    def any_within_deadline(self, now: float) -> bool:
        """Whether a job is in flight that may still be waited for."""
        return any(record.deadline > now for record in self._jobs.values())
