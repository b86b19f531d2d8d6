"""Simulations for tests: quiet logs, closed at the end."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # vLLM imports toy_connector by name

from vllm_tiered_offload.testing.simulator.config import SimConfig


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failing copies and refused resets are the point here: no line for each."""
    loggers = [logging.getLogger(name) for name in ("vllm", "vllm_tiered_offload")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(params=["strict", "tolerant"])
def simulate(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes simulations: simulate(depth=2, ...) with fields of SimConfig; closes them. Under both lifecycles."""
    from vllm_tiered_offload.testing.simulator.engine import Simulation

    made: list[Simulation] = []

    def make(seed: int = 0, **fields: Any) -> Simulation:
        made.append(Simulation(SimConfig(**{"lifecycle": request.param, **fields}), seed))
        return made[-1]

    yield make
    for sim in made:
        sim.close()
