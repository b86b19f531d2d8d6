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


def wake_up(sim: Any) -> None:
    """Steps until the workers have made the host region and the tiers behind know it."""
    for seed in (901, 902):
        run_one(sim, tokens(2, seed))
    sim.settle_tiers()
    assert all(("bind_region", "") in tier.calls for tier in sim.tiers.tiers)


def push_down(sim: Any) -> None:
    """Take everything out of the device cache and out of the CPU tier; the tiers behind keep what they have."""
    sim.settle_tiers()
    config = sim.config
    chunk = config.block_size * config.blocks_per_chunk
    per_prompt = min(config.cpu_chunks, (config.num_blocks - 2) // config.blocks_per_chunk)
    for seed in range(-(-config.cpu_chunks // per_prompt)):
        run_one(sim, tokens(per_prompt * chunk, 800 + seed))
    sim.settle_tiers()
    push_out(sim)


def promotions(sim: Any) -> int:
    """How many loads the tiers behind were given."""
    return sum(name == "submit_load" for tier in sim.tiers.tiers for name, _ in tier.calls)


def run_cascades(sim: Any) -> None:
    """Jobs that write to a tier run, jobs that read from it go on waiting."""
    for tier in sim.tiers.tiers:
        for job in [job for job in tier.waiting if not job.is_promotion]:
            tier.run_job(job)


def pending_promotions(sim: Any) -> list[Any]:
    """Promotion jobs that wait in a tier."""
    return [job for tier in sim.tiers.tiers for job in tier.waiting if job.is_promotion]
