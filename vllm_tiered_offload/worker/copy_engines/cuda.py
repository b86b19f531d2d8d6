"""The device copy engine: CUDA, and what differs from it by name only (ROCm, XPU).

Theory of operation. Each direction is a *lane*: a stream, and one thread that launches on it. A job passes through

    waiting    submitted, its lane's thread has not come to it
    launched   behind its event, on the lane's stream; `end` is an event behind its last copy
    ended      `end` was seen complete (or nothing had been launched): its result waits for the next poll

Why threads: a driver may block whoever launches, because the stream's queue is full, the memory pageable or a kernel
has to be compiled. The model's thread records one event a step, and asks events whether they are complete.

Order (D3). Stores and loads run after the event that they were submitted with: a wait that the device keeps, on the
lane's stream, so nobody blocks. Loads and stores are on streams of their own, so a load overtakes stores that wait for
a forward pass; jobs of one direction run in the order of their submission. A result needs an event that the host has
seen complete, so kernels launched later see the bytes.

Failures. A launch that raises fails its job alone, but what it had launched runs on: the job ends when `end` is
complete, like any other. If not even an event can be had, the lane's thread waits for the stream; if that raises too,
the device is lost, and poll and wait raise from then on.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.contract.seams import JobExecutor
from vllm_tiered_offload.worker.copy_engines.affinity import copy_executor
from vllm_tiered_offload.worker.copy_engines.base import ComputeEvent, CopyEngine, CopyResult, Direction
from vllm_tiered_offload.worker.copy_engines.choice import DeviceChoice, device_choice
from vllm_tiered_offload.worker.copy_engines.descriptor_pool import DescriptorPool
from vllm_tiered_offload.worker.copy_engines.device import CopyDevice, Descriptors, DeviceError, DeviceEvent, Stream
from vllm_tiered_offload.worker.copy_engines.fragments import BlockFragments, block_fragments, copies_of
from vllm_tiered_offload.worker.copy_engines.host_rows import prepare_rows
from vllm_tiered_offload.worker.copy_engines.torch_device import BatchedOp, TorchDevice
from vllm_tiered_offload.worker.copy_plan import CopyPlan
from vllm_tiered_offload.worker.layout import GroupLayout, refuse_unfit

WAIT_STEP = 0.0005
# Copies of one launch: the device moves them while descriptors of the next are written.
LAUNCH_COPIES = 4096


@dataclass(slots=True, eq=False)
class _Job:
    """A submitted job. Its lane's thread alone touches it between `waiting` and `launched`."""

    job_id: int
    direction: Direction
    plans: list[CopyPlan]
    after: ComputeEvent | None
    num_bytes: int = 0
    error: str | None = None
    begin: DeviceEvent | None = None
    end: DeviceEvent | None = None  # None: nothing of it is on the device any more
    buffers: list[Descriptors] = field(default_factory=list)  # read by its copies until they have ended


@dataclass(slots=True, eq=False)
class _Lane:
    """One direction. The deques are guarded by the engine's lock, oldest job first; `launching` is in neither."""

    direction: Direction
    stream: Stream
    executor: JobExecutor
    waiting: deque[_Job] = field(default_factory=deque)
    launching: _Job | None = None
    launched: deque[_Job] = field(default_factory=deque)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.launching or self.launched)


class CudaCopyEngine(CopyEngine):
    """See the module text. Raises ValueError when a layout and the slots do not fit, DeviceError when nothing can copy.

    layouts: one per offloaded KV group, all on `device`. slots: uint8 (num_rows, slot_bytes), this rank's part of each
    row; they are pinned here and given back in `shutdown`.
    executor_factory: a thread for each direction; each must run its tasks one after the other, in order.
    pause: what `wait` does between two looks.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        slots: np.ndarray,
        blocks_per_chunk: int,
        device: CopyDevice,
        executor_factory: Callable[[], JobExecutor] | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        for layout in layouts:
            refuse_unfit(layout, slots, blocks_per_chunk)
        self._layouts = {layout.group_idx: layout for layout in layouts}
        self._fragments: dict[int, BlockFragments] = {layout.group_idx: block_fragments(layout) for layout in layouts}
        self._slots = slots
        self._device = device
        self._pause = pause
        self._pool = DescriptorPool(device.descriptors)
        self._rows = prepare_rows(slots, device)
        self._choice: DeviceChoice = device_choice(device.methods(layouts, slots), self._rows.pinned)
        make = executor_factory or (lambda: copy_executor(1))
        self._lanes = {
            direction: _Lane(direction, device.open_stream(direction is Direction.LOAD), make())
            for direction in Direction
        }
        self._lock = threading.Lock()  # guards all that follows, and the lanes' jobs
        self._results: list[CopyResult] = []  # ended, not polled
        self._lost: str | None = None  # why the device is lost
        self._closed = False

    def describe(self) -> str:
        node = "" if self._rows.node is None else f", rows on memory node {self._rows.node}"
        return f"{self._device.name}, {self._choice}{node}"

    def record_compute_event(self) -> ComputeEvent:
        return self._device.record_compute()

    def submit(
        self, job_id: int, direction: Direction, plans: Sequence[CopyPlan], after: ComputeEvent | None = None
    ) -> None:
        job = _Job(job_id, direction, [plan for plan in plans if plan.num_blocks], after)
        unknown = [plan.group_idx for plan in job.plans if plan.group_idx not in self._layouts]
        if unknown:
            raise ValueError(f"job {job_id}: the copy engine knows no KV group {unknown[0]}")
        lane = self._lanes[direction]
        with self._lock:
            if self._closed or self._lost is not None:
                raise DeviceError(f"job {job_id}: {self._lost or 'the copy engine is shut down'}")
            lane.waiting.append(job)
        try:
            lane.executor.submit(lambda: self._launch_next(lane))
        except BaseException:
            with self._lock:
                lane.waiting.remove(job)
            raise

    def poll(self) -> list[CopyResult]:
        with self._lock:
            self._collect()
            results, self._results = self._results, []
            return results

    def wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                self._collect()
                if not any(lane.busy for lane in self._lanes.values()):
                    return True
            if time.monotonic() >= deadline:
                return False
            self._pause(WAIT_STEP)

    def shutdown(self, timeout: float) -> bool:
        with self._lock:
            self._closed = True
            for lane in self._lanes.values():
                while lane.waiting:
                    job = lane.waiting.popleft()
                    job.error = "the copy engine was shut down before the copy"
                    self._finish(job)
        try:
            ended = self.wait(timeout)
        finally:
            for lane in self._lanes.values():
                lane.executor.shutdown(wait=False)
        if ended:
            self._rows.release()
        return ended

    # Below: the lanes' threads.

    def _launch_next(self, lane: _Lane) -> None:
        """Launch the oldest waiting job. Never raises: an error is the job's, or the device's."""
        with self._lock:
            if not lane.waiting:
                return
            job = lane.launching = lane.waiting.popleft()
        lost: str | None = None
        try:
            self._launch(lane, job)
        except Exception as error:  # whatever it was, the job has failed and the engine lives
            job.error = f"{type(error).__name__}: {error}"
        try:
            self._mark_end(lane, job)
        except Exception as error:
            lost = f"the device is lost: {type(error).__name__}: {error}"
        with self._lock:
            lane.launching = None
            lane.launched.append(job)
            self._lost = self._lost or lost

    def _launch(self, lane: _Lane, job: _Job) -> None:
        self._device.enter_thread()
        if isinstance(job.after, DeviceEvent):
            self._device.wait_event(lane.stream, job.after)
        elif job.after is not None:
            job.after.synchronize()
        job.begin = self._device.record(lane.stream)
        for plan in job.plans:
            fragments = self._fragments[plan.group_idx]
            at_once = max(1, LAUNCH_COPIES // len(fragments.length))
            for start in range(0, plan.num_blocks, at_once):
                self._launch_part(lane, job, plan.part(start, start + at_once), fragments)

    def _launch_part(self, lane: _Lane, job: _Job, plan: CopyPlan, fragments: BlockFragments) -> None:
        copies = copies_of(plan, fragments, self._layouts[plan.group_idx].block_bytes, self._slots)
        buffer = self._pool.take(len(copies.length))
        job.buffers.append(buffer)
        buffer.fill(job.direction, copies)
        self._choice.method(job.direction, copies).launch(buffer, lane.stream)
        job.num_bytes += copies.num_bytes

    def _mark_end(self, lane: _Lane, job: _Job) -> None:
        """An event behind all that the job has launched, or the certainty that nothing of it runs; else raises."""
        try:
            job.end = self._device.record(lane.stream)
        except Exception as error:
            job.error = job.error or f"{type(error).__name__}: {error}"
            self._device.drain(lane.stream)

    # Below: with the lock held.

    def _collect(self) -> None:
        """Take what has ended. Raises DeviceError when the device is lost, or what the device raises."""
        if self._lost is not None:
            raise DeviceError(self._lost)
        for lane in self._lanes.values():
            while lane.launched and (lane.launched[0].end is None or lane.launched[0].end.is_complete()):
                self._finish(lane.launched.popleft())

    def _finish(self, job: _Job) -> None:
        """The job touches no memory any more. Once per job."""
        for buffer in job.buffers:
            self._pool.give_back(buffer)
        job.buffers.clear()
        seconds = 0.0
        if job.error is None and job.begin is not None and job.end is not None:
            seconds = job.end.seconds_since(job.begin)
        self._results.append(CopyResult(job.job_id, job.direction, job.error, job.num_bytes, seconds))


def device_engine(
    config: WorkerConfig, layouts: Sequence[GroupLayout], slots: np.ndarray, op: BatchedOp | None = None
) -> CopyEngine:
    """The `EngineFactory` of accelerators, given vLLM's batched copy where the caller has it. Layouts on one device."""
    return CudaCopyEngine(layouts, slots, config.blocks_per_chunk, TorchDevice(layouts[0].device, op))
