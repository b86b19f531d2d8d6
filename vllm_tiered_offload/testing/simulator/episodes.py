"""One seed's run: episodes of chaos and convergence over a rotation of configurations. Imports vLLM when it runs."""

import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice

from vllm_tiered_offload.testing.simulator.config import SimConfig, rotation
from vllm_tiered_offload.testing.simulator.report import Totals, merge_counts
from vllm_tiered_offload.testing.simulator.story import Violation

STEPS_PER_EPISODE = 400


@dataclass(frozen=True, slots=True)
class Failure:
    """A broken invariant, with what is needed to see it again."""

    seed: int
    episode: int
    config: str
    text: str

    def __str__(self) -> str:
        return (
            f"seed {self.seed} episode {self.episode} ({self.config})\n{self.text}\n"
            f"again: python -m vllm_tiered_offload.testing.simulator --seed {self.seed} --episode {self.episode}"
        )


def run_episode(seed: int, episode: int, config: SimConfig, steps: int) -> tuple[Totals, Failure | None]:
    """Chaos for `steps` counted steps, then faults off and convergence."""
    from vllm_tiered_offload.testing.simulator.engine import Simulation
    from vllm_tiered_offload.testing.simulator.workload import Workload

    began = time.perf_counter()
    sim = Simulation(config, seed=f"{seed}/{episode}/copies")
    failure = None
    totals = Totals(episodes=1)
    try:
        workload = Workload(sim, random.Random(f"{seed}/{episode}/workload"))
        for _ in range(20 * steps):  # far more turns than needed: some of them have nothing to do
            if sim.story.counts["steps"] >= steps:
                break
            workload.step()
        sim.converge()
        sim.close()
    except Violation as error:
        totals.violations = 1
        totals.leftover_state = int("[v5]" in str(error))
        failure = Failure(seed, episode, config.describe(), str(error))
    except Exception:
        # Whatever else comes out of the engine loop ends a real engine: a broken assertion in vLLM or in the connector.
        totals.violations = 1
        story = sim.story.violation("engine", traceback.format_exc())
        failure = Failure(seed, episode, config.describe(), str(story))
    totals.steps = sim.story.counts["steps"]
    totals.pool_full = sim.pool_full_steps
    totals.events = merge_counts(sim.story.counts)
    totals.slots_checked = sim.runner.slots_checked
    totals.tokens_loaded = sim.tokens_loaded
    totals.seconds = time.perf_counter() - began
    return totals, failure


def configs(connector: tuple[str, str] | None) -> Iterator[tuple[int, SimConfig]]:
    """Episode numbers and their configurations."""
    return zip(count(), (replace(config, connector=connector) for config in rotation()), strict=False)


def run_seed(
    seed: int, steps: int, connector: tuple[str, str] | None, progress: Callable[[str], None], only: int | None = None
) -> tuple[Totals, list[Failure]]:
    """Episodes until `steps` counted steps are reached (or the one episode `only`). Stops at the first violation."""
    totals, failures = Totals(), []
    chosen = configs(connector) if only is None else islice(configs(connector), only, only + 1)
    for episode, config in chosen:
        part, failure = run_episode(seed, episode, config, STEPS_PER_EPISODE)
        totals.add(part)
        progress(f"seed {seed} episode {episode}: {part.steps} steps, {config.describe()}")
        if failure is not None:
            failures.append(failure)
            break
        if totals.steps >= steps:
            break
    return totals, failures
