"""Small steps that the cases share."""

import random
from typing import Any


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt that no other seed shares a token block with."""
    rng = random.Random(seed)
    return [rng.randrange(100, 30_000) for _ in range(count)]


def run_one(sim: Any, prompt: list[int], max_tokens: int = 1, req_id: str | None = None) -> str:
    """One request from arrival to an idle engine."""
    req_id = sim.add_request(prompt, max_tokens, req_id)
    sim.run_until_idle()
    return req_id


def push_out(sim: Any) -> None:
    """Take everything out of the device cache, and leave the connector's alone."""
    assert sim.scheduler.reset_prefix_cache(False, False)


def step_until(sim: Any, reached: Any, limit: int = 100) -> None:
    """Step until `reached()`."""
    for _ in range(limit):
        if reached():
            return
        sim.step()
    raise AssertionError(f"not reached within {limit} steps")


def status(sim: Any, req_id: str) -> str:
    """vLLM's status of a live request."""
    return sim.live[req_id].status.name
