"""What the tier's threads tell the scheduler thread. `epoch` counts resets: what comes from before one is ignored."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.fs.batch import Report
from vllm_tiered_offload.tiers.fs.faults import Fault
from vllm_tiered_offload.tiers.fs.index import Write
from vllm_tiered_offload.tiers.fs.jobs import Job


@dataclass(slots=True)
class Stored(Report[Write]):
    """Writes ended. `seconds` are those of the thread that did them."""

    epoch: int
    writes: list[Write] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_empty(self) -> bool:
        return not self.writes

    def fail(self, part: Write, fault: Fault) -> None:
        """Says nothing about the victims: they are looked for again."""
        part.fault = fault
        part.kept = [victim for victim, _ in part.victims]
        self.writes.append(part)

    def join(self, other: Message) -> bool:
        """Tell what `other` tells as well, where that is of the same epoch; whether it is."""
        if not isinstance(other, Stored) or other.epoch != self.epoch:
            return False
        self.writes += other.writes
        self.seconds += other.seconds
        return True


@dataclass(slots=True)
class Loaded(Report[int]):
    """Reads for a job ended. The rows of the `good` parts hold verified bytes, `moved` altogether.

    `bad` are (part, fault, whether a bad file was taken away); `seconds` are those of the thread that did them.
    """

    job: Job
    good: list[int] = field(default_factory=list)
    bad: list[tuple[int, Fault, bool]] = field(default_factory=list)
    moved: int = 0
    seconds: float = 0.0

    @property
    def is_empty(self) -> bool:
        return not (self.good or self.bad)

    def fail(self, part: int, fault: Fault, discarded: bool = False) -> None:
        self.bad.append((part, fault, discarded))

    def join(self, other: Message) -> bool:
        """Tell what `other` tells as well, where that is of the same job; whether it is."""
        if not isinstance(other, Loaded) or other.job is not self.job:
            return False
        self.good += other.good
        self.bad += other.bad
        self.moved += other.moved
        self.seconds += other.seconds
        return True


@dataclass(slots=True)
class Opened:
    """The directory was tried out for writing."""

    epoch: int
    fault: Fault | None
    problem: str | None = None


@dataclass(slots=True)
class Answers:
    """A batch of looked-up keys: each is `found` (key, bytes), or `absent`: there is no file or none could be seen."""

    epoch: int
    asked: Sequence[OffloadKey]
    found: list[tuple[OffloadKey, int]] = field(default_factory=list)
    absent: Sequence[OffloadKey] = ()
    fault: Fault | None = None
    problem: str | None = None


@dataclass(slots=True)
class Found:
    """A part of a scan: files that are news, and keys whose file is gone."""

    epoch: int
    files: Sequence[tuple[OffloadKey, int]]
    gone: Sequence[OffloadKey] = ()


@dataclass(slots=True)
class ScanEnded:
    """A scan that began at `started` (clock) and took `seconds`.

    `complete`: all that was there when it began has been told of, and `elsewhere` is what the rest of the root takes.
    """

    epoch: int
    complete: bool
    started: float
    seconds: float = 0.0
    elsewhere: int = 0
    problem: str | None = None


@dataclass(slots=True)
class Trimmed(Report[tuple[OffloadKey, int]]):
    """Victims (key, bytes) were unlinked; `kept` could not be."""

    epoch: int
    victims: list[tuple[OffloadKey, int]] = field(default_factory=list)
    kept: list[OffloadKey] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.victims

    def fail(self, part: tuple[OffloadKey, int], fault: Fault) -> None:  # noqa: ARG002
        self.victims.append(part)
        self.kept.append(part[0])


@dataclass(slots=True)
class GenerationRemoved:
    """A private generation of `size` bytes is gone from the disk."""

    size: int


Message: TypeAlias = Stored | Loaded | Trimmed | Opened | Answers | Found | ScanEnded | GenerationRemoved


class Inbox:
    """From any thread to the scheduler thread. What a scan finds waits in a queue of its own."""

    def __init__(self) -> None:
        self.urgent: deque[Message] = deque()
        self.bulk: deque[Found | ScanEnded] = deque()
        self._arrived = threading.Event()

    def put(self, message: Message) -> None:
        """Thread-safe."""
        if isinstance(message, Found | ScanEnded):
            self.bulk.append(message)
        else:
            self.urgent.append(message)
            self._arrived.set()

    def wait(self, timeout: float) -> None:
        """Until something urgent has come since the last wait, at most `timeout` seconds."""
        self._arrived.wait(timeout)
        self._arrived.clear()

    def take_urgent(self) -> Iterator[Message]:
        """The oldest first. What several threads tell of one job, one after the other, is one message."""
        urgent = self.urgent
        while urgent:
            message = urgent.popleft()
            if isinstance(message, Stored | Loaded):
                while urgent and message.join(urgent[0]):
                    urgent.popleft()
            yield message

    def take_bulk(self, max_files: int) -> Iterator[Found | ScanEnded]:
        """The oldest, until `max_files` files have been told of."""
        while self.bulk and max_files > 0:
            message = self.bulk.popleft()
            max_files -= len(message.files) + len(message.gone) if isinstance(message, Found) else 0
            yield message
