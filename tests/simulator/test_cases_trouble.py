"""Cases from the field with too little room or with copies that fail: numbers 20, 22, 26 and 42.

Every checker watches each of them; an assertion here says what a case is about beyond that.
"""

from collections.abc import Callable
from typing import Any

import pytest
from sim_helpers import push_out, run_one, status, step_until, tokens

from vllm_tiered_offload.testing.simulator.config import ALL_PINS
from vllm_tiered_offload.worker.copy_engines.host import HostCopyEngine

Simulate = Callable[..., Any]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def full_tier(simulate: Simulate, **fields: Any) -> Any:
    """An engine whose CPU tier is full of the 8 chunks of one prompt, which the device does not have."""
    sim = simulate(**{"cpu_chunks": 8, "num_blocks": 40, "token_budget": 128, "extra": ALL_PINS, **fields})
    run_one(sim, tokens(32), 1)
    push_out(sim)
    return sim


@DEPTHS
@pytest.mark.parametrize("first", ["a", "b"])
def test_case_20_a_store_wants_the_rows_of_a_hit(simulate: Simulate, depth: int, first: str) -> None:
    """Case 20: tier full; A (8 blocks) is looked up and allocated in the pass that stores for B, in either order.

    A's rows are pinned: its load is whole, and B's store is what has to wait. (d8 compares promise and load, the runner
    reads the bytes.) Mutation: rows that are not pinned by prepare_load are B's before A's load has read them.
    """
    sim = full_tier(simulate, depth=depth)
    for name in sorted("ab", reverse=first == "b"):
        sim.add_request([*tokens(32), 5] if name == "a" else tokens(9, 1), 8, name)
    step_until(sim, lambda: status(sim, "a") == "WAITING_FOR_REMOTE_KVS")
    assert len(sim.blocks_moved("load", "a")) == 8
    assert not sim.blocks_moved("store", "b")
    sim.converge()


@DEPTHS
def test_case_20_looked_up_not_allocated_and_aborted(simulate: Simulate, depth: int) -> None:
    """Case 20: A is told of a hit in every pass and gets no device blocks; B's stores evict; then A is aborted.

    What A was told of is pinned in its pass alone. Its next answer is shorter, or it is gone: never a wrong load.
    """
    sim = full_tier(simulate, depth=depth, num_blocks=18, token_budget=8)
    sim.add_request(tokens(40, 1), 20, "b")
    step_until(sim, lambda: sim.live["b"].num_computed_tokens >= 8)
    sim.add_request([*tokens(32), 5], 4, "a")
    answers = []
    while "a" in sim.live and "b" in sim.live and len(answers) < 12:
        sim.step()
        answers.append(status(sim, "a") if "a" in sim.live else "over")
    assert "WAITING" in answers
    assert sim.blocks_moved("store", "b")
    sim.abort("a")
    sim.step()
    sim.converge()
    assert sim.manager.primary.num_unpinned_rows == 8


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("newest_first", [False, True])
@DEPTHS
def test_case_22_one_request_is_one_access(simulate: Simulate, depth: int, policy: str, newest_first: bool) -> None:
    """Case 22: a request decodes 100 tokens over 4 chunks, its stores complete in either order; half is evicted.

    It is touched once, at its admission, and what is left of it is a prefix: tails go before heads.
    """
    sim = simulate(depth=depth, policy=policy, cpu_chunks=6, num_blocks=64, token_budget=64, blocks_per_chunk=7)
    run_one(sim, tokens(2, 9), 1)
    touched = []
    touch = sim.manager.touch
    sim.manager.touch = lambda keys, ctx: (touched.append(ctx.req_id), touch(keys, ctx))[1]
    sim.hold_copies()
    sim.add_request(tokens(14), 100, "a")
    step_until(sim, lambda: "a" not in sim.live, limit=300)
    sim.step()
    sim.copies.run(newest_first=newest_first)
    sim.release_copies()
    sim.run_until_idle()
    assert touched == ["a"]
    assert len(sim.blocks_moved("store", "a")) == 4 * 7
    run_one(sim, tokens(4 * 28, 1), 1)  # four chunks into six rows of which four are taken
    push_out(sim)
    run_one(sim, tokens(14) + sim.outputs["a"], 1, "again")
    assert len(sim.blocks_moved("load", "again")) == 2 * 7
    sim.converge()


@DEPTHS
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_case_26_two_loads_fill_the_device(simulate: Simulate, depth: int, fails: bool, ranks: int) -> None:
    """Case 26: 7 device blocks, A needs 4 + 1, B needs 3 + 1, both load at once: both are over within 60 steps."""
    sim = simulate(depth=depth, num_blocks=8, ranks=ranks, extra=ALL_PINS)
    prompts = {"a": tokens(17), "b": tokens(13, 1)}
    for prompt in prompts.values():
        run_one(sim, prompt)
    push_out(sim)
    sim.hold_copies()
    for name, prompt in prompts.items():
        sim.add_request(prompt, 2, name)
    for _ in range(4):
        sim.step()
    assert "WAITING_FOR_REMOTE_KVS" in {status(sim, name) for name in prompts}
    sim.copies.faults = int(fails)
    sim.release_copies()
    step_until(sim, lambda: not sim.live, limit=60)
    assert {name: len(sim.outputs[name]) for name in prompts} == {"a": 2, "b": 2}
    sim.converge()


def break_copies(sim: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The next copy does not do its work."""
    if how == "refused at submit":
        sim.copies.submit_faults = 1
    elif how == "failed":
        sim.copies.faults = 1
    else:
        poll = HostCopyEngine.poll
        broken = [True]

        def raising(engine: Any) -> Any:
            if broken:
                broken.clear()
                raise RuntimeError("device lost")
            return poll(engine)

        monkeypatch.setattr(HostCopyEngine, "poll", raising)


HOW = pytest.mark.parametrize("how", ["refused at submit", "failed", "raised at poll"])


@DEPTHS
@HOW
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_case_42_a_load_fails(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, depth: int, how: str, policy: str, ranks: int
) -> None:
    """Case 42: the copy engine fails a load on one rank: with "recompute" the request computes, with "fail" it ends.

    The engine lives, another request is untouched, and both run again afterwards. (The worker half's tests do it with
    two groups.)
    """
    sim = simulate(depth=depth, load_failure_policy=policy, ranks=ranks, num_blocks=40, token_budget=64)
    run_one(sim, tokens(17))
    push_out(sim)
    sim.add_request(tokens(6, 1), 9, "other")
    sim.step()
    sim.hold_copies()
    sim.add_request(tokens(17), 3, "a")
    if how == "refused at submit":
        break_copies(sim, monkeypatch, how)
    step_until(sim, lambda: "a" not in sim.live or status(sim, "a") == "WAITING_FOR_REMOTE_KVS")
    if how != "refused at submit":
        break_copies(sim, monkeypatch, how)
    sim.step()
    sim.release_copies()
    step_until(sim, lambda: not sim.live)
    assert any("failed {'a'}" in event for event in sim.story.of("a"))
    assert len(sim.outputs["other"]) == 9
    assert len(sim.outputs["a"]) == (3 if policy == "recompute" else 0)
    run_one(sim, tokens(17), 3, "later")
    assert len(sim.outputs["later"]) == 3
    sim.converge()


@DEPTHS
@HOW
def test_case_42_a_store_fails(simulate: Simulate, monkeypatch: pytest.MonkeyPatch, depth: int, how: str) -> None:
    """Case 42: a store fails: the request does not notice, its chunks are no hits, and they are stored next time."""
    sim = simulate(depth=depth, num_blocks=40, token_budget=64)
    run_one(sim, tokens(2, 9), 1)
    break_copies(sim, monkeypatch, how)
    run_one(sim, tokens(16), 1, "a")
    assert len(sim.outputs["a"]) == 1
    push_out(sim)
    run_one(sim, tokens(17), 1, "b")
    assert not sim.blocks_moved("load", "b")
    if how != "raised at poll":  # after that an engine is not believed any more
        push_out(sim)
        run_one(sim, tokens(17), 1, "c")
        assert len(sim.blocks_moved("load", "c")) == 4
    sim.converge()
