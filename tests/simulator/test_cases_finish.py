"""How a request ends: every state it can be in, every order of its end and of what is still under way for it.

The submission contract (l1, l2, l3) is checked at every layer in each of these; an assertion says what else matters.
"""

from collections.abc import Callable
from typing import Any

import pytest
from sim_helpers import (
    pending_promotions,
    promotions,
    push_down,
    push_out,
    run_one,
    status,
    step_until,
    tokens,
    wake_up,
)

from vllm_tiered_offload.contract.jobs import ReqContext
from vllm_tiered_offload.testing.simulator.config import ALL_PINS

Simulate = Callable[..., Any]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])
TIERED = {"tiers": 1, "cpu_chunks": 8, "num_blocks": 24, "token_budget": 64}


def calls_of(sim: Any, req_id: str) -> list[str]:
    """Write down what the manager is told of a request from now on."""
    calls: list[str] = []
    for name in ("on_new_request", "prepare_stores", "on_request_finished"):
        method = getattr(sim.manager, name)

        def noted(arg: Any, _name: str = name, _method: Any = method) -> Any:
            contexts = [arg] if isinstance(arg, ReqContext) else [ctx for _, ctx in arg]
            calls.extend(_name for ctx in contexts if ctx.req_id == req_id)
            return _method(arg)

        setattr(sim.manager, name, noted)
    return calls


@DEPTHS
@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("prompt", [15, 16, 17, 18])
def test_finish_with_a_full_or_partial_last_chunk(simulate: Simulate, depth: int, chunk: int, prompt: int) -> None:
    """Every full chunk that was written is stored, no partial one; its last store comes before the signal.

    Mutation: a final store of `num_tokens` instead of what was computed stores one chunk more at 18 + 2.
    """
    sim = simulate(depth=depth, blocks_per_chunk=chunk, extra=ALL_PINS)
    run_one(sim, tokens(2, 9), 1)
    calls = calls_of(sim, "a")
    run_one(sim, tokens(prompt), 2, "a")
    assert len(sim.blocks_moved("store", "a")) == (prompt + 1) // (4 * chunk) * chunk
    assert calls[-1] == "on_request_finished"
    assert calls.count("on_request_finished") == 1
    sim.converge()


def in_state(sim: Any, state: str) -> None:
    """Bring request "a" into a state; its prompt of 17 tokens is in the tier behind alone, and copies are held."""
    prompt = tokens(17)
    if state == "waiting for memory":
        sim.add_request(tokens(80, 1), 4, "big")
        step_until(sim, lambda: sim.live["big"].num_output_tokens)
    sim.tiers.held = state == "promotion queued"
    if state in ("prefilling", "decoding", "preempted", "preempted with stores pending"):
        prompt = tokens(40, 2)
    sim.add_request(prompt, 6, "a")
    reached = {
        "new": lambda: True,
        "waiting for memory": lambda: status(sim, "a") == "WAITING",
        "promotion queued": lambda: bool(pending_promotions(sim)),
        "loading": lambda: status(sim, "a") == "WAITING_FOR_REMOTE_KVS",
        "prefilling": lambda: 0 < sim.live["a"].num_computed_tokens < 40,
    }
    step_until(sim, reached.get(state, lambda: sim.live["a"].num_output_tokens > 1))
    if state.startswith("preempted"):
        if state == "preempted":
            sim.release_copies()
            sim.step()
        sim.preempt_all()
        assert status(sim, "a") == "PREEMPTED"


STATES = [
    "new",
    "waiting for memory",
    "promotion queued",
    "loading",
    "prefilling",
    "decoding",
    "preempted",
    "preempted with stores pending",
]


@DEPTHS
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("while_running", [False, True])
def test_aborted_in_each_state(simulate: Simulate, depth: int, state: str, while_running: bool) -> None:
    """One end at every layer, nothing left, and what is stored later is right (the next request reads it)."""
    sim = simulate(depth=depth, **{**TIERED, "token_budget": 16, "extra": ALL_PINS})
    wake_up(sim)
    run_one(sim, tokens(17))
    push_down(sim)
    sim.hold_copies()
    in_state(sim, state)
    calls = calls_of(sim, "a")
    sim.abort("a", while_running)
    for _ in range(3):
        sim.step()
    assert calls.count("on_request_finished") == 1
    assert "prepare_stores" not in calls[calls.index("on_request_finished") :]
    (tier,) = sim.tiers.tiers
    sim.converge()
    assert [name for name, req_id in tier.calls if req_id == "a"].count("on_request_finished") == 1
    for prompt in (tokens(17), tokens(40, 2)):
        push_out(sim)
        run_one(sim, prompt, 2)
    sim.converge()


@DEPTHS
def test_finished_while_a_promotion_is_queued(simulate: Simulate, depth: int) -> None:
    """It waited long enough, computed its prompt, and ends; the promotion that it asked for ends later.

    What came for it is there for the next one, and held for nobody.
    """
    sim = simulate(depth=depth, seconds_per_step=0.1, **{**TIERED, "extra": {"tier_job_timeout": 60.0}})
    wake_up(sim)
    run_one(sim, tokens(17))
    push_down(sim)
    sim.tiers.held = True
    sim.add_request(tokens(17), 2, "a")
    step_until(sim, lambda: "a" not in sim.live)
    assert pending_promotions(sim)
    sim.step()
    sim.step()
    (tier,) = sim.tiers.tiers
    assert [name for name, req_id in tier.calls if req_id == "a"][-1] == "on_request_finished"
    sim.tiers.calm()
    sim.settle_tiers()
    assert sim.manager.leftovers()["holds"] == 0
    sim.converge()


@DEPTHS
@pytest.mark.parametrize("order", ["finish, reset", "reset, finish", "finish, step, reset"])
@pytest.mark.parametrize("tiers", [0, 1])
def test_finished_and_reset_in_either_order(simulate: Simulate, depth: int, order: str, tiers: int) -> None:
    """Stores and a final store are pending: the end is told once, and what is from before the reset is not served.

    New weights where the reset succeeds; the runner reads every byte of the request that comes after.
    """
    sim = simulate(depth=depth, tiers=tiers, extra=ALL_PINS)
    run_one(sim, tokens(2, 9), 1)
    calls = calls_of(sim, "a")
    sim.hold_copies()
    sim.add_request(tokens(11), 6, "a")
    step_until(sim, lambda: sim.live["a"].num_output_tokens == 5)
    if order == "reset, finish":
        sim.reset(new_weights=True)
    step_until(sim, lambda: "a" not in sim.live)
    if order == "finish, step, reset":
        sim.step()
    if order != "reset, finish":
        sim.reset(new_weights=True)
    sim.release_copies()
    sim.run_until_idle()
    assert calls.count("on_request_finished") == 1
    push_out(sim)
    run_one(sim, tokens(11) + sim.outputs["a"], 1, "b")
    assert not sim.blocks_moved("load", "b")
    sim.converge()


@DEPTHS
@pytest.mark.parametrize("state", ["loading", "prefilling", "decoding", "preempted with stores pending"])
@pytest.mark.parametrize("reset", [False, True])
def test_the_same_id_again(simulate: Simulate, depth: int, state: str, reset: bool) -> None:
    """A client gives up and comes back under the same id before the workers know: two lives, two ends, no mix-up."""
    sim = simulate(depth=depth, tiers=1, cpu_chunks=40, num_blocks=48, token_budget=16, extra=ALL_PINS)
    wake_up(sim)
    run_one(sim, tokens(17))
    push_down(sim)
    sim.hold_copies()
    in_state(sim, state)
    calls = calls_of(sim, "a")
    sim.abort("a")
    if reset:
        sim.reset()
    step_until(sim, lambda: sim.may_reuse_id("a") or sim.release_copies())
    sim.add_request(tokens(23, 7), 3, "a")
    step_until(sim, lambda: "a" not in sim.live)
    sim.converge()
    assert calls.count("on_request_finished") == 2
    assert calls.count("on_new_request") == 1
    push_out(sim)
    run_one(sim, tokens(23, 7), 2, "again")
    assert len(sim.blocks_moved("load", "again")) == 5
    sim.converge()


@DEPTHS
def test_the_same_id_again_while_its_promotion_is_queued(simulate: Simulate, depth: int) -> None:
    """The promotion belongs to the first life; the second one, with another prompt, neither waits nor holds for it."""
    sim = simulate(depth=depth, **TIERED)
    wake_up(sim)
    run_one(sim, tokens(17))
    push_down(sim)
    sim.tiers.held = True
    sim.add_request(tokens(17), 2, "a")
    step_until(sim, lambda: bool(pending_promotions(sim)))
    sim.abort("a")
    sim.add_request(tokens(6, 7), 2, "a")
    step_until(sim, lambda: "a" not in sim.live, limit=8)
    assert promotions(sim) == 1
    sim.converge()
