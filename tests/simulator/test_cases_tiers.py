"""Cases from the field with tiers behind the CPU tier: numbers 11, 14, 25, 27 and 29. Every checker watches each.

The checkers are shown to fail by tests/mutants; an assertion here says what a case is about beyond that.
"""

from collections.abc import Callable
from typing import Any

import pytest
from sim_helpers import (
    pending_promotions,
    promotions,
    push_down,
    push_out,
    run_cascades,
    run_one,
    status,
    step_until,
    tokens,
    wake_up,
)

Simulate = Callable[..., Any]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])
TIERS = pytest.mark.parametrize("tiers", [1, 2])
SMALL = {"cpu_chunks": 8, "num_blocks": 24, "token_budget": 64}


def below(simulate: Simulate, prompt: list[int], **fields: Any) -> Any:
    """An engine whose tiers behind have `prompt`, and nobody else has."""
    sim = simulate(**{**SMALL, "tiers": 1, **fields})
    wake_up(sim)
    run_one(sim, prompt)
    push_down(sim)
    return sim


@DEPTHS
@TIERS
def test_a_prompt_comes_back_from_behind(simulate: Simulate, depth: int, tiers: int) -> None:
    """Out of the device and out of the CPU tier, back through one promotion, byte by byte (the runner checks)."""
    sim = below(simulate, tokens(17), depth=depth, tiers=tiers)
    run_one(sim, tokens(17), 1, "again")
    assert promotions(sim) == 1
    assert len(sim.blocks_moved("load", "again")) == 4
    sim.converge()


@DEPTHS
@pytest.mark.parametrize("when", ["in the pass of the lookup", "a step later", "while running"])
def test_case_11_finish_with_a_promotion_on_its_way(simulate: Simulate, depth: int, when: str) -> None:
    """Case 11: a lookup starts a promotion and the request ends at once: the end is told once, nothing follows (l3).

    What was promoted is there for the next one, and held for nobody.
    """
    sim = below(simulate, tokens(17), depth=depth)
    sim.tiers.held = True
    sim.add_request(tokens(17), 1, "gone")
    if when == "in the pass of the lookup":
        sim.scheduler.schedule()
    else:
        sim.step()
    assert pending_promotions(sim)
    sim.abort("gone", while_running=when == "while running")
    sim.step()
    sim.step()
    (tier,) = sim.tiers.tiers
    of_it = [name for name, req_id in tier.calls if req_id == "gone"]
    assert of_it.count("on_request_finished") == 1
    assert of_it[-1] == "on_request_finished"
    sim.converge()
    assert sim.manager.primary.num_unpinned_rows == 8
    run_one(sim, tokens(17), 1, "next")
    assert promotions(sim) == 1
    assert len(sim.blocks_moved("load", "next")) == 4
    sim.converge()


@DEPTHS
def test_case_14_third_send_is_cold(simulate: Simulate, depth: int) -> None:
    """Case 14: 1,024 tokens sent twice, reset with new weights, sent again: nothing is loaded, at no tier."""
    sim = simulate(
        depth=depth, tiers=1, num_blocks=300, cpu_chunks=300, token_budget=512, max_model_len=2048,
        extra={"max_pinned_device_share": 1.0},
    )  # fmt: skip
    wake_up(sim)
    prompt = tokens(1024)
    run_one(sim, prompt, 2, "first")
    push_out(sim)
    run_one(sim, prompt, 2, "second")
    assert len(sim.blocks_moved("load", "second")) == 255
    assert sim.reset(new_weights=True)
    run_one(sim, prompt, 2, "third")
    assert not sim.blocks_moved("load", "third")
    assert not promotions(sim)
    sim.converge()


@DEPTHS
@TIERS
def test_case_14_reset_with_a_promotion_and_a_cascade_in_flight(simulate: Simulate, depth: int, tiers: int) -> None:
    """Case 14: both in flight at the reset, their rows wanted again, weights new; then the late jobs land.

    Rows stay theirs until they end (d4), the cascade leaves nothing, and the prompts are cold (the runner reads). None
    of it counts against the tier.
    """
    sim = below(simulate, tokens(17), depth=depth, tiers=tiers)
    sim.tiers.held = True
    run_one(sim, tokens(16, 1), 1, "cascading")
    sim.add_request(tokens(17), 1, "promoting")
    step_until(sim, lambda: pending_promotions(sim))
    sim.abort("promoting")
    sim.run_until_idle()
    waiting = len(sim.tiers)
    assert waiting > len(pending_promotions(sim)) > 0
    assert sim.reset(new_weights=True)
    assert len(sim.tiers) == waiting
    run_one(sim, tokens(40, 2), 1, "wants rows")
    assert sim.manager.leftovers()["primary.orphaned"] == 4 + 3  # the promotion left a row for stores
    sim.tiers.calm()
    sim.run_until_idle()
    sim.settle_tiers()
    stats = sim.manager.get_stats()
    assert not [name for name in stats if "job_failed" in name]  # that they failed says nothing about the tier
    for seed, length in ((0, 17), (1, 16)):
        push_out(sim)
        run_one(sim, tokens(length, seed), 1, f"cold {seed}")
        assert not sim.blocks_moved("load", f"cold {seed}")
    sim.converge()


@DEPTHS
def test_case_14_reset_with_a_finished_request_still_tracked(simulate: Simulate, depth: int) -> None:
    """Case 14: stores of a finished request in flight at the reset: its end is told then, its chunks go nowhere."""
    sim = simulate(depth=depth, tiers=1, **SMALL)
    wake_up(sim)
    sim.hold_copies()
    sim.add_request(tokens(16), 2, "a")
    step_until(sim, lambda: "a" not in sim.live)
    for _ in range(3):
        sim.step()
    (tier,) = sim.tiers.tiers
    assert ("on_request_finished", "a") not in tier.calls
    sim.reset()
    assert ("on_request_finished", "a") in tier.calls
    sim.converge()
    assert ("submit_store", "a") not in tier.calls
    push_out(sim)
    run_one(sim, tokens(17), 1, "again")
    assert not sim.blocks_moved("load", "again")


@pytest.mark.parametrize("trouble", ["reset", "drain"])
def test_case_14_a_tier_that_does_not_forget_is_off(simulate: Simulate, trouble: str) -> None:
    """Case 14: the tier raises at the reset. What it still has must not come back; after the next reset it is used.

    Mutation: a guard that only counts the failure serves the bytes of the old weights here.
    """
    sim = below(simulate, tokens(17))
    (tier,) = sim.tiers.tiers
    tier.raising = {trouble}
    assert sim.reset(new_weights=True)
    tier.raising = set()
    assert bool(tier.chunks) == (trouble == "reset")
    run_one(sim, tokens(17), 1, "cold")
    assert not sim.blocks_moved("load", "cold")
    assert sim.reset(new_weights=True)
    run_one(sim, tokens(17), 1, "warms")
    push_down(sim)
    run_one(sim, tokens(17), 1, "again")
    assert len(sim.blocks_moved("load", "again")) == 4
    sim.converge()


def test_case_14_reset_before_the_tier_knows_the_region(simulate: Simulate) -> None:
    """Case 14: weights are replaced before the first request; what an earlier engine left in the tier is old then.

    Mutation: a reset that only reaches tiers which know the region serves the earlier engine's bytes.
    """
    earlier = below(simulate, tokens(17))
    sim = simulate(tiers=1, **SMALL)
    (tier,) = sim.tiers.tiers
    tier.chunks |= earlier.tiers.tiers[0].chunks
    assert sim.reset(new_weights=True)
    wake_up(sim)
    run_one(sim, tokens(17), 1, "cold")
    assert not sim.blocks_moved("load", "cold")
    sim.converge()


@DEPTHS
def test_case_25_a_promotion_that_never_completes(simulate: Simulate, depth: int) -> None:
    """Case 25: two requests on a promotion that hangs: both wait within the bound (v1) and compute.

    It has one end at its deadline; its rows come back only when the late I/O has ended (d4), and nothing is kept (d6).
    """
    sim = below(simulate, tokens(17), depth=depth, seconds_per_step=0.05, extra={"tier_job_timeout": 3.0})
    sim.tiers.held = True
    sim.add_request(tokens(17), 1, "first")
    step_until(sim, lambda: pending_promotions(sim))
    sim.add_request(tokens(17), 1, "second")
    began = sim.clock()
    step_until(sim, lambda: not sim.live)
    assert 1.0 <= sim.clock() - began < 1.5
    assert not sim.blocks_moved("load", "first")
    assert not sim.blocks_moved("load", "second")
    assert promotions(sim) == 1
    sim.clock.advance(3.0)
    sim.run_until_idle()
    sim.settle_tiers()
    assert sim.manager.leftovers()["tier_jobs"] >= 1
    assert sim.manager.get_stats()["rows_orphaned"] == 4
    sim.tiers.calm()
    sim.settle_tiers()
    assert sim.manager.get_stats()["rows_orphaned"] == 0
    sim.converge()


@DEPTHS
def test_case_25_a_cascade_that_never_completes(simulate: Simulate, depth: int) -> None:
    """Case 25: a cascade hangs beyond its deadline; nobody waits for it, its rows are nobody else's to write (d4)."""
    sim = simulate(depth=depth, tiers=1, **SMALL)
    wake_up(sim)
    sim.tiers.held = True
    run_one(sim, tokens(16), 1, "a")
    sim.clock.advance(3.0)
    sim.run_until_idle(limit=5)
    run_one(sim, tokens(32, 1), 1, "b")
    push_out(sim)
    run_one(sim, tokens(17), 1, "again")
    assert len(sim.blocks_moved("load", "again")) == 4
    sim.converge()


@DEPTHS
def test_case_27_promotions_leave_room_for_running_stores(simulate: Simulate, depth: int) -> None:
    """Case 27: 16 rows; 8 waiting requests of 4 chunks each are on disk, one running request stores: its stores go on.

    Reading is slow, writing is not. (v2 checks the headroom at every promotion.) No chunk is promoted twice.
    """
    sim = simulate(
        depth=depth, tiers=1, cpu_chunks=16, num_blocks=80, token_budget=64, max_num_seqs=16,
        extra={"promotion_headroom": 0.25},
    )  # fmt: skip
    wake_up(sim)
    for seed in range(8):
        run_one(sim, tokens(17, seed))
        sim.settle_tiers()
    push_down(sim)
    sim.add_request(tokens(5, 50), 40, "running")
    step_until(sim, lambda: sim.live["running"].num_output_tokens >= 2)
    sim.tiers.held = True
    for seed in range(8):
        sim.add_request(tokens(17, seed), 1, f"w{seed}")
    step_until(sim, lambda: pending_promotions(sim))
    stored = len(sim.blocks_moved("store", "running"))
    while sim.live["running"].num_output_tokens < 24:
        sim.step()
        run_cascades(sim)
    assert pending_promotions(sim)
    assert len(sim.blocks_moved("store", "running")) >= stored + 3
    sim.tiers.calm()
    sim.run_until_idle()
    assert promotions(sim) <= 8
    assert sim.manager.get_stats()["promoted_chunks_total|tier=simulated"] <= 32
    sim.converge()


@DEPTHS
def test_case_29_fifty_requests_on_one_prefix(simulate: Simulate, depth: int) -> None:
    """Case 29: fifty requests on one prefix that only the tier behind has: one promotion, all start soon after it.

    (Each then loads its own copy from the CPU tier, as far as the device pool goes.)
    """
    prefix = tokens(16)
    sim = below(simulate, [*prefix, 7], depth=depth, num_blocks=400, cpu_chunks=64, token_budget=512, max_num_seqs=64)
    sim.tiers.held = True
    for index in range(50):
        sim.add_request([*prefix, 100 + index], 2, f"r{index}")
    for _ in range(3):
        sim.step()
    assert {status(sim, req_id) for req_id in sim.live} == {"WAITING"}
    sim.tiers.held = False
    step_until(sim, lambda: not sim.live, limit=10)
    assert promotions(sim) == 1
    assert all(len(sim.blocks_moved("load", f"r{index}")) in (0, 4) for index in range(50))
    sim.converge()
