"""Cases from the field as small scripts: numbers 1-6, 8, 10, 12, 13 and 15. Every checker watches each of them.

The checkers are shown to fail in test_checkers.py; an assertion here says what a case is about beyond that.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from sim_helpers import push_out, run_one, status, step_until, tokens

from vllm_tiered_offload.connector import views
from vllm_tiered_offload.testing.simulator.config import ALL_PINS, SAVES

Simulate = Callable[..., Any]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@DEPTHS
@pytest.mark.parametrize("answer", range(1, 11))
def test_case_1_finish_completes_a_chunk(simulate: Simulate, depth: int, answer: int) -> None:
    """Case 1: the finish completes a chunk with nothing else in flight; full and partial tails.

    Final store first, then one finish signal (l1, l2); everything that a forward pass wrote is stored.
    """
    sim = simulate(depth=depth)
    run_one(sim, tokens(3), answer, "a")
    sim.converge()
    assert len(sim.blocks_moved("store", "a")) == (3 + answer - 1) // 4


@DEPTHS
def test_case_1_reset_between_finish_and_final_store(simulate: Simulate, depth: int) -> None:
    """Case 1, with a reset after the finish: the final store is dropped, the signal still comes once (l1, l6)."""
    sim = simulate(depth=depth)
    sim.add_request(tokens(3), 6, "a")
    step_until(sim, lambda: "a" not in sim.live)
    sim.reset()
    sim.converge()
    push_out(sim)
    run_one(sim, tokens(3) + sim.outputs["a"], 1, "b")
    assert not sim.blocks_moved("load", "b")


@DEPTHS
def test_reset_while_only_final_stores_hold_blocks(simulate: Simulate, depth: int) -> None:
    """vLLM's own reset fails because of our pins, which the reset then drops: its cache is stale all the same (l6).

    Mutation: asking after the pins are dropped whether vLLM's reset succeeded stores what attends to old slots.
    """
    sim = simulate(depth=depth)
    run_one(sim, tokens(2, 9), 1)
    sim.add_request(tokens(11), 2, "a")
    step_until(sim, lambda: "a" not in sim.live)
    assert not sim.reset()
    sim.add_request([*tokens(11), 5], 6, "b")
    sim.run_until_idle()
    assert not sim.blocks_moved("store", "b")
    sim.converge()


@DEPTHS
def test_case_2_finish_with_stores_submitted(simulate: Simulate, depth: int) -> None:
    """Case 2: two chunks submitted, not completed; finish; complete. Nothing is submitted after the signal (l1, l2)."""
    sim = simulate(depth=depth)
    sim.hold_copies()
    sim.add_request(tokens(8), 2, "a")
    step_until(sim, lambda: "a" not in sim.live)
    for _ in range(3):
        sim.step()
    assert sim.has_work()
    assert sim.leftover_state()["jobs"]
    sim.converge()
    assert len(sim.blocks_moved("store", "a")) == 2


@DEPTHS
def test_case_3_abort_while_waiting_for_memory(simulate: Simulate, depth: int) -> None:
    """Case 3: request 1 waits for the blocks that request 0 has; abort it; no job, one signal, nothing left."""
    sim = simulate(depth=depth, num_blocks=6)
    sim.add_request(tokens(16), 3, "r0")
    sim.step()
    sim.add_request(tokens(16, 1), 3, "r1")
    sim.step()
    assert status(sim, "r1") == "WAITING"
    sim.abort("r1")
    sim.step()
    sim.converge()
    assert not sim.blocks_moved("store", "r1")


@DEPTHS
@pytest.mark.parametrize("while_running", [False, True])
def test_case_3_abort_after_the_first_chunk(simulate: Simulate, depth: int, while_running: bool) -> None:
    """Case 3: abort one step after the first chunk of a chunked prefill. Only what was written may be stored (d1)."""
    sim = simulate(depth=depth, token_budget=4, max_num_seqs=4)
    run_one(sim, tokens(2), 1)
    sim.add_request(tokens(16), 3, "a")
    sim.step()
    sim.step()
    sim.abort("a", while_running=while_running)
    sim.step()
    sim.converge()
    assert len(sim.blocks_moved("store", "a")) <= 3


@DEPTHS
def test_case_3_abort_with_a_lookup_pending(simulate: Simulate, depth: int) -> None:
    """Case 3: abort a request that was told "ask again" (the host region is not known yet)."""
    sim = simulate(depth=depth)
    sim.add_request(tokens(16), 3, "a")
    sim.scheduler.schedule()  # the question alone: its output goes nowhere, and nothing was scheduled
    assert status(sim, "a") == "WAITING"
    sim.abort("a")
    sim.step()
    sim.converge()


@DEPTHS
def test_case_4_finish_on_a_block_boundary(simulate: Simulate, depth: int) -> None:
    """Case 4: 5 prompt + 3 sampled tokens, block 4: the last slot was never written, so one block is stored."""
    sim = simulate(depth=depth)
    run_one(sim, tokens(5), 3, "a")
    sim.converge()
    assert len(sim.blocks_moved("store", "a")) == 1


@DEPTHS
def test_case_5_freed_block_is_taken_at_once(simulate: Simulate, depth: int) -> None:
    """Case 5: one token past a boundary the request finishes, another takes what is free before the store is sent.

    Stored once, with the right bytes: the block stays pinned (d2), and what comes back is checked on reading.
    """
    sim = simulate(depth=depth, num_blocks=6, extra=ALL_PINS)
    run_one(sim, tokens(2, 9), 1)
    sim.hold_copies()
    sim.add_request(tokens(7), 2, "a")
    sim.add_request(tokens(16, 1), 1, "b")
    step_until(sim, lambda: "a" not in sim.live)
    for _ in range(4):
        sim.step()
    sim.converge()
    assert len(sim.blocks_moved("store", "a")) == 2
    push_out(sim)
    run_one(sim, tokens(7) + sim.outputs["a"], 1, "again")
    assert len(sim.blocks_moved("load", "again")) == 2


@DEPTHS
def test_case_6_preempted_with_all_stores_pending(simulate: Simulate, depth: int) -> None:
    """Case 6: 56 tokens in seven stores that do not complete; preempt; it is re-admitted within the bound (v1)."""
    sim = simulate(depth=depth, num_blocks=61, token_budget=8, extra=ALL_PINS)
    run_one(sim, tokens(2, 9), 1)
    sim.hold_copies()
    sim.add_request(tokens(56), 4, "a")
    step_until(sim, lambda: len({job.job_id for kind, job in sim.jobs if kind == "store"}) >= 7)
    if depth == 2:
        step_until(sim, lambda: not sim.live or sim.live["a"].num_output_tokens > 0)
    sim.preempt_all()
    before = list(sim.blocks_moved("store", "a"))
    step_until(sim, lambda: "a" not in sim.live, limit=400)
    assert max(Counter(sim.blocks_moved("store", "a")).values()) == 1
    assert len(before) <= len(sim.blocks_moved("store", "a")) <= len(before) + 1
    sim.converge()


@DEPTHS
@pytest.mark.parametrize("order", ["copies then abort", "abort then copies", "abort between", "abort while running"])
def test_case_8_abort_around_a_load(simulate: Simulate, depth: int, order: str) -> None:
    """Case 8: a load in flight, an abort, a completion, beside another request's pending store, in every order.

    Each load is reported exactly once per rank (d7).
    """
    sim = simulate(depth=depth, ranks=2, extra={**ALL_PINS, "copy_threads": 2})
    run_one(sim, tokens(16), 1)
    push_out(sim)
    sim.hold_copies()
    sim.add_request(tokens(12, 5), 8, "storing")
    sim.add_request(tokens(17), 4, "loading")
    step_until(sim, lambda: status(sim, "loading") == "WAITING_FOR_REMOTE_KVS")
    sim.step()
    if order == "copies then abort":
        sim.run_copies()
    elif order == "abort between":
        sim.run_copies(1)
    sim.abort("loading", while_running=order == "abort while running")
    for _ in range(3):
        sim.step()
    sim.converge()
    received = [event for event in sim.story.of("loading") if "received" in event]
    assert len(received) == 2


@pytest.mark.parametrize("neighbour", ["async", "sync"])
@pytest.mark.parametrize("abort", [False, True])
@DEPTHS
def test_case_10_neighbour_still_fills_the_blocks(simulate: Simulate, depth: int, neighbour: str, abort: bool) -> None:
    """Case 10: another connector is still filling the blocks that we would store (d1 reads every one of them)."""
    sim = simulate(depth=depth, neighbour=neighbour)
    sim.world.share, sim.world.delay = 1.0, (5, 5)
    sim.add_request(tokens(33), 4, "a")
    for _ in range(3):
        sim.step()
    if abort:
        sim.abort("a")
    sim.converge()


@pytest.mark.parametrize("neighbour", ["async", "sync"])
def test_case_10_mirror_cold_requests_are_stored(simulate: Simulate, neighbour: str) -> None:
    """Case 10, mirror: what the neighbour does not have is stored and comes back."""
    sim = simulate(neighbour=neighbour)
    run_one(sim, tokens(16), 1, "cold")
    assert len(sim.blocks_moved("store", "cold")) == 4
    push_out(sim)
    run_one(sim, tokens(17), 1, "again")
    assert len(sim.blocks_moved("load", "again")) == 4
    sim.converge()


def test_case_12_store_in_a_step_without_tokens(simulate: Simulate) -> None:
    """Case 12: a step without scheduled tokens carries a store; it is carried out and comes back."""
    sim = simulate(depth=2)
    sim.add_request(tokens(3), 6, "a")
    empty = []
    while sim.has_work():
        step = sim.step()
        if step is not None and step.message.stores and not step.output.total_num_scheduled_tokens:
            empty.append(step)
    assert empty
    push_out(sim)
    run_one(sim, tokens(3) + sim.outputs["a"], 1, "again")
    assert len(sim.blocks_moved("load", "again")) == 2
    sim.converge()


SLOW = {"num_blocks": 160, "token_budget": 512, "cpu_chunks": 160, "extra": ALL_PINS}


@pytest.mark.parametrize("newcomer", [False, True])
@DEPTHS
def test_case_13_last_request_ends_with_slow_stores(simulate: Simulate, depth: int, newcomer: bool) -> None:
    """Case 13: 100 blocks of stores are slow. Nobody is blocked, work is pending until drained, then none (v5)."""
    sim = simulate(depth=depth, **SLOW)
    run_one(sim, tokens(2, 9), 1)
    sim.hold_copies()
    sim.add_request(tokens(400), 2, "a")
    step_until(sim, lambda: "a" not in sim.live)
    if newcomer:
        sim.add_request(tokens(20, 1), 3, "b")
        step_until(sim, lambda: "b" not in sim.live, limit=12)
    for _ in range(30):
        assert sim.has_work()
        sim.step()
    assert len(sim.blocks_moved("store", "a")) == 100
    sim.release_copies()
    assert sim.run_until_idle() <= 4
    sim.converge()


def test_case_13_pending_work_has_a_deadline(simulate: Simulate) -> None:
    """Case 13: stores that never end do not keep the engine busy for ever; late ones still give everything back."""
    sim = simulate(**SLOW)
    run_one(sim, tokens(2, 9), 1)
    sim.hold_copies()
    sim.add_request(tokens(400), 2, "a")
    step_until(sim, lambda: "a" not in sim.live)
    sim.step()
    sim.clock.advance(120)
    sim.run_until_idle(limit=5)
    sim.release_copies()
    run_one(sim, tokens(4, 2), 1)  # the next step brings the late acknowledgement
    sim.converge()


@DEPTHS
def test_case_15_tier_full_of_pinned_rows(simulate: Simulate, depth: int) -> None:
    """Case 15: all 4 rows pinned by a load; 8 blocks over three prefill steps; unpin; go on.

    What is stored is a prefix without a hole, and the declined range is offered a bounded number of times.
    """
    sim = simulate(depth=depth, cpu_chunks=4, token_budget=12, num_blocks=30, extra=ALL_PINS)
    run_one(sim, tokens(16), 1)
    push_out(sim)
    sim.hold_copies()
    sim.add_request(tokens(17), 1, "pins")
    step_until(sim, lambda: status(sim, "pins") == "WAITING_FOR_REMOTE_KVS")
    offers = count_offers(sim, "b")
    sim.add_request(tokens(32, 3), 24, "b")
    step_until(sim, lambda: sim.live["b"].num_output_tokens >= 8)
    assert not sim.blocks_moved("store", "b")
    assert 0 < len(offers) <= 8
    sim.release_copies()
    step_until(sim, lambda: sim.live["b"].num_output_tokens >= 20)
    table = list(sim.runner.sequences["b"].blocks[0])
    stored = sim.blocks_moved("store", "b")
    assert stored
    assert stored == table[: len(stored)]
    sim.converge()


def count_offers(sim: Any, req_id: str) -> list[int]:
    """Sizes of the ranges that the manager is offered for this request from now on."""
    manager = sim.manager
    offers: list[int] = []
    prepare_stores = manager.prepare_stores

    def counted(step_offers: Any) -> Any:
        offers.extend(len(keys) for keys, ctx in step_offers if ctx.req_id == req_id)
        return prepare_stores(step_offers)

    manager.prepare_stores = counted
    return offers


@pytest.mark.parametrize("saves", SAVES)
def test_stores_of_a_step_without_tokens_are_submitted(simulate: Simulate, saves: str) -> None:
    """With async scheduling a request's last chunk may be stored by a step that computes nothing. In such a step vLLM
    0.30 leaves wait_for_save out, and 0.33 may call it after it asked for results.

    Mutation: a worker half that submits stores in wait_for_save alone is busy until the job's deadline with 0.30.
    """
    sim = simulate(depth=2, saves=saves)
    without_tokens = 0
    for length in range(20, 29):
        sim.add_request(tokens(length, length), 1 + length % 3)
        for _ in range(100):
            step = sim.step() if sim.has_work() else None
            if step is not None and not step.output.total_num_scheduled_tokens:
                without_tokens += len(step.message.stores)
        assert not sim.has_work()
    assert without_tokens > 0


def test_sessions_whose_hashes_lie_are_not_offloaded(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before vLLM 0.32 the block that the dropped token completed keeps its hash, and is computed with another token.

    Without the check, this fails on every version; on 0.30 the checker of keys (d5) found it first.
    """
    monkeypatch.setattr(views, "SESSIONS_KEEP_TRUE_HASHES", False)
    sim = simulate(extra=ALL_PINS)
    sim.add_request(tokens(7), 1, "session", session=True)
    step_until(sim, sim.sessions_waiting)
    sim.continue_session("session", tokens(9, 1), 3)
    step_until(sim, sim.sessions_waiting)
    sim.end_sessions()
    sim.run_until_idle()
    assert not sim.blocks_moved("store", "session")
    run_one(sim, tokens(9, 2), 1, "other")
    assert sim.blocks_moved("store", "other")


@DEPTHS
@pytest.mark.skipif(not views.SESSIONS_KEEP_TRUE_HASHES, reason="sessions are not offloaded on vLLM before 0.32")
def test_session_continues_on_its_own_blocks(simulate: Simulate, depth: int) -> None:
    """A streaming session's block hashes shrink when it takes new input (its last token is dropped): stores go on.

    What was stored under the old tokens and what is stored under the new ones both come back right.
    """
    sim = simulate(depth=depth, extra=ALL_PINS)
    sim.add_request(tokens(7), 2, "session", session=True)
    step_until(sim, sim.sessions_waiting)
    first = tokens(7) + sim.outputs["session"]
    sim.continue_session("session", tokens(9, 1), 3)
    step_until(sim, sim.sessions_waiting)
    whole = list(sim.live["session"].all_token_ids)
    sim.end_sessions()
    sim.run_until_idle()
    assert len(sim.blocks_moved("store", "session")) == (len(whole) - 1) // 4
    push_out(sim)
    run_one(sim, [*first, 5], 1, "old")
    push_out(sim)
    run_one(sim, [*whole, 5], 1, "new")
    assert len(sim.blocks_moved("load", "old")) == len(first[:-1]) // 4
    assert len(sim.blocks_moved("load", "new")) == (len(whole) - 1) // 4
    sim.converge()
