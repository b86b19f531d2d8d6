"""Parts of one job on several threads: each ends in exactly one report."""

import threading
from dataclasses import dataclass, field

import pytest

from vllm_tiered_offload.tiers.fs.batch import Batch, Report
from vllm_tiered_offload.tiers.fs.faults import Fault
from vllm_tiered_offload.tiers.fs.lanes import Lane


@dataclass
class Parts(Report[int]):
    done: list[int] = field(default_factory=list)
    failed: list[tuple[int, Fault]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.done or self.failed)

    def fail(self, part: int, fault: Fault) -> None:
        self.failed.append((part, fault))


class Reports:
    """What was told, and a way to wait for it."""

    def __init__(self) -> None:
        self.all: list[Parts] = []
        self._told = threading.Condition()

    def __call__(self, report: Parts) -> None:
        with self._told:
            self.all.append(report)
            self._told.notify_all()

    def ended(self) -> list[int]:
        return sorted(part for report in self.all for part in (*report.done, *(part for part, _ in report.failed)))

    def wait_for(self, count: int) -> None:
        with self._told:
            assert self._told.wait_for(lambda: len(self.ended()) >= count, 10)


def test_a_part_that_hangs_holds_back_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread has told of what it did before, the other thread does the rest. Mutation: TELL_SECONDS = 100."""
    monkeypatch.setattr("vllm_tiered_offload.tiers.fs.batch.TELL_SECONDS", 0.02)
    road, lane, told = threading.Event(), Lane(2, "lane"), Reports()

    def do(part: int, report: Parts) -> None:
        if part == 5:
            road.wait(10)
        threading.Event().wait(0.011)
        report.done.append(part)

    Batch(range(20), do, Parts, told, threading.Event()).start(lane, 2)
    told.wait_for(18)
    assert 5 not in told.ended()
    road.set()
    told.wait_for(20)
    assert told.ended() == list(range(20))
    assert not any(report.is_empty for report in told.all)
    lane.shutdown()


def test_an_exception_is_the_end_of_its_part_alone() -> None:
    told, lane = Reports(), Lane(3, "lane")

    def do(part: int, report: Parts) -> None:
        if part % 7 == 3:
            raise ZeroDivisionError
        report.done.append(part)

    Batch(range(100), do, Parts, told, threading.Event()).start(lane, 3)
    told.wait_for(100)
    assert told.ended() == list(range(100))
    failed = [end for report in told.all for end in report.failed]
    assert sorted(failed) == [(part, Fault.INTERNAL) for part in range(3, 100, 7)]
    lane.shutdown()


def test_what_has_not_begun_when_it_stops_is_cancelled() -> None:
    told, stop, lane = Reports(), threading.Event(), Lane(1, "lane")

    def do(part: int, report: Parts) -> None:
        stop.set()
        report.done.append(part)

    Batch(range(3), do, Parts, told, stop).start(lane, 4)
    told.wait_for(3)
    assert [(report.done, report.failed) for report in told.all] == [
        ([0], [(1, Fault.CANCELLED), (2, Fault.CANCELLED)])
    ]
    lane.shutdown()


def test_a_closed_lane_cancels_every_part() -> None:
    told, lane = Reports(), Lane(1, "lane")
    lane.shutdown()
    Batch(range(3), lambda part, report: report.done.append(part), Parts, told, threading.Event()).start(lane, 1)
    assert [report.failed for report in told.all] == [[(part, Fault.CANCELLED) for part in range(3)]]
