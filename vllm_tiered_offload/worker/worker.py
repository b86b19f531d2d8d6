"""The worker half: executes the scheduler half's jobs on one rank and reports each exactly once.

It knows no vLLM. The connector calls it in vLLM's order, every step, also without work:

    bind -> start_loads, submit_stores (around the forward pass, either may be left out) -> take_transfer_results
         -> build_report -> unbind

Rules.
 - Loads are submitted by start_loads, or at the latest in take_transfer_results.
 - Stores read what this step's kernels write, so they are submitted only when the forward pass has certainly been
   launched: by submit_stores, or at the latest in unbind (or the next bind). vLLM leaves submit_stores out in steps
   without scheduled tokens, and 0.33 may ask for results before it.
 - The engine is polled in take_transfer_results alone, so what it says (finished receives) and what build_report says
   (acknowledgements) belong to the same poll.
 - A job lives in `_pending` from bind to submission, in `_in_flight` until its result, in `_ended` until the poll that
   delivers it; a result of a job that is not in flight is dropped and counted. So each job has one acknowledgement, and
   each load one finished receive: vLLM asserts on a second one.
 - No exception of an engine leaves this module. An engine that raises from poll is retired: its jobs fail as soon as it
   touches no memory, later jobs fail at once, and vLLM computes what it would have computed anyway.
 - Where several ranks hold the same KV (MLA), one of them writes it into the slot that all of them load from. The
   others only acknowledge a store: it ends when the last rank has, so when the writing one has.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.contract.messages import (
    DeviceJob,
    JobAck,
    RegionAnnouncement,
    StepMessage,
    WorkerReport,
)
from vllm_tiered_offload.worker.copy_engines.base import (
    ComputeEvent,
    CopyEngine,
    CopyResult,
    Direction,
    EngineFactory,
)
from vllm_tiered_offload.worker.copy_plan import PlanBounds, plan_job
from vllm_tiered_offload.worker.layout import GroupLayout

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 10.0
RELEASE_SECONDS = 10.0
CANCELLED = "load cancelled: its bytes are no longer wanted"


@dataclass(slots=True)
class _Job:
    """A job this rank was told of and has not reported."""

    job: DeviceJob
    direction: Direction
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _End:
    """How a job ended."""

    job_id: int
    req_id: str
    direction: Direction
    error: str | None


class OffloadingConnectorWorker:
    """The worker half of one rank. All methods are for vLLM's worker thread; none blocks but `attach`, `release` and
    `shutdown`, each for a bounded time."""

    def __init__(self, config: WorkerConfig, rank: int, engine_factory: EngineFactory, writes: bool = True) -> None:
        """writes: whether this rank moves the bytes of stores; False where another rank writes the same ones."""
        self._config = config
        self._rank = rank
        self._writes = writes
        self._engine_factory = engine_factory
        self._engine: CopyEngine | None = None  # None before attach and after shutdown
        self._retired: str | None = None  # why the engine takes no more jobs, for good
        self._away: str | None = "no KV cache has been registered"  # why there is no memory to copy at the moment
        self._bounds = PlanBounds(config.blocks_per_chunk, 0, {})
        self._pending: list[_Job] = []  # bound, not submitted, oldest first
        self._in_flight: dict[int, _Job] = {}  # submitted; disjoint from _pending
        self._ended: list[_End] = []  # without the engine's help or held back; delivered by take_transfer_results
        self._acks: dict[int, JobAck] = {}  # delivered, not reported
        self._announcement: RegionAnnouncement | None = None
        self._announced = False  # a report with the announcement has left
        self._stats: defaultdict[str, float] = defaultdict(float)

    def attach(self, layouts: Sequence[GroupLayout], slots: np.ndarray) -> None:
        """The KV tensors and the region exist: build the engine. Before the first job, and again for other tensors.

        layouts: one per offloaded KV group. slots: uint8 (num_rows, slot_bytes), the part of each row that this rank
        loads from, and writes if it does. Raises what the engine's constructor raises: a KV cache that cannot be
        copied ends the start, not a request. Again: copies of the former tensors end first, or RuntimeError as in
        `release`.
        """
        if self._engine is not None:
            self._detach(self._engine)
        self._engine = self._engine_factory(self._config, layouts, slots)
        num_blocks = {layout.group_idx: layout.num_blocks for layout in layouts}
        self._bounds = PlanBounds(self._config.blocks_per_chunk, len(slots), num_blocks)
        self._away = None

    def release(self, timeout: float = RELEASE_SECONDS) -> None:
        """The KV cache is about to lose its memory (sleep): no copy touches it any more, and jobs fail until `restore`.

        Blocks up to `timeout` seconds. RuntimeError when a copy goes on longer: the memory must stay, jobs are taken.
        """
        if self._engine is not None and not self._engine_stopped(self._engine, timeout):
            raise RuntimeError(
                f"copies of the KV cache did not end within {timeout:.0f} s, so its memory cannot be released now: "
                "try again when the engine is idle"
            )
        self._away = "the KV cache has been released (sleep)"

    def restore(self) -> None:
        """The KV cache has memory again, where it had it before. Without `release` before it, nothing changes."""
        if self._engine is not None:
            self._away = None

    def describe_engine(self) -> str:
        """What moves the bytes, for the start-up summary."""
        return self._engine.describe() if self._engine is not None else "none"

    def set_announcement(self, announcement: RegionAnnouncement) -> None:
        """Say in each report where the region is, until a step message shows that a report has arrived."""
        self._announcement = announcement
        self._announced = False

    def bind(self, message: StepMessage) -> None:
        """A step begins. Stores left over from earlier steps go first: their forward pass has been launched."""
        self._submit(Direction.STORE)
        if self._announced:
            self._announcement = None
        self._accept(message.loads, Direction.LOAD)
        self._accept(message.stores, Direction.STORE)
        self._cancel(message.cancelled_loads)

    def start_loads(self) -> None:
        """Submit the loads bound so far. Before or after the forward pass: they wait for what has been launched."""
        self._submit(Direction.LOAD)

    def submit_stores(self) -> None:
        """Submit the stores bound so far. Only after this step's forward pass has been launched."""
        self._submit(Direction.STORE)

    def take_transfer_results(self) -> tuple[set[str], set[str]]:
        """Poll. Request ids of loads that ended since the last call, and of those among them that failed.

        Each load shows up exactly once over all calls; a failed or cancelled one in both sets.
        """
        self._submit(Direction.LOAD)
        self._poll()
        finished: set[str] = set()
        failed: set[str] = set()
        held: list[_End] = []
        for end in self._ended:
            if end.direction is Direction.LOAD:
                if end.req_id in finished:
                    # Two loads of one request: a set can say it once only, so the second waits for the next step.
                    held.append(end)
                    continue
                finished.add(end.req_id)
                if end.error is not None:
                    failed.add(end.req_id)
            self._acks[end.job_id] = JobAck(1 << self._rank, end.error)
        self._ended = held
        return finished, failed

    def build_report(self) -> WorkerReport:
        """Acknowledgements of the jobs that take_transfer_results has delivered since the last report."""
        acks, self._acks = self._acks, {}
        self._announced = self._announcement is not None
        return WorkerReport(acks=acks, region=self._announcement, broken=self._retired)

    def unbind(self) -> None:
        """The step is over. Whatever was bound and not submitted is submitted now."""
        self._submit(Direction.LOAD)
        self._submit(Direction.STORE)

    def shutdown(self) -> bool:
        """Stop the engine; bounded. Whether no copy touches device or region any more. May be called again."""
        engine = self._engine
        if engine is None:
            return True
        self._retire("the worker half was shut down", SHUTDOWN_SECONDS)
        self._fail_in_flight(engine)
        stopped = self._engine_stopped(engine)
        if stopped:
            self._engine = None
        return stopped

    def take_stats(self) -> dict[str, float]:
        """What happened since the last call, summed: {store,load}_{bytes,seconds,jobs,failures}.

        `seconds` is copy time of successful jobs, `jobs` counts all that ended, `failures` leaves cancelled ones out;
        plus `duplicate_results`, which stays 0 unless an engine misbehaves.
        """
        stats, self._stats = self._stats, defaultdict(float)
        names = [f"{side.value}_{what}" for side in Direction for what in ("bytes", "seconds", "jobs", "failures")]
        return {name: stats[name] for name in [*names, "duplicate_results"]}

    # Below: jobs on their way from the message to the engine.

    def _accept(self, jobs: list[DeviceJob], direction: Direction) -> None:
        known = {entry.job.job_id for entry in self._pending} | self._in_flight.keys()
        known.update(end.job_id for end in self._ended)
        for job in jobs:
            if job.job_id in known:
                logger.error("job %d was announced twice; the first one counts", job.job_id)
                continue
            known.add(job.job_id)
            self._pending.append(_Job(job, direction))

    def _cancel(self, job_ids: list[int]) -> None:
        """Mark loads as unwanted. One that has been delivered meanwhile is no longer known, and that is fine."""
        unwanted = set(job_ids)
        if not unwanted:
            return
        for entry in [*self._pending, *self._in_flight.values()]:
            if entry.direction is Direction.LOAD and entry.job.job_id in unwanted:
                entry.cancelled = True
        self._ended = [
            _End(end.job_id, end.req_id, end.direction, end.error or CANCELLED)
            if end.direction is Direction.LOAD and end.job_id in unwanted
            else end
            for end in self._ended
        ]

    def _submit(self, direction: Direction) -> None:
        """Hand the bound jobs of one direction to the engine, in order, behind one compute event."""
        ready = [entry for entry in self._pending if entry.direction is direction]
        if not ready:
            return
        self._pending = [entry for entry in self._pending if entry.direction is not direction]
        event: ComputeEvent | None = None
        for entry in ready:
            if entry.cancelled or (direction is Direction.STORE and not self._writes):
                self._end(entry, None)
                continue
            try:
                event = self._submit_one(entry, event)
            except Exception as error:
                logger.warning("rank %d: %s job %d failed: %s", self._rank, direction.value, entry.job.job_id, error)
                self._end(entry, f"{type(error).__name__}: {error}")

    def _submit_one(self, entry: _Job, event: ComputeEvent | None) -> ComputeEvent:
        """Raises when the job cannot start. The event is recorded once per batch and returned for the next job."""
        if self._engine is None or self._retired is not None or self._away is not None:
            raise RuntimeError(self._retired or self._away)
        plans = plan_job(entry.job, self._bounds)
        event = event or self._engine.record_compute_event()
        self._engine.submit(entry.job.job_id, entry.direction, plans, event)
        self._in_flight[entry.job.job_id] = entry
        return event

    # Below: jobs on their way from the engine to the report.

    def _poll(self) -> None:
        if self._engine is None:
            return
        if self._retired is not None:
            self._fail_in_flight(self._engine)
            return
        try:
            results = self._engine.poll()
        except Exception as error:
            logger.exception("rank %d: the copy engine is broken; offloading stops, serving goes on", self._rank)
            self._retire(f"the copy engine is broken: {type(error).__name__}: {error}", 0.0)
            self._fail_in_flight(self._engine)
            return
        for result in results:
            self._take(result)

    def _take(self, result: CopyResult) -> None:
        entry = self._in_flight.pop(result.job_id, None)
        if entry is None:
            self._stats["duplicate_results"] += 1
            logger.error("the copy engine reported job %d, which is not in flight; ignored", result.job_id)
            return
        side = entry.direction.value
        # What a failed job has moved is of no use to anyone, and would spoil the bandwidth.
        if result.error is None:
            self._stats[f"{side}_bytes"] += result.num_bytes
            self._stats[f"{side}_seconds"] += result.seconds
        self._end(entry, result.error)

    def _end(self, entry: _Job, error: str | None) -> None:
        side = entry.direction.value
        self._stats[f"{side}_jobs"] += 1
        self._stats[f"{side}_failures"] += error is not None
        if entry.cancelled:
            error = error or CANCELLED
        self._ended.append(_End(entry.job.job_id, entry.job.req_id, entry.direction, error))

    def _detach(self, engine: CopyEngine) -> None:
        """The engine's last results are taken, and it is gone. Raises as `release` does."""
        self.release()
        self._stop(engine, 0.0)
        self._poll()
        self._engine = None

    def _retire(self, reason: str, timeout: float) -> None:
        """Give the engine no more jobs and tell it to stop."""
        self._retired = self._retired or reason
        if self._engine is not None:
            self._stop(self._engine, timeout)

    def _stop(self, engine: CopyEngine, timeout: float) -> None:
        try:
            engine.shutdown(timeout)
        except Exception:
            logger.exception("rank %d: the copy engine did not shut down cleanly", self._rank)

    def _fail_in_flight(self, engine: CopyEngine) -> None:
        """End what is in flight, once the engine touches no memory: before, a late copy could hit a reused block."""
        if not self._in_flight or not self._engine_stopped(engine):
            return
        for entry in self._in_flight.values():
            self._end(entry, self._retired)
        self._in_flight.clear()

    def _engine_stopped(self, engine: CopyEngine, timeout: float = 0.0) -> bool:
        try:
            return engine.wait(timeout)
        except Exception:
            return True  # the device is lost, and its copies with it
