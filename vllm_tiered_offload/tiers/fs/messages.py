"""What the tier's threads tell the scheduler thread. `epoch` counts resets: what comes from before one is ignored."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.fs.faults import Fault
from vllm_tiered_offload.tiers.fs.index import Reservation
from vllm_tiered_offload.tiers.fs.jobs import Job


@dataclass(slots=True)
class Stored:
    """A write ended. `fault` None means that the file is there, `moved` the bytes written for it.

    `kept` are victims that are still on disk; `waiters` are the (job, part) that asked for the key; `problem` is a
    line for the user, if there is one.
    """

    epoch: int
    reservation: Reservation
    waiters: list[tuple[Job, int]]
    fault: Fault | None = None
    moved: int = 0
    seconds: float = 0.0
    kept: list[OffloadKey] = field(default_factory=list)
    problem: str | None = None


@dataclass(slots=True)
class Loaded:
    """A read ended; with `fault` None the row holds verified bytes. `discarded`: a bad file was taken away."""

    epoch: int
    job: Job
    part: int
    fault: Fault | None = None
    moved: int = 0
    seconds: float = 0.0
    discarded: bool = False


@dataclass(slots=True)
class Opened:
    """The directory was tried out for writing."""

    epoch: int
    fault: Fault | None
    problem: str | None = None


@dataclass(slots=True)
class Answers:
    """A batch of looked-up keys; bytes of the file, or None where there is none or it could not be seen."""

    epoch: int
    sizes: dict[OffloadKey, int | None]
    fault: Fault | None = None
    problem: str | None = None


@dataclass(slots=True)
class Found:
    """A part of a scan."""

    epoch: int
    files: list[tuple[OffloadKey, int]]


@dataclass(slots=True)
class ScanEnded:
    """`complete`: every file that was there when it began, `started` (clock), has been told of."""

    epoch: int
    complete: bool
    started: float
    problem: str | None = None


@dataclass(slots=True)
class GenerationRemoved:
    """A private generation of `size` bytes is gone from the disk."""

    size: int


Message: TypeAlias = Stored | Loaded | Opened | Answers | Found | ScanEnded | GenerationRemoved


class Inbox:
    """From any thread to the scheduler thread. What a scan finds waits in a queue of its own."""

    def __init__(self) -> None:
        self._urgent: deque[Message] = deque()
        self._bulk: deque[Found | ScanEnded] = deque()
        self._arrived = threading.Event()

    def put(self, message: Message) -> None:
        """Thread-safe."""
        if isinstance(message, Found | ScanEnded):
            self._bulk.append(message)
        else:
            self._urgent.append(message)
            self._arrived.set()

    def wait(self, timeout: float) -> None:
        """Until something urgent is there that was not when `take_urgent` last looked, at most `timeout` seconds."""
        self._arrived.wait(timeout)

    def take_urgent(self) -> Iterator[Message]:
        """All that is there, oldest first."""
        self._arrived.clear()
        while self._urgent:
            yield self._urgent.popleft()

    def take_bulk(self, max_files: int) -> Iterator[Found | ScanEnded]:
        """The oldest, until `max_files` files have been told of."""
        while self._bulk and max_files > 0:
            message = self._bulk.popleft()
            max_files -= len(message.files) if isinstance(message, Found) else 0
            yield message
