"""A failure of a random run comes with the few events that lead to it, and they lead to it again."""

import random

import pytest

from vllm_tiered_offload.testing.simulator import __main__ as command
from vllm_tiered_offload.testing.simulator.config import SimConfig, rotation
from vllm_tiered_offload.testing.simulator.episodes import run_episode
from vllm_tiered_offload.testing.simulator.events import Event, tell
from vllm_tiered_offload.testing.simulator.shrink import shrink

TOY = ("ToyConnector", "toy_connector")


@pytest.mark.parametrize(("bug", "at_most"), [("stale_offer", 6), ("wrong_row", 6), ("lost_load", 12)])
def test_a_failure_shrinks_to_its_cause(bug: str, at_most: int) -> None:
    """What is left over leads to the same checker; no arrival that does not matter is among it."""
    config = SimConfig(connector=TOY, extra={"bug": bug}, num_blocks=20, seconds_per_step=0.05)
    failures = (run_episode(11, episode, config, steps=250)[1] for episode in range(6))
    failure = next(found for found in failures if found is not None)
    short = failure.shrunk(seconds=120)
    assert len(short.events) <= at_most < len(failure.events)
    assert short.text.split()[0] == failure.text.split()[0]
    assert "\n  arrive r" in str(short)
    assert "story of" in str(short)


def test_shrink_keeps_what_matters_and_the_order() -> None:
    needed = [3, 17, 90]
    assert shrink(range(100), lambda some: [item for item in some if item in needed] == needed, 60) == needed


def test_shrink_stops_in_time() -> None:
    assert shrink(range(100), lambda some: True, seconds=0) == list(range(100))


def test_events_are_told_in_a_few_lines() -> None:
    events = [
        Event("arrive", ("a", [1, 2, 3, 4], 2, {})),
        *[Event("step", (True,))] * 3,
        Event("arrive", ("b", [1, 2, 3, 5, 6], 1, {"salt": "x"})),
        Event("tier_retries", (0, 3)),
    ]
    assert tell(events) == [
        "arrive a: 4 tokens; 2 to answer",
        "step eager=True  x3",
        "arrive b: 5 tokens, the first 3 as in a; 1 to answer {'salt': 'x'}",
        "tier_retries number=0 count=3",
    ]


def test_a_seed_is_one_run() -> None:
    """Twice the same events and figures. Mutation: a choice that looks at a set or at id() differs between processes,
    a global counter or the time of day differs here."""
    config = next(rotation())
    runs = [run_episode(5, 0, config, steps=120)[0] for _ in range(2)]
    assert runs[0].events == runs[1].events
    assert runs[0].slots_checked == runs[1].slots_checked


def test_the_command_fixes_the_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of strings, vLLM's too, are iterated in an order that Python draws for each process."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(command.os, "execve", lambda path, args, env: started.append(env))
    monkeypatch.setenv("PYTHONHASHSEED", str(random.randint(1, 100)))
    command.with_fixed_hashes()
    assert started[0]["PYTHONHASHSEED"] == "0"
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    command.with_fixed_hashes()
    assert len(started) == 1
