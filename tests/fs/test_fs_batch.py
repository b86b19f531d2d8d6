"""Parts of one job on several threads: each ends in exactly one report."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from vllm_tiered_offload.testing.fakes.seams import ManualExecutor
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


class Stubborn:
    """A lane that runs a job at once, takes `limit` of them, and then is closed."""

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0

    def submit(self, job: Callable[[], None], /) -> None:
        if self.taken == self.limit:
            raise RuntimeError("closed")
        self.taken += 1
        job()

    def shutdown(self, wait: bool = True) -> None:
        """Nothing waits."""


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_all_threads_help_each_other_and_no_more(threads: int) -> None:
    """As many parts at once as there may be, of which each waits for the others. Mutation: only one is asked."""
    told, lane, together = Reports(), Lane(threads + 2, "lane"), threading.Barrier(threads)
    lock, busy, busiest = threading.Lock(), 0, 0

    def do(part: int, report: Parts) -> None:
        nonlocal busy, busiest
        with lock:
            busy += 1
            busiest = max(busiest, busy)
        together.wait(10)
        with lock:
            busy -= 1
        report.done.append(part)

    Batch(range(4 * threads), do, Parts, told, threading.Event()).start(lane, threads)
    told.wait_for(4 * threads)
    assert busiest == threads
    lane.shutdown()


def test_whoever_starts_it_wakes_one_thread() -> None:
    """Waking 64 would cost the scheduler thread a third of a millisecond a job."""
    lane, told = ManualExecutor(), Reports()
    Batch(range(64), lambda part, report: report.done.append(part), Parts, told, threading.Event()).start(lane, 64)
    assert len(lane.jobs) == 1
    lane.run_next()
    assert told.ended() == list(range(64))


@pytest.mark.parametrize("limit", range(4))
def test_a_lane_that_closes_meanwhile_loses_no_part(limit: int) -> None:
    told = Reports()
    Batch(range(20), lambda part, report: report.done.append(part), Parts, told, threading.Event()).start(
        Stubborn(limit), 8
    )
    assert told.ended() == list(range(20))
    assert [end for report in told.all for end in report.failed] == (
        [] if limit else [(part, Fault.CANCELLED) for part in range(20)]
    )


def test_what_a_thread_of_the_lane_submits_comes_first() -> None:
    """Help for a job that has begun does not wait behind jobs that came later."""
    lane, order, go, over = Lane(1, "lane"), list[str](), threading.Event(), threading.Event()

    def first() -> None:
        go.wait(10)
        lane.submit(lambda: order.append("help"))
        order.append("first")

    lane.submit(first)
    lane.submit(lambda: order.append("second"))
    lane.submit(over.set)
    go.set()
    assert over.wait(10)
    assert order == ["first", "help", "second"]
    lane.shutdown()
