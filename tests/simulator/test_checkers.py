"""The simulator notices: a toy connector passes, and each bug put into it is found by the checker it should trip.

These are the simulator's own mutation tests: `toy_connector` breaks one invariant at a time.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from vllm_tiered_offload.testing.simulator.config import SimConfig
from vllm_tiered_offload.testing.simulator.episodes import run_episode
from vllm_tiered_offload.testing.simulator.story import Violation

TOY = ("ToyConnector", "toy_connector")


def toy(bug: str | None = None, **fields: Any) -> SimConfig:
    return SimConfig(connector=TOY, extra={"bug": bug}, **fields)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("neighbour", [None, "async", "sync"])
def test_correct_toy_passes(depth: int, neighbour: str | None) -> None:
    totals, failure = run_episode(3, depth, toy(depth=depth, neighbour=neighbour, ranks=depth), steps=250)
    assert failure is None, str(failure)
    assert totals.events["load"] > 0
    assert totals.events["store"] > 0


@pytest.mark.parametrize(
    ("bug", "checkers"),
    [
        ("wrong_row", ["bytes"]),
        ("early_ack", ["bytes", "d1", "d2"]),
        ("no_pin", ["d2", "d1"]),
        ("unwritten", ["d1"]),
        ("row_reuse", ["d4"]),
        ("double_receive", ["d7"]),
        ("hidden_failure", ["d7"]),
        ("silent_failure", ["bytes"]),
        ("lost_load", ["d8"]),
        ("stale_rows", ["l6"]),
        ("stale_offer", ["l6"]),
        ("submit_after_finish", ["l1"]),
        ("no_finish", ["l1"]),
        ("late_final", ["l2"]),
        ("ask_forever", ["v1"]),
        ("busy", ["v5"]),
        ("leak", ["v5"]),
        ("file", ["no_io"]),
    ],
)
def test_bug_is_found(bug: str, checkers: list[str]) -> None:
    for episode in range(6):
        config = toy(bug, depth=1 + episode % 2, num_blocks=20, seconds_per_step=0.05)
        _, failure = run_episode(11, episode, config, steps=250)
        if failure is not None:
            break
    else:
        pytest.fail(f"{bug} was not noticed")
    assert failure.text.startswith(tuple(f"[{name}]" for name in checkers)), failure.text[:400]


def test_violation_tells_the_story(simulate: Callable[..., Any]) -> None:
    sim = simulate(connector=TOY, extra={"bug": "wrong_row"}, num_blocks=12)
    prompt = list(range(10, 30))
    sim.add_request(prompt, 1, "first")
    sim.run_until_idle()
    push_out(sim)
    sim.add_request(prompt, 1, "again")
    with pytest.raises(Violation) as caught:
        sim.run_until_idle()
    text = str(caught.value)
    assert "story of again" in text
    assert "load" in text


def push_out(sim: Any) -> None:
    """Fill the device cache with other prompts."""
    rng = random.Random(1)
    for _ in range(3):
        sim.add_request([rng.randrange(100, 30_000) for _ in range(32)], 1)
        sim.run_until_idle()
