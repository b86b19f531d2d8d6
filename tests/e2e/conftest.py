"""Fixtures of the end-to-end tests. An engine start takes the better part of a minute, so engines are shared."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))  # http_client.py is shared with the examples

pytest.register_assert_rewrite(f"{__package__}.checks")  # its assertions then show what they compared

from .engine import CONNECTOR, Engine  # noqa: E402
from .tiny_model import make_tiny_llama  # noqa: E402
from .workload import SMALL_DEVICE_CACHE, Answers, ask_twice, conversations  # noqa: E402

TWO_RANKS = ["--tensor-parallel-size", "2"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this directory starts or needs vLLM's server."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


def one_core_per_rank() -> dict[str, str]:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}"}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def wanted(tiny_model: Path, logs: Path) -> Answers:
    """What an engine without the connector answers."""
    with Engine(tiny_model, logs / "plain.log", *SMALL_DEVICE_CACHE) as engine:
        return ask_twice(engine.server(), conversations())


@pytest.fixture(scope="session")
def wanted_two_ranks(tiny_model: Path, logs: Path) -> Answers:
    args = [*SMALL_DEVICE_CACHE, *TWO_RANKS]
    with Engine(tiny_model, logs / "plain-tp2.log", *args, env=one_core_per_rank()) as engine:
        return ask_twice(engine.server(), conversations())


@pytest.fixture(scope="module")
def offload(tiny_model: Path, logs: Path, wanted: Answers) -> Iterator[Engine]:
    """One engine with the connector. `wanted` comes first: two engines at once would only slow each other."""
    with Engine(tiny_model, logs / "offload.log", *SMALL_DEVICE_CACHE, connector=CONNECTOR) as engine:
        yield engine
        assert engine.healthy(), f"the engine died:\n{engine.log_tail()}"
        assert engine.stop() == 0, f"the engine did not stop by itself:\n{engine.log_tail()}"
        assert engine.leftovers() == []


@pytest.fixture(scope="module")
def offload_two_ranks(tiny_model: Path, logs: Path, wanted_two_ranks: Answers) -> Iterator[Engine]:
    args = [*SMALL_DEVICE_CACHE, *TWO_RANKS]
    with Engine(tiny_model, logs / "offload-tp2.log", *args, connector=CONNECTOR, env=one_core_per_rank()) as engine:
        yield engine
