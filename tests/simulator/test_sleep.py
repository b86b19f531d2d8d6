"""The device memory goes away and comes back (vLLM's sleep), with the same weights or others, or moves."""

from typing import Any

import pytest
import torch
from sim_helpers import push_out, run_one, step_until, tokens

from vllm_tiered_offload.testing.simulator.config import SimGroup
from vllm_tiered_offload.testing.simulator.events import sleep_and_wake_up

GROUPS = [(SimGroup(),), (SimGroup(), SimGroup(window=9))]


@pytest.mark.parametrize("new_weights", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("groups", GROUPS, ids=["full", "full+window"])
def test_after_sleep_everything_is_computed_and_stored_anew(
    simulate: Any, groups: tuple[SimGroup, ...], ranks: int, new_weights: bool
) -> None:
    """Case 14: nothing of before is read, neither from the device nor from host memory; afterwards loads work again.

    Fails (bytes) when the reset keeps the keys of host memory, and (no load) when the workers are not told of waking.
    """
    sim = simulate(groups=groups, ranks=ranks, num_blocks=40)
    first = run_one(sim, tokens(33), 3)
    sleep_and_wake_up(sim, new_weights)
    loads = [job for kind, job in sim.jobs if kind == "load"]
    again = run_one(sim, tokens(33), 3)
    assert [job for kind, job in sim.jobs if kind == "load"] == loads == []
    assert (sim.outputs[again] == sim.outputs[first]) != new_weights
    push_out(sim)
    third = run_one(sim, tokens(33), 3)
    assert sim.blocks_moved("load", third)
    assert sim.outputs[third] == sim.outputs[again]
    sim.converge()


@pytest.mark.parametrize("depth", [1, 2])
def test_sleep_is_refused_while_copies_hold_blocks(simulate: Any, depth: int) -> None:
    """A copy hangs beyond its deadline: the engine comes to rest, but its memory must not go. Then the copy ends.

    This is what protects versions of vLLM that do not tell the connector: a reset fails while a block is in use. Fails
    when pins are given back at the deadline.
    """
    sim = simulate(depth=depth, num_blocks=40)
    run_one(sim, tokens(2, 9))
    sim.hold_copies()
    sim.add_request(tokens(33), 2)
    step_until(sim, lambda: not sim.live)
    sim.clock.advance(100.0)
    sim.run_until_idle()
    assert len(sim.copies)
    assert not sim.sleep()
    sim.release_copies()
    sim.add_request(tokens(2, 10), 1)  # acknowledgements need steps
    sim.run_until_idle()
    assert sim.sleep()
    sim.wake_up()
    sim.converge()


@pytest.mark.parametrize("groups", GROUPS, ids=["full", "full+window"])
def test_registered_again(simulate: Any, groups: tuple[SimGroup, ...]) -> None:
    """vLLM hands over the KV cache a second time: host memory stays, loads and stores go on."""
    sim = simulate(groups=groups, num_blocks=40)
    first = run_one(sim, tokens(33), 3)
    for worker in sim.workers:
        worker.register()
    push_out(sim)
    again = run_one(sim, tokens(33), 3)
    assert sim.blocks_moved("load", again)
    assert sim.outputs[again] == sim.outputs[first]
    sim.converge()


def test_registered_again_in_another_layout(simulate: Any) -> None:
    """Nobody could read what host memory holds: refused with the reason, and the former memory stays in use."""
    sim = simulate(num_blocks=40)
    run_one(sim, tokens(33), 3)
    (worker,) = sim.workers
    others = {name: torch.zeros_like(tensor).transpose(1, 2).contiguous() for name, tensor in worker.tensors.items()}
    others = {name: tensor.reshape(40, 2, -1, tensor.shape[-1]) for name, tensor in others.items()}
    with pytest.raises(RuntimeError, match=r"another layout.*restart the engine"):
        worker.connector.register_kv_caches(others)
    push_out(sim)
    assert sim.blocks_moved("load", run_one(sim, tokens(33), 3))
    sim.converge()
