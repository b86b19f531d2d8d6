"""The host copy engine: KV tensors in host memory, copies on threads of its own.

Theory of operation. A job is cut into slices, each one numpy call of a few megabytes. Every executor task copies one
slice, the most urgent at the moment it runs, and puts the next task in line; so a load that arrives behind a long
store waits for one slice at most. Tasks never outnumber the threads, and hence no result is lost or doubled:

    a job sits in `_queues` while it has slices that nobody took
    a job is finished by whoever ends its last taken slice after it left the queue (`taken == 0`)

On vLLM's CPU backend kernels are synchronous: what the model thread launched has run when it calls us, and a compute
event is complete when recorded. A copy still waits for the event it is given, so any event will do.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.contract.seams import Clock, JobExecutor, monotonic
from vllm_tiered_offload.worker.copy_engines.affinity import copy_executor
from vllm_tiered_offload.worker.copy_engines.base import ComputeEvent, CopyEngine, CopyResult, Direction
from vllm_tiered_offload.worker.copy_engines.choice import host_way
from vllm_tiered_offload.worker.copy_engines.host_copy import HostGroupCopier
from vllm_tiered_offload.worker.copy_plan import CopyPlan
from vllm_tiered_offload.worker.layout import GroupLayout


class CompletedEvent(ComputeEvent):
    """A point in a synchronous compute stream: complete when recorded."""

    def is_complete(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


@dataclass(slots=True, eq=False)
class _Job:
    """A submitted job. Everything is guarded by the engine's lock except the copying itself."""

    job_id: int
    direction: Direction
    plans: deque[CopyPlan]  # not fully taken yet; the first one up to `start`
    after: ComputeEvent | None
    start: int = 0
    taken: int = 0  # slices being copied now
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None

    def drop_rest(self, error: str) -> None:
        """Take no more slices; the first error stands."""
        self.error = self.error or error
        self.plans.clear()


@dataclass(slots=True)
class _Slice:
    job: _Job
    plan: CopyPlan
    start: int
    stop: int


@dataclass(slots=True)
class _Queues:
    """Jobs with slices left to take. A job is in at most one queue, and in none once its slices are taken."""

    loads: deque[_Job] = field(default_factory=deque)
    stores: deque[_Job] = field(default_factory=deque)

    def of(self, direction: Direction) -> deque[_Job]:
        return self.loads if direction is Direction.LOAD else self.stores

    def most_urgent(self) -> deque[_Job] | None:
        """Loads are on a user's critical path, stores are not. None when both are empty."""
        return self.loads or self.stores or None

    def __len__(self) -> int:
        return len(self.loads) + len(self.stores)


class HostCopyEngine(CopyEngine):
    """See the module text. Raises ValueError when a layout and the slots do not fit each other.

    layouts: one per offloaded KV group. slots: uint8 (num_rows, slot_bytes), this rank's part of each row.
    executor: runs copies (default: `threads` threads of its own); at most `threads` tasks are in it at any time.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        slots: np.ndarray,
        blocks_per_chunk: int,
        threads: int = 1,
        executor: JobExecutor | None = None,
        clock: Clock = monotonic,
    ) -> None:
        if threads < 1:
            raise ValueError(f"cpu.copy_threads is {threads}: copies need at least one thread")
        kernel, self._way = host_way()
        self._copiers = {
            layout.group_idx: HostGroupCopier(layout, slots, blocks_per_chunk, kernel) for layout in layouts
        }
        self._threads = threads
        self._clock = clock
        self._executor = executor or copy_executor(threads)
        self._idle = threading.Condition()  # its lock guards all that follows; notified when a job ends
        self._queues = _Queues()
        self._tasks = 0  # in the executor, at most `threads`
        self._unfinished = 0  # jobs submitted and without result
        self._results: list[CopyResult] = []  # ended, not polled
        self._closed = False

    def describe(self) -> str:
        return f"host, {self._threads} thread(s), {self._way}"

    def record_compute_event(self) -> ComputeEvent:
        return CompletedEvent()

    def submit(
        self, job_id: int, direction: Direction, plans: Sequence[CopyPlan], after: ComputeEvent | None = None
    ) -> None:
        job = _Job(job_id, direction, deque(plan for plan in plans if plan.num_blocks), after)
        unknown = [plan.group_idx for plan in job.plans if plan.group_idx not in self._copiers]
        if unknown:
            raise ValueError(f"job {job_id}: the copy engine knows no KV group {unknown[0]}")
        with self._idle:
            if self._closed:
                raise RuntimeError(f"job {job_id}: the copy engine is shut down")
            self._unfinished += 1
            if not job.plans:
                self._finish(job)
                return
            self._queues.of(direction).append(job)
            try:
                self._start_tasks()
            except BaseException:
                self._queues.of(direction).remove(job)
                self._unfinished -= 1
                raise

    def poll(self) -> list[CopyResult]:
        with self._idle:
            results, self._results = self._results, []
            return results

    def wait(self, timeout: float) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: not self._unfinished, timeout)

    def shutdown(self, timeout: float) -> bool:
        with self._idle:
            self._closed = True
            self._fail_queued("the copy engine was shut down before the copy")
        ended = self.wait(timeout)
        self._executor.shutdown(wait=False)
        return ended

    # Below: the executor's side.

    def _start_tasks(self) -> None:
        """Put a task in line for each free thread while a slice is left. Called with the lock held."""
        while len(self._queues) and self._tasks < self._threads:
            self._executor.submit(self._run_task)
            self._tasks += 1

    def _run_task(self) -> None:
        """Copy one slice, then put the next task in line. Never raises: an error is the job's."""
        with self._idle:
            piece = self._take_slice()
        if piece is not None:
            self._copy(piece)
        with self._idle:
            self._tasks -= 1
            if self._closed:
                return
            try:
                self._start_tasks()
            except RuntimeError as error:  # the executor was shut down by somebody else
                self._fail_queued(f"the copy threads are gone: {error}")

    def _take_slice(self) -> _Slice | None:
        queue = self._queues.most_urgent()
        if queue is None:
            return None
        job = queue[0]
        plan, start = job.plans[0], job.start
        stop = self._copiers[plan.group_idx].end_of_call(plan, start)
        job.start = stop
        if stop == plan.num_blocks:
            job.plans.popleft()
            job.start = 0
        if not job.plans:
            queue.popleft()
        job.taken += 1
        return _Slice(job, plan, start, stop)

    def _copy(self, piece: _Slice) -> None:
        job, copied, error = piece.job, 0, None
        began = self._clock()
        try:
            if job.after is not None:
                job.after.synchronize()
                began = self._clock()
            copied = self._copiers[piece.plan.group_idx].copy(job.direction, piece.plan, piece.start, piece.stop)
        except Exception as caught:  # whatever it was, the job has failed and the engine lives
            error = f"{type(caught).__name__}: {caught}"
        with self._idle:
            job.taken -= 1
            job.num_bytes += copied
            job.seconds += self._clock() - began
            if error is not None and job.plans:
                self._queues.of(job.direction).remove(job)
            if error is not None:
                job.drop_rest(error)
            if not job.taken and not job.plans:
                self._finish(job)

    def _finish(self, job: _Job) -> None:
        """The job touches no memory any more. Called with the lock held, once per job."""
        self._results.append(CopyResult(job.job_id, job.direction, job.error, job.num_bytes, job.seconds))
        self._unfinished -= 1
        self._idle.notify_all()

    def _fail_queued(self, error: str) -> None:
        """End what waits; a job with slices in the making ends with the last of them. Called with the lock held."""
        for queue in (self._queues.loads, self._queues.stores):
            while queue:
                job = queue.popleft()
                job.drop_rest(error)
                if not job.taken:
                    self._finish(job)


def host_engine(config: WorkerConfig, layouts: Sequence[GroupLayout], slots: np.ndarray) -> CopyEngine:
    """The `EngineFactory` of vLLM's CPU backend."""
    return HostCopyEngine(layouts, slots, config.blocks_per_chunk, threads=config.copy_threads)
