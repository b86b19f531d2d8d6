"""Faults of a tier and of the copy engine, on real engines.

The request computes what it did not get; where a copy to the device failed and the policy is "fail", it is alone in
failing. The engine lives.

The tier that fails is a third party's: the package `troublemaker` derives it from examples/custom_tier, both are
installed with pip into a directory of their own, and entry points make them known. One engine meets every fault, one
after the other, ordered through a file. The last one, a copy engine that is broken for good, ends it.

Tried against a product that counts the failed keys of a promotion as good, gives an overdue job's rows away at the
deadline, or takes a failed copy for a good one: the tests of the first section fail for the first two of these, those
of the second for the third.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from http_client import Answer, Metrics, Server

from .checks import reset_succeeds, same_until_a_tie, served_well
from .conftest import TWO_RANKS, one_core_per_rank
from .disk import wait_until
from .engine import CONNECTOR, Engine
from .trouble import EXAMPLE_TIER, TROUBLEMAKER, Trouble, install
from .workload import ANSWER_TOKENS, BLOCK, SMALL_DEVICE_CACHE, conversations, prompt

ROWS = 96  # of host memory: room for one conversation and its neighbour, and less than FILLER needs
ROW_BYTES = 49_152
FILLER = ROWS * BLOCK + 1

ONE = 1  # the conversation that meets the faults
LOADABLE = (len(conversations()[ONE]) - 1) // BLOCK
NEIGHBOUR = prompt(7000, 30 * BLOCK - 5)  # has fewer blocks, so that an order can leave it alone


@dataclass(frozen=True)
class Kind:
    """What an engine is asked to bear the faults with."""

    ranks: int
    policy: str

    def __str__(self) -> str:
        return f"{self.ranks}-{self.policy}"

    @property
    def extra(self) -> dict[str, Any]:
        tier = {"type": "troubled", "capacity": "1GiB"}
        times = {"tier_job_timeout": 2.0, "breaker_cooldown": 1.0}
        return {"cpu": {"capacity": ROWS * ROW_BYTES}, "tiers": [tier], "lifecycle": "strict", **times}

    @property
    def connector(self) -> dict[str, Any]:
        return {**CONNECTOR, "kv_load_failure_policy": self.policy, "kv_connector_extra_config": self.extra}


KINDS = [
    Kind(1, "fail"),
    Kind(2, "recompute"),
    pytest.param(Kind(1, "recompute"), marks=pytest.mark.slow),
    pytest.param(Kind(2, "fail"), marks=pytest.mark.slow),
]


@dataclass
class Bench:
    """An engine, the trouble that it has, and what an engine without us answers."""

    kind: Kind
    engine: Engine
    trouble: Trouble
    cold: Answer  # to conversation ONE, computed
    device: Answer  # the same, from the device cache
    fresh: Iterator[int]  # seeds of prompts that nobody has asked for

    @property
    def server(self) -> Server:
        return self.engine.server()

    @property
    def failing_rank(self) -> int:
        return self.kind.ranks - 1

    def ask(self) -> Answer:
        return self.server.complete(conversations()[ONE], ANSWER_TOKENS)

    def ask_fresh(self, length: int) -> Answer:
        return self.server.complete(prompt(next(self.fresh), length), 1)

    def now(self) -> Metrics:
        """The counters, after a step that takes in what a tier has done meanwhile."""
        self.ask_fresh(2)
        return self.server.settled_metrics()

    def calm(self) -> None:
        """No trouble, and the tier has recovered; it may take a job for the engine to find out."""

        def recovered() -> bool:
            self.ask_fresh(2 * BLOCK)
            now = self.now()
            return not tier(now, "tier_off") and not tier(now, "tier_jobs_in_flight")

        self.trouble.order()
        wait_until(recovered, "the tier works again")

    def forget_device(self) -> None:
        assert reset_succeeds(self.engine, external=False)

    def leave_to_tier(self) -> None:
        """The conversation is in the tier and nowhere else."""
        self.ask()
        self.calm()
        self.ask_fresh(FILLER)
        self.calm()
        self.forget_device()

    def comes_from_tier(self) -> None:
        """Every block that can be loaded is, and the answer is that of an engine which has them on its device."""
        before = self.now()
        assert self.ask().content() == self.device.content()
        assert from_tier(self.now()) - from_tier(before) == LOADABLE * BLOCK


def tier(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.total(f"vllm:tiered_offload_{name}", tier="troubled", **labels)


def tier_faults(metrics: Metrics, kind: str) -> float:
    return tier(metrics, "tier_faults_total", kind=kind)


def from_tier(metrics: Metrics) -> float:
    """Tokens of loads that a promotion made possible; vLLM has no name for this tier's medium."""
    return metrics.cached_tokens("external_unspecified")


def failed_copies(metrics: Metrics, direction: str) -> float:
    return metrics.total("vllm:tiered_offload_failures_total", direction=direction)


def ended(metrics: Metrics, reason: str) -> float:
    return metrics.total("vllm:request_success_total", finished_reason=reason)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("packages") / "site", EXAMPLE_TIER, TROUBLEMAKER)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def bench(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    logs: Path,
    packages: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    kind: Kind = request.param
    wanted = request.getfixturevalue("wanted" if kind.ranks == 1 else "wanted_two_ranks")
    trouble = Trouble(tmp_path_factory.mktemp("orders"), kind.ranks)
    env = trouble.env(packages)
    args = [*SMALL_DEVICE_CACHE]
    if kind.ranks == 2:
        args += TWO_RANKS
        env |= one_core_per_rank()
    with Engine(tiny_model, logs / f"faults-{kind}.log", *args, connector=kind.connector, env=env) as engine:
        yield Bench(kind, engine, trouble, wanted.cold[ONE], wanted.device[ONE], iter(range(20_000, 30_000)))


@pytest.fixture(autouse=True)
def fresh_start(bench: Bench) -> None:
    """Nothing of an earlier test is anywhere. What one of them computed in batches of another shape was rounded
    differently, and answers from it would be, too."""
    bench.calm()
    assert reset_succeeds(bench.engine)


# ---- the tier --------------------------------------------------------------------------------------------------


def test_promotion_without_trouble(bench: Bench) -> None:
    """Guards the tests below: with the same preparation and no fault, everything comes from the tier."""
    bench.leave_to_tier()
    bench.comes_from_tier()


@pytest.mark.parametrize(
    ("trouble", "counted"),
    [
        ("submit_load raises", "submit_raised"),
        ("load fails", "job_failed"),
        ("chunks are truncated", "job_failed"),
        ("chunks are corrupt", "job_failed"),
        ("lookup raises", "lookup_raised"),
        ("lookup is short", "lookup_nonsense"),
        ("lookup lies", "job_failed"),
        ("lookup never knows", None),
    ],
)
def test_failed_promotion_is_computed(bench: Bench, trouble: str, counted: str | None) -> None:
    """CASES 35; V1, V4, D6. Whatever the policy: a tier's fault is a miss, not a failed load. And it is over when it is
    over."""
    bench.leave_to_tier()
    before = bench.now()
    with bench.trouble.ordered(tier=trouble):
        assert bench.ask().content() == bench.cold.content()
    after = bench.now()
    nothing_was_loaded(before, after)
    assert counted is None or tier_faults(after, counted) > tier_faults(before, counted)
    bench.leave_to_tier()
    bench.comes_from_tier()


def nothing_was_loaded(before: Metrics, after: Metrics) -> None:
    for source in ("external_unspecified", "host", "device"):
        assert after.cached_tokens(source) == before.cached_tokens(source), source
    assert after.failures() == before.failures()
    assert ended(after, "error") == ended(before, "error")


def test_medium_that_hangs(bench: Bench) -> None:
    """CASES 25; D4, V1. The request goes on without it, at the deadline the job has failed, and its rows are out of use
    until the late I/O has ended."""
    bench.leave_to_tier()
    before = bench.now()
    with bench.trouble.ordered(tier="medium hangs"):
        assert bench.ask().content() == bench.cold.content()
        wait_until(lambda: tier_faults(bench.now(), "job_timeout") > tier_faults(before, "job_timeout"), "the deadline")
        hanging = bench.now()
        assert hanging.total("vllm:tiered_offload_rows_orphaned") >= LOADABLE
        assert tier(hanging, "tier_jobs_in_flight") > 0
    bench.calm()
    after = bench.now()
    nothing_was_loaded(before, after)
    assert after.total("vllm:tiered_offload_rows_orphaned") == 0
    bench.leave_to_tier()
    bench.comes_from_tier()


def test_good_half_of_a_promotion_is_kept(bench: Bench) -> None:
    """CASES 7; D6, D8. It is one job here; what follows its first bad chunk is computed."""
    bench.leave_to_tier()
    before = bench.now()
    with bench.trouble.ordered(tier="half of each load fails"):
        same_until_a_tie(bench.ask(), bench.device)
    after = bench.now()
    assert from_tier(after) - from_tier(before) == LOADABLE // 2 * BLOCK
    assert after.failures() == before.failures()


@pytest.mark.parametrize("trouble", ["every call raises", "results are nonsense"])
def test_tier_is_switched_off_and_on_again(bench: Bench, trouble: str) -> None:
    """V4. After failures in a row the tier is left alone, requests miss, and one job finds out that it works again."""
    bench.leave_to_tier()
    with bench.trouble.ordered(tier=trouble):
        wait_until(lambda: tier(bench.now(), "tier_off") == 1, "the tier is switched off")
        # Not bit by bit: a tier that says nonsense beside good results may be tried with one job just now, and loads.
        same_until_a_tie(bench.ask(), bench.cold)
    bench.calm()
    assert "tier troubled: switched off" in bench.engine.log_text()
    assert "tier troubled: works again" in bench.engine.log_text()
    bench.leave_to_tier()
    bench.comes_from_tier()


# ---- the copy engine -------------------------------------------------------------------------------------------


@pytest.fixture
def in_host(bench: Bench) -> None:
    """The conversation and its neighbour are in host memory and not on the device."""
    bench.ask()
    bench.server.complete(NEIGHBOUR, 1)
    bench.calm()
    bench.forget_device()


def test_load_without_trouble(bench: Bench, in_host: None) -> None:
    """Guards the tests below: with the same preparation and no fault, everything comes from host memory."""
    before = bench.now()
    assert bench.ask().content() == bench.device.content()
    assert bench.now().cached_tokens("host") - before.cached_tokens("host") == LOADABLE * BLOCK


@pytest.mark.parametrize("trouble", ["submit raises", "copy fails"])
def test_failed_load(bench: Bench, in_host: None, trouble: str) -> None:
    """CASES 42; D7. On the last rank alone; where the copy fails, it has filled the blocks with wrong bytes."""
    before = bench.now()
    with bench.trouble.ordered(copies=trouble, rank=bench.failing_rank, direction="load"):
        if bench.kind.policy == "recompute":
            assert bench.ask().content() == bench.cold.content()
        else:
            fails(bench.ask)
    one_load_failed(bench, before)
    assert bench.ask().content() == bench.device.content()


def fails(ask: Callable[[], Answer]) -> None:
    """The server tells the client that this request failed."""
    with pytest.raises(RuntimeError, match="the server broke off"):
        ask()


def one_load_failed(bench: Bench, before: Metrics) -> None:
    after = bench.now()
    assert failed_copies(after, "load") - failed_copies(before, "load") == 1
    assert failed_copies(after, "store") == failed_copies(before, "store")
    assert ended(after, "error") - ended(before, "error") == (bench.kind.policy == "fail")


def test_failed_load_among_others(bench: Bench, in_host: None) -> None:
    """CASES 42; D7. A neighbour that loads at the same time, and goes on decoding, notices nothing."""
    alone = bench.server.complete(NEIGHBOUR, 100)
    bench.forget_device()
    before = bench.now()
    order = {"copies": "copy fails", "rank": bench.failing_rank, "direction": "load", "min_blocks": LOADABLE}
    with bench.trouble.ordered(**order), ThreadPoolExecutor(2) as pool:
        neighbour = pool.submit(bench.server.complete, NEIGHBOUR, 100)
        if bench.kind.policy == "recompute":
            same_until_a_tie(bench.ask(), bench.cold)
        else:
            fails(bench.ask)
    same_until_a_tie(neighbour.result(), alone)
    one_load_failed(bench, before)


@pytest.mark.parametrize("trouble", ["submit raises", "copy fails"])
def test_failed_store(bench: Bench, trouble: str) -> None:
    """CASES 42; D6. Its request notices nothing, and what was not stored on every rank is not there."""
    one = prompt(next(bench.fresh), 10 * BLOCK + 5)
    before = bench.now()
    with bench.trouble.ordered(copies=trouble, rank=bench.failing_rank, direction="store"):
        first = bench.server.complete(one, ANSWER_TOKENS)
        bench.forget_device()
    failed = bench.now()
    assert failed_copies(failed, "store") > failed_copies(before, "store")
    second = bench.server.complete(one, ANSWER_TOKENS)
    bench.forget_device()
    stored = bench.now()
    assert second.content() == first.content()
    nothing_was_loaded(failed, stored)
    same_until_a_tie(bench.server.complete(one, ANSWER_TOKENS), first)
    assert bench.now().cached_tokens("host") - stored.cached_tokens("host") == 10 * BLOCK


def test_broken_copy_engine(bench: Bench, in_host: None) -> None:
    """CASES 42. It is given up: offloading stops, serving goes on. Last test of its engine.

    Fails when the scheduler half does not hear of it: with policy "fail" every later hit in host memory is a 500.
    """
    with bench.trouble.ordered(copies="poll raises", rank=bench.failing_rank):
        if bench.kind.policy == "recompute":
            assert bench.ask().content() == bench.cold.content()
        else:
            fails(bench.ask)
    assert "nothing is loaded or stored any more" in bench.engine.log_text()
    broken = bench.now()
    for _ in range(2):
        assert bench.ask().content() == bench.cold.content()
        bench.forget_device()
    assert bench.now().cached_tokens("host") == broken.cached_tokens("host")
    served_well(bench.engine)
