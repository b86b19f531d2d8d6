"""The tier's threads. Loads and stores have lanes of their own, so that a load never waits behind stores."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vllm_tiered_offload.contract.seams import JobExecutor
from vllm_tiered_offload.tiers.fs.settings import FsTierSettings

logger = logging.getLogger(__name__)

JOIN_TIMEOUT = 1.0


class Lane:
    """A JobExecutor of daemon threads: one that hangs in a dead filesystem must not keep the process from ending.

    Jobs are done in order; but what one of the threads submits is a part of what it does, and comes first.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        # True for each job; False ends one thread.
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._here = threading.local()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None], /) -> None:
        """Raises RuntimeError after shutdown."""
        if self._closed:
            raise RuntimeError("the lane is closed")
        if hasattr(self._here, "is_ours"):
            self._jobs.appendleft(job)
        else:
            self._jobs.append(job)
        self._wake.put(True)

    def shutdown(self, wait: bool = True) -> None:
        """End the threads after what is queued. Waits at most JOIN_TIMEOUT seconds a thread, if at all."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._wake.put(False)
        if wait:
            for thread in self._threads:
                thread.join(JOIN_TIMEOUT)

    def _work(self) -> None:
        self._here.is_ours = True
        while self._wake.get():
            job = self._jobs.popleft()
            try:
                job()
            except Exception:
                logger.exception("fs tier: a task of %s failed", threading.current_thread().name)
            del job  # it may hold rows


@dataclass(frozen=True, slots=True)
class Lanes:
    """Who runs what: chunk reads, chunk writes, batched lookups, and everything that nobody waits for."""

    read: JobExecutor
    write: JobExecutor
    lookup: JobExecutor
    background: JobExecutor

    @classmethod
    def start(cls, settings: FsTierSettings) -> "Lanes":
        """The threads of production."""
        return cls(
            read=Lane(settings.read_threads, "fs-tier-read"),
            write=Lane(settings.write_threads, "fs-tier-write"),
            lookup=Lane(1, "fs-tier-lookup"),
            background=Lane(1, "fs-tier-background"),
        )

    def shutdown(self) -> None:
        """Tell all lanes to end; waits for none."""
        for lane in (self.read, self.write, self.lookup, self.background):
            lane.shutdown(wait=False)
