"""A model with an EAGLE head beside it, whose layer's KV depends on the next token: vLLM drafts with it, rejects what
is wrong, and prompts come back as far as vLLM's own prefix cache goes.

A head of random weights guesses nothing right, so this does not show whether the bytes of its own layer are: the
simulator and tests/scheduler do.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .checks import comes_to_rest, equal_from_every_source, served_well
from .engine import CONNECTOR, Engine
from .tiny_kinds import make_tiny_eagle
from .tiny_model import make_tiny_llama
from .workload import BLOCK, SMALL_DEVICE_CACHE, Answers, ask_twice, conversations

GUESSES = 3  # a step


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="module")
def options(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    draft = make_tiny_eagle(llama, tmp_path_factory.mktemp("draft") / "tiny-eagle")
    speculation = {"method": "eagle", "model": str(draft), "num_speculative_tokens": GUESSES}
    return [*SMALL_DEVICE_CACHE, "--speculative-config", json.dumps(speculation)]


@pytest.fixture(scope="module")
def wanted(llama: Path, options: list[str], logs: Path) -> Answers:
    """What an engine without the connector answers."""
    with Engine(llama, logs / "plain-draft.log", *options) as engine:
        return ask_twice(engine.server(), conversations())


@pytest.fixture(scope="module")
def offload(llama: Path, options: list[str], logs: Path, wanted: Answers) -> Iterator[Engine]:
    with Engine(llama, logs / "offload-draft.log", *options, connector=CONNECTOR) as engine:
        yield engine
        served_well(engine)


def test_answers_are_equal_from_every_source(wanted: Answers, offload: Engine) -> None:
    """Case 32: what is stored of a draft model comes back. A hit ends where the device's does: of the last whole block
    the last slot depends on a token that its hash does not cover."""
    server = offload.server()
    start = server.settled_metrics()
    before, after = equal_from_every_source(server, wanted)
    from_device = before.cached_tokens("device") - start.cached_tokens("device")
    whole = sum((len(one) - 1) // BLOCK * BLOCK for one in conversations())
    from_host = after.cached_tokens("host") - before.cached_tokens("host")
    assert from_host == from_device
    assert whole - len(conversations()) * BLOCK <= from_host <= whole
    assert after.failures() == 0
    assert after.total("vllm:spec_decode_num_draft_tokens_total") > start.total(
        "vllm:spec_decode_num_draft_tokens_total"
    )
    comes_to_rest(offload)
