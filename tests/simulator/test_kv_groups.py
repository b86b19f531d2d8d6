"""Models with several KV groups, and with a window: the runner checks every byte that a layer's attention reaches."""

from dataclasses import replace
from typing import Any

import pytest
from sim_helpers import push_out, run_one, step_until, tokens

from vllm_tiered_offload.testing.simulator.builders import REPLICAS_ARE_TOLD
from vllm_tiered_offload.testing.simulator.config import (
    ALL_PINS,
    BESIDE_A_NEIGHBOUR,
    LATENT,
    ONE_GROUP,
    SEVERAL_GROUPS,
    SimConfig,
    SimGroup,
)
from vllm_tiered_offload.testing.simulator.episodes import run_episode

FULL, WINDOW, STATE, DRAFT = SimGroup(), SimGroup(window=9), SimGroup(recurrent=True), SimGroup(draft=True)
ROOMY = SimConfig(num_blocks=60, token_budget=16)


def described(groups: tuple[SimGroup, ...]) -> str:
    return replace(ROOMY, groups=groups).describe().split("groups=")[1].split()[0]


@pytest.mark.parametrize("groups", SEVERAL_GROUPS, ids=described)
@pytest.mark.parametrize(("depth", "blocks_per_chunk"), [(1, 1), (2, 2), (1, 4)])
def test_random_episode(groups: tuple[SimGroup, ...], depth: int, blocks_per_chunk: int) -> None:
    """Chaos, then faults off and convergence, with every checker.

    Fails when windows are taken to be a block shorter than they are, when the lookup asks for full attention alone, and
    when a chunk is stored of which vLLM has given up what a hit reads.
    """
    config = replace(ROOMY, groups=groups, depth=depth, blocks_per_chunk=blocks_per_chunk)
    totals, failure = run_episode(11, depth, config, steps=120)
    assert failure is None, str(failure)
    assert totals.events["load"] > 0


@pytest.mark.parametrize("groups", SEVERAL_GROUPS, ids=described)
def test_case_32_what_is_stored_comes_back(simulate: Any, groups: tuple[SimGroup, ...]) -> None:
    """A prompt that left the device comes back up to the last stride before its end, whole."""
    sim = simulate(num_blocks=60, groups=groups, blocks_per_chunk=2)
    stride = 2 * sim.config.hit_tokens
    prompt = tokens(50)
    run_one(sim, prompt)
    push_out(sim)
    again = sim.add_request(prompt, 1)
    step_until(sim, lambda: sim.live[again].num_computed_tokens > 0)
    keyed = len(prompt) // sim.config.hash_tokens * sim.config.hash_tokens - sim.config.tokens_ahead
    assert sim.live[again].num_computed_tokens == min(len(prompt) - 1, keyed) // stride * stride
    sim.converge()


def test_a_window_loads_no_more_than_is_read(simulate: Any) -> None:
    """48 tokens come back: 12 blocks of the full group, and of the other the 2 that a window of 9 reaches."""
    sim = simulate(num_blocks=60, groups=(FULL, WINDOW))
    run_one(sim, tokens(49))
    push_out(sim)
    run_one(sim, tokens(49), 1, "again")
    (load,) = [job for kind, job in sim.jobs if kind == "load"]
    assert {t.group_idx: len(t.device_block_ids) for t in load.transfers} == {0: 12, 1: 2}
    sim.converge()


def test_a_local_prefix_is_not_loaded_again(simulate: Any) -> None:
    """The device has the first 16 tokens: the load begins behind them in the full group, in the window at its start."""
    sim = simulate(num_blocks=60, groups=(FULL, WINDOW))
    run_one(sim, tokens(49))
    push_out(sim)
    run_one(
        sim,
        tokens(17),
        1,
        "short",
    )
    run_one(sim, tokens(49), 1, "again")
    load = [job for kind, job in sim.jobs if kind == "load" and job.req_id == "again"]
    assert {t.group_idx: len(t.device_block_ids) for t in load[0].transfers} == {0: 8, 1: 2}
    sim.converge()


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_case_17_window_moves_on_while_stores_are_refused(simulate: Any, blocks_per_chunk: int) -> None:
    """The tier is full while the window passes by; what is stored afterwards is of its own place.

    Fails (d1) when placeholder blocks are stored, and when blocks are counted from the first that vLLM still holds.
    """
    sim = simulate(
        num_blocks=80,
        groups=(FULL, SimGroup(window=8)),
        cpu_chunks=8,
        token_budget=8,
        blocks_per_chunk=blocks_per_chunk,
        extra=ALL_PINS,
    )
    run_one(sim, tokens(17), 1)
    push_out(sim)
    sim.hold_copies()
    sim.add_request(tokens(17), 1, "pins")
    step_until(sim, sim.is_loading)
    sim.add_request(tokens(24, 3), 40, "b")
    step_until(sim, lambda: sim.live["b"].num_output_tokens >= 12)
    sim.release_copies()
    step_until(sim, lambda: sim.live["b"].num_output_tokens >= 38)
    assert sim.blocks_moved("store", "b")
    sim.converge()


def test_blocks_that_leave_the_window_stay_while_a_store_reads_them(simulate: Any) -> None:
    """vLLM frees them long before the request ends; others need memory meanwhile (d2 watches them).

    Fails (d2) when stores pin only the full group's blocks.
    """
    sim = simulate(num_blocks=30, groups=(FULL, SimGroup(window=5)), extra=ALL_PINS)
    sim.hold_copies()
    sim.add_request(tokens(24), 12, "a")
    step_until(sim, lambda: sim.live["a"].num_output_tokens >= 6)
    for seed in range(3):
        sim.add_request(tokens(12, seed + 5), 4)
    for _ in range(20):
        sim.step()
    assert len(sim.jobs) > 0
    sim.release_copies()
    sim.converge()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("groups", [(FULL, WINDOW), (WINDOW,)], ids=described)
def test_case_42_failed_loads_with_groups(simulate: Any, groups: tuple[SimGroup, ...], policy: str, ranks: int) -> None:
    """A receive that fails on one rank ends in that request's own recomputation; another one's load is left alone.

    Invalid block ids would kill the engine here. Fails when every receive of a step counts as failed.
    """
    sim = simulate(num_blocks=120, groups=groups, load_failure_policy=policy, ranks=ranks)
    first = [run_one(sim, tokens(49, seed), 4) for seed in (0, 1)]
    push_out(sim)
    sim.hold_copies()
    again = [sim.add_request(tokens(49, seed), 4) for seed in (0, 1)]
    step_until(sim, lambda: sum(kind == "load" for kind, _ in sim.jobs) == 2)
    sim.copies.faults = 1
    sim.run_copies(1)
    sim.step()
    sim.release_copies()
    sim.run_until_idle()
    assert sim.story.counts["fault"] == 1
    assert sim.outputs[again[1]] == sim.outputs[first[1]]
    if policy == "recompute":
        assert sim.outputs[again[0]] == sim.outputs[first[0]]
    else:
        assert sim.outputs[again[0]] == []
    sim.converge()


@pytest.mark.parametrize("token_budget", [200, 120])
@pytest.mark.parametrize("windows", [1, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_comes_back_whole_though_pins_are_short(
    simulate: Any, depth: int, windows: int, token_budget: int
) -> None:
    """A step writes more blocks than may be pinned at a time: the window in front of its end is stored first, the rest
    of the prompt in the steps that follow.

    116 tokens came back instead of 196 when strides were stored in their order alone, and when the rest was offered
    again only behind the next full chunk.
    """
    sim = simulate(
        depth=depth,
        groups=(FULL, *[SimGroup(window=40)] * windows),
        num_blocks=60 * (windows + 1),
        cpu_chunks=100 * (windows + 1),
        token_budget=token_budget,
    )
    run_one(sim, tokens(2, 9))
    run_one(sim, tokens(200), 7)
    assert sim.story.counts["store"] > 2
    push_out(sim)
    again = sim.add_request(tokens(200), 1)
    step_until(sim, lambda: sim.live[again].num_computed_tokens > 0)
    assert sim.live[again].num_computed_tokens == 196
    sim.converge()


@pytest.mark.parametrize("number", range(len(BESIDE_A_NEIGHBOUR)))
def test_random_episode_beside_a_neighbour(number: int) -> None:
    """MultiConnector: some prefixes are the other connector's, and are stored by us once they are there (case 10)."""
    config = replace(
        ROOMY,
        groups=BESIDE_A_NEIGHBOUR[number],
        neighbour=("async", "sync")[number % 2],
        neighbour_first=number % 3 > 0,
        depth=1 + number % 2,
    )
    totals, failure = run_episode(12, number, config, steps=100)
    assert failure is None, str(failure)
    assert totals.events["store"] > 0


def started_at(sim: Any, prompt: list[int], req_id: str) -> int:
    """How many tokens of a prompt it need not compute; it is left running."""
    sim.add_request(prompt, 8, req_id)
    step_until(sim, lambda: sim.live[req_id].num_computed_tokens > 0)
    return int(sim.live[req_id].num_computed_tokens)


def test_case_31_hits_end_at_a_state(simulate: Any) -> None:
    """Chunk 16, a prompt of 32 tokens: the state after token 32 is of no use to it, so it goes on from that after 16.

    Fails when a hit is counted by the attention group alone.
    """
    sim = simulate(num_blocks=30, groups=(FULL, STATE), block_size=16, token_budget=64)
    run_one(sim, tokens(17))  # before 0.32 vLLM keeps no state in the middle of the longer prompt
    run_one(sim, tokens(32), 4)
    push_out(sim)
    assert started_at(sim, tokens(32), "again") == 16
    sim.converge()


def test_a_state_is_stored_where_a_step_ended(simulate: Any) -> None:
    """60 tokens in one step: vLLM keeps the state before the last token, none of those that the step passed by.

    Another end after 30 of them finds no state to go on from. Fails when the lookup asks the attention group alone.
    """
    sim = simulate(num_blocks=60, groups=(FULL, STATE), token_budget=64)
    run_one(sim, tokens(61), 1)
    stores = [job for kind, job in sim.jobs if kind == "store"]
    assert sum(len(t.device_block_ids) for job in stores for t in job.transfers if t.group_idx == 1) == 1
    push_out(sim)
    assert started_at(sim, tokens(61), "whole") == 60
    run_one(sim, [*tokens(30), *tokens(31, 9)], 1, "branch")
    assert [job.req_id for kind, job in sim.jobs if kind == "load"] == ["whole"]
    sim.converge()


@pytest.mark.parametrize("depth", [1, 2])
def test_ranks_that_hold_the_same_share_a_slot(simulate: Any, depth: int) -> None:
    """MLA: a row has room for one rank, and what comes back is right on both. Fails (bytes) when rank 1 loads from what
    only it would have written."""
    sim = simulate(num_blocks=40, groups=LATENT, ranks=2, depth=depth)
    first = run_one(sim, tokens(49), 4)
    push_out(sim)
    again = run_one(sim, tokens(49), 4)
    assert any(kind == "load" for kind, _ in sim.jobs)
    assert sim.outputs[again] == sim.outputs[first]
    sim.converge()


@pytest.mark.skipif(
    not REPLICAS_ARE_TOLD, reason="vLLM 0.30 does not say which ranks hold the same: each stores its own"
)
def test_ranks_that_hold_the_same_acknowledge_a_store_that_one_of_them_copies(simulate: Any) -> None:
    """MLA: rank 1 has nothing to copy and says so at once; the blocks stay until rank 0 has copied them.

    Fails when rank 1 copies too, when it never acknowledges, and when its word alone ends the store.
    """
    sim = simulate(num_blocks=40, groups=LATENT, ranks=2)
    sim.hold_copies()
    first = sim.add_request(tokens(17), 1)
    for _ in range(10):
        sim.step()
    assert len([job for kind, job in sim.jobs if kind == "store"]) == len(sim.copies) == 1
    assert not sim.scheduler.reset_prefix_cache(False, False), "its blocks are pinned"
    sim.release_copies()
    sim.run_until_idle()
    push_out(sim)
    again = run_one(sim, tokens(17), 1)
    assert len(sim.blocks_moved("load", again)) == 4
    assert sim.outputs[again] == sim.outputs[first]
    sim.converge()


def test_what_the_writing_rank_could_not_store_is_computed(simulate: Any) -> None:
    """MLA: rank 1 acknowledged the store, rank 0's copy broke off. Fails when the chunk counts all the same."""
    sim = simulate(num_blocks=40, groups=LATENT, ranks=2)
    sim.copies.faults = 1
    run_one(sim, tokens(17), 1)
    assert sim.copies.faults == 0
    push_out(sim)
    again = run_one(sim, tokens(17), 1)
    assert not sim.blocks_moved("load", again)
    sim.converge()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_of_the_ranks_is_computed(simulate: Any, rank: int) -> None:
    """MLA: the other rank has loaded its blocks; what one could not load is computed, and stored anew.

    Fails when a failed rank's load is not told to vLLM, and when its error is lost among the acknowledgements.
    """
    sim = simulate(num_blocks=40, groups=LATENT, ranks=2)
    first = run_one(sim, tokens(17), 4)
    push_out(sim)
    sim.hold_copies()
    again = sim.add_request(tokens(17), 4)
    step_until(sim, lambda: len(sim.copies) == 2)
    sim.run_copies(rank)
    sim.copies.faults = 1
    sim.release_copies()
    sim.run_until_idle()
    assert len(sim.blocks_moved("load", again)) == len(sim.blocks_moved("store", again)) == 4
    assert sim.outputs[again] == sim.outputs[first]
    sim.converge()


def test_random_episode_on_ranks_that_hold_the_same() -> None:
    config = replace(ROOMY, groups=LATENT, ranks=2, num_blocks=26, blocks_per_chunk=2)
    totals, failure = run_episode(5, 1, config, steps=150)
    assert failure is None, str(failure)
    assert totals.events["load"] > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", [(FULL, DRAFT), (DRAFT,)], ids=described)
def test_prompts_that_fork_behind_a_chunk_have_their_own_drafts(
    simulate: Any, groups: tuple[SimGroup, ...], depth: int
) -> None:
    """Two prompts have the same first 16 tokens and another one next, which the draft layers' slot 15 depends on.

    Fails (d5) when a chunk of draft layers has the hash at its end as its key.
    """
    sim = simulate(num_blocks=60, groups=groups, depth=depth)
    prompts = [[*tokens(16), *tokens(9, seed)] for seed in (1, 2)]
    first = [run_one(sim, prompt, 4) for prompt in prompts]
    push_out(sim)
    for number, prompt in enumerate(prompts):
        assert started_at(sim, prompt, f"again{number}") == 20
        sim.run_until_idle()
        assert sim.outputs[f"again{number}"][:4] == sim.outputs[first[number]]
    sim.converge()


def test_a_hit_ends_a_block_before_what_is_not_known_yet(simulate: Any) -> None:
    """Of a prompt of 33 tokens the draft layers' last full block has no key: token 32 is known, and its block is not.

    The request that computed it went on, and stored it under its own continuation.
    """
    sim = simulate(num_blocks=60, groups=(FULL, DRAFT))
    run_one(sim, tokens(33), 8)
    push_out(sim)
    assert started_at(sim, tokens(33), "again") == 28
    sim.converge()


@pytest.mark.parametrize("groups", [(FULL, DRAFT), (DRAFT,)], ids=described)
@pytest.mark.parametrize("fields", [{"blocks_per_chunk": 4}, {"tiers": 1, "request_level": True}], ids=str)
def test_drafts_of_a_device_hit_are_not_stored(
    simulate: Any, groups: tuple[SimGroup, ...], fields: dict[str, Any]
) -> None:
    """`c` and `a` fork behind token 8, so vLLM has two blocks with one hash, and gives `d`, which goes on where `a`
    ended, the one of `c`: its last slot of draft layers has seen another token. What `d` loads later is right still.

    Fails (d1) when blocks of a device hit are stored like those that were computed.
    """
    sim = simulate(num_blocks=60, groups=groups, **fields)
    common = tokens(8)
    for req_id, rest in (("c", tokens(5, 1)), ("a", tokens(9, 2))):
        sim.add_request([*common, *rest], 1, req_id, {"max_offload_tokens": 0})
        sim.run_until_idle()
    longer = [*common, *tokens(9, 2), *tokens(20, 3)]
    started_at(sim, longer, "d")
    assert sim.runner.sequences["d"].device_hit == 12
    blocks = sim.scheduler.kv_cache_manager.get_block_ids("d")[-1]
    wrong = sim.runner.groups[-1].block(blocks[1]) != sim.runner.expected("d", 4, 8, len(groups) - 1)
    assert wrong.any(axis=(0, 1, 3)).tolist() == [False, False, False, True]
    sim.run_until_idle()
    push_out(sim)
    run_one(sim, longer, 1, "again")
    sim.converge()


SPECULATIVE = [ONE_GROUP, (FULL, WINDOW), *(groups for groups in SEVERAL_GROUPS if any(one.draft for one in groups))]


@pytest.mark.parametrize("groups", SPECULATIVE, ids=described)
@pytest.mark.parametrize(("depth", "blocks_per_chunk"), [(1, 1), (2, 2)])
def test_random_episode_with_speculative_decoding(
    groups: tuple[SimGroup, ...], depth: int, blocks_per_chunk: int
) -> None:
    """One guess of four is rejected, and its slots and those behind hold nothing of use (D1).

    Failed (bytes) when the wrong slots were not written again, and when sessions went on behind guesses that vLLM
    counts as computed.
    """
    config = replace(ROOMY, groups=groups, depth=depth, blocks_per_chunk=blocks_per_chunk, speculative_tokens=3)
    totals, failure = run_episode(13, depth, config, steps=120)
    assert failure is None, str(failure)
    assert totals.events["load"] > 0
