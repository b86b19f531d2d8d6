"""One seed's run: episodes of chaos and convergence over a rotation of configurations. Imports vLLM when it runs."""

import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING

from vllm_tiered_offload.testing.simulator.config import SimConfig, rotation
from vllm_tiered_offload.testing.simulator.events import Event, tell
from vllm_tiered_offload.testing.simulator.report import Totals, merge_counts
from vllm_tiered_offload.testing.simulator.shrink import shrink
from vllm_tiered_offload.testing.simulator.story import Violation

if TYPE_CHECKING:
    from vllm_tiered_offload.testing.simulator.engine import Simulation

STEPS_PER_EPISODE = 600
CONFIGS_PER_SEED = 31  # each seed begins elsewhere in the rotation, so that all of it comes up in short runs, too


@dataclass(frozen=True, slots=True)
class Failure:
    """A broken invariant, with what is needed to see it again."""

    seed: int
    episode: int
    config: SimConfig
    text: str  # of the Violation: begins with the checker's name in brackets
    events: list[Event]  # all that was done to the engine

    def __str__(self) -> str:
        return "\n".join(
            [
                f"seed {self.seed} episode {self.episode} ({self.config.describe()})",
                self.text,
                f"the {len(self.events)} events that lead there, after which everything has to converge:",
                *(f"  {line}" for line in tell(self.events)),
                f"again: python -m vllm_tiered_offload.testing.simulator --seed {self.seed} --episode {self.episode}",
            ]
        )

    def shrunk(self, seconds: float) -> "Failure":
        """The same checker's complaint after fewer events, looked for that long. Itself if it does not come again."""
        checker = self.text.split(" ", 1)[0]

        def complaint(events: list[Event]) -> str:
            sim = _simulation(self.seed, self.episode, self.config)
            return _complaint(sim, lambda: _perform(sim, events)) or ""

        events = shrink(self.events, lambda some: complaint(some).startswith(checker), seconds)
        text = complaint(events)
        return replace(self, text=text, events=events) if text.startswith(checker) else self


def run_episode(seed: int, episode: int, config: SimConfig, steps: int) -> tuple[Totals, Failure | None]:
    """Chaos for `steps` counted steps, then faults off and convergence."""
    from vllm_tiered_offload.testing.simulator.workload import Workload

    began = time.perf_counter()
    sim = _simulation(seed, episode, config)
    workload = Workload(sim, random.Random(f"{seed}/{episode}/workload"))

    def chaos() -> None:
        for _ in range(20 * steps):  # far more turns than needed: some of them have nothing to do
            if sim.story.counts["steps"] >= steps:
                break
            workload.step()

    text = _complaint(sim, chaos)
    totals = Totals(
        steps=sim.story.counts["steps"],
        pool_full=sim.pool_full_steps,
        violations=int(text is not None),
        leftover_state=int(text is not None and text.startswith("[v5]")),
        seconds=time.perf_counter() - began,
        episodes=1,
        slots_checked=sim.runner.slots_checked,
        tokens_loaded=sim.tokens_loaded,
        events=merge_counts(sim.story.counts),
    )
    return totals, Failure(seed, episode, config, text, workload.events) if text is not None else None


def _simulation(seed: int, episode: int, config: SimConfig) -> "Simulation":
    from vllm_tiered_offload.testing.simulator.engine import Simulation

    return Simulation(config, seed=f"{seed}/{episode}/copies")


def _perform(sim: "Simulation", events: list[Event]) -> None:
    for event in events:
        event.perform(sim)


def _complaint(sim: "Simulation", chaos: Callable[[], None]) -> str | None:
    """Chaos, convergence, shutdown: the text of the first violation, if any."""
    try:
        chaos()
        sim.converge()
        sim.close()
    except Violation as error:
        return str(error)
    except Exception:
        # Whatever else comes out of the engine loop ends a real engine: a broken assertion in vLLM or in the connector.
        return str(sim.story.violation("engine", traceback.format_exc()))
    return None


def configs(seed: int, connector: tuple[str, str] | None) -> Iterator[tuple[int, SimConfig]]:
    """Episode numbers of a seed and their configurations."""
    rotated = islice(rotation(), CONFIGS_PER_SEED * seed, None)
    return zip(count(), (replace(config, connector=connector) for config in rotated), strict=False)


def run_seed(
    seed: int,
    steps: int,
    connector: tuple[str, str] | None,
    progress: Callable[[str], None],
    only: int | None = None,
    shrink_seconds: float = 0.0,
) -> tuple[Totals, list[Failure]]:
    """Episodes until `steps` counted steps are reached (or the one episode `only`).

    Stops at the first violation, and looks `shrink_seconds` for fewer events that lead to it.
    """
    totals, failures = Totals(), []
    chosen = configs(seed, connector)
    if only is not None:
        chosen = islice(chosen, only, only + 1)
    for episode, config in chosen:
        part, failure = run_episode(seed, episode, config, STEPS_PER_EPISODE)
        totals.add(part)
        progress(f"seed {seed} episode {episode}: {part.steps} steps, {config.describe()}")
        if failure is not None:
            failures.append(failure.shrunk(shrink_seconds) if shrink_seconds else failure)
            break
        if totals.steps >= steps:
            break
    return totals, failures
