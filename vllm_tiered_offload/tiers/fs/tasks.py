"""What the scheduler thread has done on lanes, and the messages that come of it."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from vllm_tiered_offload.contract.seams import JobExecutor
from vllm_tiered_offload.tiers.fs.batch import Batch
from vllm_tiered_offload.tiers.fs.faults import Fault
from vllm_tiered_offload.tiers.fs.lanes import Lanes
from vllm_tiered_offload.tiers.fs.messages import Inbox, Loaded, Message, Stored, Trimmed

logger = logging.getLogger(__name__)

P = TypeVar("P")
R = TypeVar("R", bound=Stored | Loaded | Trimmed)


class Tasks:
    """Whatever happens, a lane that is closed included, all that is begun ends in messages in the inbox."""

    def __init__(self, lanes: Lanes, stop: threading.Event) -> None:
        self.lanes = lanes
        self.inbox = Inbox()
        # Set once: what has not begun then is cancelled.
        self._stop = stop

    def run(self, lane: JobExecutor, work: Callable[[], Message], failed: Callable[[Fault], Message]) -> None:
        """Have `work` done, which makes exactly one message; `failed` makes it where there is none."""

        def task() -> None:
            try:
                message = failed(Fault.CANCELLED) if self._stop.is_set() else work()
            except Exception:
                logger.exception("fs tier: a task failed in a way that nobody thought of")
                message = failed(Fault.INTERNAL)
            self.inbox.put(message)

        try:
            lane.submit(task)
        except RuntimeError:
            self.inbox.put(failed(Fault.CANCELLED))

    def run_parts(
        self,
        lane: JobExecutor,
        threads: int,
        parts: Iterable[P],
        do: Callable[[P, R], None],
        new_report: Callable[[], R],
    ) -> None:
        """Have each part done; see Batch."""
        batch: Batch[P, R] = Batch(parts, do, new_report, self.inbox.put, self._stop)
        batch.start(lane, threads)
