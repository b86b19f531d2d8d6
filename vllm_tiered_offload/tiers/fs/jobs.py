"""Jobs of the tier and their parts: exactly one result for each job, when its last chunk has ended."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from vllm_tiered_offload.contract.jobs import JobMetadata, JobResult
from vllm_tiered_offload.contract.keys import OffloadKey


@dataclass(slots=True, eq=False)
class Job:
    """One submitted job. A part is a position in `keys`; each ends exactly once. `epoch` counts resets.

    `failed` are all parts that did not end well, `skipped` those of them that nobody wanted to end otherwise.
    """

    job_id: int
    keys: tuple[OffloadKey, ...]
    req_id: str
    epoch: int
    num_open: int
    failed: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)


class JobTable:
    """One thread owns it."""

    def __init__(self) -> None:
        # Jobs with open parts. By identity: an id that comes twice makes two jobs, and two results.
        self._open: dict[int, Job] = {}
        # Results that nobody took yet.
        self._results: list[JobResult] = []

    @property
    def num_open(self) -> int:
        """Jobs without a result."""
        return len(self._open)

    @property
    def pending(self) -> bool:
        """Whether a job has no result, or a result was not taken."""
        return bool(self._open or self._results)

    def begin(self, metadata: JobMetadata, epoch: int) -> Job:
        """A job, all of whose parts are open; one without parts has ended."""
        job = Job(metadata.job_id, metadata.keys, metadata.req_context.req_id, epoch, len(metadata.keys))
        self._open[id(job)] = job
        self._finish_if_over(job, epoch)
        return job

    def end_parts(self, job: Job, good: int, failed: Iterable[int], epoch: int) -> None:
        """So many parts ended well, and these ended badly. After a reset nothing of an older job counts as good."""
        before = len(job.failed)
        job.failed.update(failed)
        ended = good + len(job.failed) - before
        if ended:
            job.num_open -= ended
            self._finish_if_over(job, epoch)

    def skip_parts(self, job: Job, parts: Collection[int], epoch: int) -> None:
        """These parts were left out on purpose."""
        job.skipped.update(parts)
        self.end_parts(job, 0, parts, epoch)

    def take_results(self) -> list[JobResult]:
        results, self._results = self._results, []
        return results

    def _finish_if_over(self, job: Job, epoch: int) -> None:
        if job.num_open:
            return
        del self._open[id(job)]
        keys, skipped = job.keys, tuple(job.keys[part] for part in sorted(job.skipped))
        if job.epoch != epoch:
            keys, skipped = (), ()
        elif job.failed:
            keys = tuple(key for part, key in enumerate(job.keys) if part not in job.failed)
        self._results.append(JobResult(job.job_id, len(keys) == len(job.keys), keys, skipped))
