"""Parts of one job, for all threads of a lane at once."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from vllm_tiered_offload.contract.seams import JobExecutor
from vllm_tiered_offload.tiers.fs.faults import Fault

logger = logging.getLogger(__name__)

TELL_SECONDS = 0.1  # what has ended is told of at least this often: nothing but a part that hangs is held back by it

P = TypeVar("P")
R = TypeVar("R", bound="Report[Any]")


class Report(ABC, Generic[P]):
    """A message about parts that ended."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether it tells of no part."""

    @abstractmethod
    def fail(self, part: P, fault: Fault) -> None:
        """The part ended without being done."""


class Batch(Generic[P, R]):
    """A queue of parts that every thread takes from in order, so that none is idle while another has parts to do.

    Whatever happens, each part ends in exactly one report. `do` adds its part to the report it is given, last of all.
    """

    def __init__(
        self,
        parts: Iterable[P],
        do: Callable[[P, R], None],
        new_report: Callable[[], R],
        tell: Callable[[R], None],
        stop: threading.Event,
    ) -> None:
        # A deque, because taking from it needs no lock.
        self._parts = deque(parts)
        self._do = do
        self._new_report = new_report
        self._tell = tell
        self._stop = stop
        self._cancelled = False
        self._helpers: deque[None] = deque()  # one for each thread that may still be asked to help

    def start(self, lane: JobExecutor, threads: int) -> None:
        """Have it done by at most `threads` threads of the lane; one that is closed cancels every part."""
        if not self._parts:
            return
        self._helpers.extend([None] * (min(threads, len(self._parts)) - 1))
        try:
            lane.submit(partial(self._run, lane))
        except RuntimeError:
            self._cancelled = True
            self._work()

    def _run(self, lane: JobExecutor) -> None:
        self._ask_for_help(lane)
        self._work()

    def _ask_for_help(self, lane: JobExecutor) -> None:
        """Each thread asks two more: waking all of them one by one would keep the scheduler thread from its work."""
        with suppress(IndexError, RuntimeError):  # there are enough; the lane was closed, and this thread does the rest
            for _ in range(2):
                if self._parts:
                    self._helpers.popleft()
                    lane.submit(partial(self._run, lane))

    def _work(self) -> None:
        report, began = self._new_report(), time.monotonic()
        while self._parts:
            try:
                part = self._parts.popleft()
            except IndexError:  # another thread was quicker
                break
            self._do_one(part, report)
            if time.monotonic() - began >= TELL_SECONDS:
                self._tell(report)
                report, began = self._new_report(), time.monotonic()
        if not report.is_empty:
            self._tell(report)

    def _do_one(self, part: P, report: R) -> None:
        if self._cancelled or self._stop.is_set():
            report.fail(part, Fault.CANCELLED)
            return
        try:
            self._do(part, report)
        except Exception:
            logger.exception("fs tier: a chunk failed in a way that nobody thought of")
            report.fail(part, Fault.INTERNAL)
