"""The guard: whatever a tier does, the layer above sees one that keeps its contract (V4, D4)."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import JobMetadata, JobResult, LookupResult, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.testing.fakes.memory_tier import MemoryTier
from vllm_tiered_offload.testing.fakes.seams import ManualClock
from vllm_tiered_offload.tiers.guard import Breaker, GuardLimits, TierGuard

REQ = ReqContext("r")
KEYS = tuple(OffloadKey(b"k%d" % index) for index in range(4))


class Bench:
    """A guarded in-memory tier of four rows."""

    def __init__(self, failures: int = 3) -> None:
        self.clock = ManualClock()
        self.tier = MemoryTier()
        self.tier._rows = [memoryview(bytearray(4096)) for _ in range(4)]
        self.guard = TierGuard(self.tier, "memory", GuardLimits(5.0, failures, 10.0), self.clock)
        self.next_id = 0

    def submit(self, keys: tuple[OffloadKey, ...] = KEYS[:1], load: bool = False) -> int:
        self.next_id += 1
        self.guard.submit(JobMetadata(self.next_id, keys, tuple(range(len(keys))), load, REQ))
        return self.next_id

    def fail(self, times: int) -> None:
        for _ in range(times):
            self.submit(load=True)
            self.tier.run_jobs(fail=True)
            self.guard.collect()


def test_a_job_has_one_result_and_one_release() -> None:
    bench = Bench()
    job = bench.submit(KEYS[:2])
    assert bench.guard.collect() == ([], [])
    bench.tier.run_jobs()
    assert bench.guard.collect() == ([JobResult(job, True, KEYS[:2])], [job])
    assert bench.guard.collect() == ([], [])
    assert bench.guard.num_unreleased == 0


def test_a_late_job_fails_at_its_deadline_and_is_released_when_it_ends() -> None:
    """Case 25. Mutation: releasing with the failed result makes the second assertion fail."""
    bench = Bench()
    job = bench.submit()
    bench.clock.advance(5.0)
    assert bench.guard.collect() == ([JobResult(job, False, ())], [])
    assert bench.guard.num_unreleased == 1
    bench.tier.run_jobs()
    assert bench.guard.collect() == ([], [job])
    assert bench.guard.num_unreleased == 0


def test_what_a_tier_says_is_checked() -> None:
    """Foreign keys do not count, a part is a part, results of unknown jobs and nonsense are dropped."""
    bench = Bench(failures=99)
    job = bench.submit(KEYS[:2])
    bench.tier.waiting.clear()
    bench.tier._results = [
        JobResult(99, True, KEYS),
        "nonsense",  # type: ignore[list-item]
        JobResult(job, True, (KEYS[1], KEYS[3])),
        JobResult(job, True, KEYS[:2]),
    ]
    assert bench.guard.collect() == ([JobResult(job, False, (KEYS[1],))], [job])
    assert bench.guard.counters == {"result_unknown": 2, "result_nonsense": 1}


def test_failures_in_a_row_switch_the_tier_off_and_a_probe_switches_it_on() -> None:
    bench = Bench(failures=3)
    bench.fail(2)
    bench.submit()
    bench.tier.run_jobs()
    bench.guard.collect()
    bench.fail(2)
    assert bench.guard.breaker is Breaker.CLOSED  # a success in between counts
    bench.fail(1)
    assert bench.guard.breaker is Breaker.OPEN
    asked = len(bench.tier.calls)
    assert bench.guard.lookup(KEYS, REQ) == [LookupResult.MISS] * 4
    job = bench.submit()
    assert bench.guard.collect() == ([JobResult(job, False, ())], [job])
    assert len(bench.tier.calls) == asked
    bench.clock.advance(10.0)
    assert bench.guard.breaker is Breaker.HALF_OPEN
    assert bench.guard.accepts_jobs
    bench.submit()  # any job is a probe now
    assert not bench.guard.accepts_jobs  # one probe at a time
    bench.tier.run_jobs(fail=True)
    bench.guard.collect()
    assert bench.guard.breaker is Breaker.OPEN
    bench.clock.advance(10.0)
    assert bench.guard.accepts_jobs
    bench.submit()
    bench.tier.run_jobs()
    bench.guard.collect()
    assert bench.guard.breaker is Breaker.CLOSED


def test_a_medium_that_takes_nothing_is_still_read() -> None:
    """A full or read-only medium refuses every store; what it has can still be loaded.

    Mutation: counting failed stores towards the breaker switches the tier off.
    """
    bench = Bench(failures=3)
    for _ in range(10):
        bench.submit()
        bench.tier.run_jobs(fail=True)
        bench.guard.collect()
    assert bench.guard.breaker is Breaker.CLOSED
    assert bench.guard.counters == {"store_failed": 10}


def test_a_store_that_the_tier_did_not_want_is_no_failure() -> None:
    """Neither counted as one nor, half open, taken for a sign of life; a part that failed beside it is one.

    Mutation: without the guard's branch for skipped keys, `store_failed` counts them and the probe opens the breaker.
    """
    bench = Bench(failures=2)

    def store(skipped: tuple[OffloadKey, ...]) -> None:
        job = bench.submit(KEYS[:2])
        bench.tier.waiting.clear()
        bench.tier._results = [JobResult(job, False, (), skipped)]
        assert bench.guard.collect() == ([JobResult(job, False, ())], [job])

    store(KEYS[:2])
    assert bench.guard.counters == {}
    store(KEYS[:1])
    assert bench.guard.counters == {"store_failed": 1}
    bench.fail(2)
    bench.clock.advance(10.0)
    store(KEYS[:2])
    assert bench.guard.breaker is Breaker.HALF_OPEN
    assert bench.guard.accepts_jobs, "the next one is the probe"


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("on_new_request", lambda guard: guard.on_new_request(REQ)),
        ("on_request_finished", lambda guard: guard.on_request_finished(REQ)),
        ("lookup", lambda guard: guard.lookup(KEYS, REQ)),
        ("submit_store", lambda guard: guard.submit(JobMetadata(1, KEYS, (0, 1, 2, 3), False, REQ))),
        ("submit_load", lambda guard: guard.submit(JobMetadata(1, KEYS, (0, 1, 2, 3), True, REQ))),
        ("get_finished_jobs", lambda guard: guard.collect()),
        ("drain", lambda guard: guard.drain(0.1)),
        ("reset", lambda guard: guard.reset(0.1)),
    ],
)
def test_no_exception_leaves_the_guard(method: str, call: Callable[[TierGuard], object]) -> None:
    bench = Bench()
    bench.tier.raising = {method}
    call(bench.guard)
    assert sum(bench.guard.counters.values()) == 1
    bench.guard.collect()
    assert bench.guard.num_unreleased == 0


def test_lookup_answers_of_the_wrong_shape_are_misses() -> None:
    bench = Bench()
    bench.tier.lookup = lambda keys, ctx: [LookupResult.HIT]  # type: ignore[method-assign]
    assert bench.guard.lookup(KEYS, REQ) == [LookupResult.MISS] * 4
    bench.tier.lookup = lambda keys, ctx: [True] * 4  # type: ignore[method-assign,list-item,return-value]
    assert bench.guard.lookup(KEYS, REQ) == [LookupResult.MISS] * 4
    assert bench.guard.counters["lookup_nonsense"] == 2


@pytest.mark.parametrize("what", ["drain", "reset", "shutdown"])
def test_calls_that_block_are_bounded(what: str) -> None:
    bench = Bench()
    forever = threading.Event()
    setattr(bench.tier, what, lambda *_: forever.wait(30))
    getattr(bench.guard, what)(0.05)
    assert bench.guard.counters[f"{what}_timeout"] == 1
    forever.set()


@given(st.lists(st.sampled_from(["submit", "run", "fail", "late", "bad", "collect", "raise", "calm"]), max_size=40))
def test_exactly_one_result_and_release_in_any_order(events: list[str]) -> None:
    """Mutation: taking a late job's result as a second result makes a count below exceed one."""
    bench = Bench()
    submitted: list[int] = []
    results: list[int] = []
    released: list[int] = []

    def collect() -> None:
        ended, free = bench.guard.collect()
        results.extend(result.job_id for result in ended)
        assert set(free) <= set(results), "released before its result"
        released.extend(free)

    for event in events:
        if event == "submit":
            submitted.append(bench.submit())
        elif event in ("run", "fail"):
            bench.tier.run_jobs(1, fail=event == "fail")
        elif event == "late":
            bench.clock.advance(5.0)
        elif event == "bad":
            bench.tier._results.append(JobResult(1, True, KEYS))
        elif event in ("raise", "calm"):
            bench.tier.raising = {"submit_store", "get_finished_jobs"} if event == "raise" else set()
        else:
            collect()
    bench.tier.raising = set()
    bench.tier.run_jobs()
    collect()
    bench.clock.advance(5.0)
    collect()
    assert sorted(results) == submitted
    assert sorted(released) == submitted


def test_region_reaches_the_tier() -> None:
    from vllm_tiered_offload.contract.fingerprint import FIELDS, Fingerprint

    bench = Bench()
    rows = [memoryview(bytearray(8))]
    bench.guard.bind_region(rows, RegionGeometry(1, (8,), 1), Fingerprint.of(dict.fromkeys(FIELDS, 1)))
    assert bench.tier._rows is rows
