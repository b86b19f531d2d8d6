"""Random runs: a few seeds over the rotation of configurations, a state machine whose failures shrink, the command."""

import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from vllm_tiered_offload.testing.simulator.config import SimConfig, rotation
from vllm_tiered_offload.testing.simulator.episodes import run_episode
from vllm_tiered_offload.testing.simulator.tier_weather import RAISES

EPISODES = list(islice(rotation(), 12))


@pytest.mark.parametrize("episode", range(len(EPISODES)))
def test_random_episode(episode: int) -> None:
    """Chaos, then faults off and convergence (every invariant that has a checker)."""
    totals, failure = run_episode(7, episode, EPISODES[episode], steps=200)
    assert failure is None, str(failure)
    assert totals.events["store"] > 0
    assert (totals.events["cascade"] > 0) == (EPISODES[episode].tiers > 0)


def test_tiers_get_into_every_kind_of_trouble() -> None:
    """What the random runs promise to cover: failures, deadlines, exceptions, open and half-open breakers."""
    from vllm_tiered_offload.testing.simulator.engine import Simulation
    from vllm_tiered_offload.testing.simulator.workload import Workload

    wanted = {"job_failed", "job_timeout", "submit_raised", "lookup_raised", "get_finished_jobs_raised"}
    wanted |= {"closed", "open", "half_open", "promotion", "timeout"}
    kinds: set[str] = set()
    for episode in (0, 7, 8, 0, 7, 8):
        if kinds >= wanted:
            break
        sim = Simulation(EPISODES[episode], seed=f"{episode} after {len(kinds)}")
        workload = Workload(sim, random.Random(f"{episode} {len(kinds)}"))
        while sim.story.counts["steps"] < 400:
            workload.step()
            kinds |= {guard.breaker.value for guard in sim.manager.guards}
        kinds |= {kind for guard in sim.manager.guards for kind in guard.counters}
        kinds |= {kind for kind in ("promotion", "timeout") if sim.story.counts[kind]}
        sim.converge()
        sim.close()
    assert kinds >= wanted, wanted - kinds


def test_ranks_finish_in_different_steps() -> None:
    """A job that one rank has ended and another has not is neither over nor lost; random runs have plenty of them."""
    from vllm_tiered_offload.testing.simulator.checkers import ALL_CHECKERS, Checker
    from vllm_tiered_offload.testing.simulator.engine import Simulation
    from vllm_tiered_offload.testing.simulator.workload import Workload

    partly: list[int] = []

    class Probe(Checker):
        def reported(self, step: Any) -> None:
            partly.extend(ack.ranks for ack in step.report.acks.values() if ack.ranks.bit_count() == 1)

    sim = Simulation(SimConfig(ranks=2, num_blocks=20), checkers=(*ALL_CHECKERS, Probe))
    workload = Workload(sim, random.Random(4))
    while sim.story.counts["steps"] < 200:
        workload.step()
    sim.converge()
    sim.close()
    assert len(partly) >= 20


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_random_episode_of_one_role(role: str) -> None:
    """A producer only stores, a consumer only loads (and here finds nothing)."""
    totals, failure = run_episode(8, 1, replace(EPISODES[0], kv_role=role), steps=150)
    assert failure is None, str(failure)
    assert totals.events["load"] == 0
    assert (totals.events["store"] > 0) == (role == "kv_producer")


def test_command_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_tiered_offload.testing.simulator.cli import main

    report = tmp_path / "build" / "sim.json"
    assert main(["--steps", "300", "--seed", "5", "--report", str(report), "--quiet"]) == 0
    written = json.loads(report.read_text())
    assert written["violations"] == written["leftover_state"] == 0
    assert written["steps"] >= 300
    assert written["pool_full_share"] >= 0.3
    assert set(written["events"]) == {
        "admit", "preempt", "abort", "finish", "load", "store", "promotion", "cascade", "reset", "fault", "timeout",
        "quarantine",
    }  # fmt: skip
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == written


class EngineMachine(RuleBasedStateMachine):
    """What a user, an operator and a slow machine can do to one engine, in any order."""

    sim: Any = None

    @initialize(
        depth=st.sampled_from([1, 2]),
        chunk=st.sampled_from([1, 2]),
        ranks=st.sampled_from([1, 1, 2]),
        neighbour=st.sampled_from([None, None, "async", "sync"]),
        rows=st.sampled_from([6, 40]),
        tiers=st.sampled_from([0, 1, 1, 2]),
    )
    def start(self, depth: int, chunk: int, ranks: int, neighbour: str | None, rows: int, tiers: int) -> None:
        from vllm_tiered_offload.testing.simulator.engine import Simulation

        config = SimConfig(
            depth=depth,
            blocks_per_chunk=chunk,
            ranks=ranks,
            neighbour=neighbour,
            cpu_chunks=rows,
            num_blocks=14,
            tiers=tiers,
        )
        self.sim = Simulation(config)
        self.sim.world.share, self.sim.world.failure, self.sim.world.saves = 0.4, 0.3, 0.3
        self.sim.copies.held = self.sim.tiers.held = True

    @rule(family=st.integers(0, 2), length=st.integers(1, 28), answer=st.integers(1, 10))
    def arrive(self, family: int, length: int, answer: int) -> None:
        """Prompts of a family are prefixes of one another."""
        if len(self.sim.live) < 5:
            self.sim.add_request([1000 * (family + 1) + i for i in range(length)], answer)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.sim.has_work():
                self.sim.step()

    @rule(count=st.integers(1, 3))
    def copy(self, count: int) -> None:
        self.sim.run_copies(count)

    @rule(which=st.integers(0, 4), while_running=st.booleans())
    @precondition(lambda self: self.sim is not None and self.sim.live)
    def abort(self, which: int, while_running: bool) -> None:
        live = sorted(self.sim.live)
        self.sim.abort(live[which % len(live)], while_running)

    @rule(running=st.booleans(), weights=st.booleans())
    def reset(self, running: bool, weights: bool) -> None:
        self.sim.reset(running, weights)

    @rule(at_submit=st.booleans())
    def fault(self, at_submit: bool) -> None:
        if at_submit:
            self.sim.copies.submit_faults = 1
        else:
            self.sim.copies.faults = 1

    @rule(count=st.integers(1, 3), fault=st.sampled_from(["", "", "failing", "spoiling", "hanging"]))
    def tier_jobs(self, count: int, fault: str) -> None:
        if fault:
            setattr(self.sim.tiers, fault, 1)
        self.sim.tiers.run(count)

    @rule(method=st.sampled_from(RAISES))
    @precondition(lambda self: self.sim is not None and self.sim.tiers.tiers)
    def tier_trouble(self, method: str) -> None:
        """The nearest tier raises in one method; told twice it works again."""
        self.sim.tiers.tiers[0].raising ^= {method}

    @rule(retries=st.sampled_from([0, 2, 1_000_000]), loses=st.booleans())
    @precondition(lambda self: self.sim is not None and self.sim.tiers.tiers)
    def tier_memory(self, retries: int, loses: bool) -> None:
        tier = self.sim.tiers.tiers[0]
        tier.retries = retries
        tier.ask_anew()
        if loses and tier.chunks:
            tier.lose(next(iter(tier.chunks)))

    @rule()
    def tier_jobs_wake(self) -> None:
        self.sim.tiers.wake()

    @rule(seconds=st.sampled_from([0.5, 1.5]))
    def time_passes(self, seconds: float) -> None:
        self.sim.clock.advance(seconds)

    def teardown(self) -> None:
        if self.sim is not None:
            try:
                self.sim.converge()
            finally:
                self.sim.close()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
