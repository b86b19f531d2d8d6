"""The copy-engine seam.

It speaks of a *compute stream* (where the model's kernels run, in order, asynchronously to the host) and of copies that
run beside it. Ordering rules, D3, for an engine on any device:

    stores   start after `after`: the kernels launched before it have written the blocks
    loads    start after `after`: the kernels launched before it have read what the blocks held
    results  a job is reported by `poll` when its bytes are where they belong and visible to any kernel launched later

Nothing else is ordered: jobs overtake each other, and an engine starts loads before stores that wait, because a user
waits for a load. That a block is not reused while a store reads it is the scheduler half's promise (pins, D2), and that
no kernel touches a block while a load fills it is vLLM's (the request waits for the finished receive).

All methods are called by one thread, the worker's, and none of them may block it except `wait`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.worker.copy_plan import CopyPlan
from vllm_tiered_offload.worker.layout import GroupLayout


class Direction(Enum):
    """Which way the bytes go."""

    STORE = "store"  # device block -> region row
    LOAD = "load"  # region row -> device block


@dataclass(frozen=True, slots=True)
class CopyResult:
    """How a job ended. `error` is None for success. `seconds` is copy time, without the time in a queue."""

    job_id: int
    direction: Direction
    error: str | None
    num_bytes: int
    seconds: float


class ComputeEvent(ABC):
    """A point in the compute stream."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether all that was launched before the point has run."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until `is_complete`. Any thread may call it."""


class CopyEngine(ABC):
    """Moves blocks between device and region. Layouts and slots are given to the constructor of the engine."""

    @abstractmethod
    def describe(self) -> str:
        """What moves the bytes, and why if there was a choice; one phrase of the start-up summary."""

    @abstractmethod
    def record_compute_event(self) -> ComputeEvent:
        """A point after everything that has been launched on the compute stream so far."""

    @abstractmethod
    def submit(
        self, job_id: int, direction: Direction, plans: Sequence[CopyPlan], after: ComputeEvent | None = None
    ) -> None:
        """Queue a copy and return at once. It starts after `after` (None: whenever).

        The plans have been validated and address each row and device block at most once. When submit raises, nothing
        of the job has started and the job will not be in any poll.
        """

    @abstractmethod
    def poll(self) -> list[CopyResult]:
        """Jobs that ended since the last poll, each submitted job exactly once, success or error text.

        A job that has been reported touches no memory any more, failed or not. A job's failure is its result, never an
        exception: poll raises only when the engine itself is broken, and is not called again then.
        """

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Block up to `timeout` seconds (0 asks without waiting); whether no submitted job touches memory any more.

        May raise when the device is lost and copies cannot run any more.
        """

    @abstractmethod
    def shutdown(self, timeout: float) -> bool:
        """Take no more jobs, end queued ones as failed, give running ones `timeout` seconds; returns as `wait` does.

        `poll` still reports what has ended. May be called more than once.
        """


# Builds the engine of a rank: settings, one layout per offloaded KV group, its slots (uint8, num_rows x slot_bytes).
EngineFactory = Callable[[WorkerConfig, Sequence[GroupLayout], np.ndarray], CopyEngine]
