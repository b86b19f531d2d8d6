"""Models with recurrent layers: equal answers, from states that came back from host memory.

vLLM's CPU build has no Triton, and moves state from block to block with a Triton kernel; `state_copies` stands in.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .checks import comes_to_rest, equal_from_every_source, loaded_tokens, served_well
from .engine import CONNECTOR, Engine, python_path
from .tiny_kinds import make_tiny_qwen_next
from .trouble import HERE, install
from .workload import ANSWER_TOKENS, Answers, ask_twice, conversations, prompt, push_out

CACHE = [
    "--enable-prefix-caching",
    *("--block-size", "32"),  # vLLM makes them 160 tokens long, so that a state fits in
    *("--num-gpu-blocks-override", "60"),
    *("--max-model-len", "4096"),
    *("--max-num-batched-tokens", "1024"),
]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("packages") / "installed", HERE / "state_copies")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen_next(tmp_path_factory.mktemp("model") / "tiny-qwen-next")


@pytest.fixture(scope="module")
def wanted(hybrid: Path, packages: Path, logs: Path) -> Answers:
    """What an engine without the connector answers."""
    with Engine(hybrid, logs / "plain-hybrid.log", *CACHE, env=python_path(packages)) as engine:
        return ask_twice(engine.server(), conversations())


@pytest.fixture(scope="module")
def offload(hybrid: Path, packages: Path, logs: Path, wanted: Answers) -> Iterator[Engine]:
    env = python_path(packages)
    with Engine(hybrid, logs / "offload-hybrid.log", *CACHE, connector=CONNECTOR, env=env) as engine:
        yield engine
        served_well(engine)


def test_answers_are_equal_from_every_source(wanted: Answers, offload: Engine) -> None:
    """Case 31's kin: what comes back from host memory is as much as the device had, and ends in the same answer."""
    assert "4 KV groups" in offload.log.read_text()
    server = offload.server()
    start = server.settled_metrics()
    before, after = equal_from_every_source(server, wanted)
    from_device = before.cached_tokens("device") - start.cached_tokens("device")
    assert after.cached_tokens("host") - before.cached_tokens("host") == from_device > 0
    assert after.failures() == 0
    comes_to_rest(offload)


def test_answers_depend_on_what_the_state_carries(wanted: Answers, offload: Engine) -> None:
    """Guards the comparison: were the model deaf to its early tokens, a wrong state would not show."""
    one = conversations()[0]
    other = [*prompt(777, 64), *one[64:]]
    assert offload.server().complete(other, 4).logprobs != wanted.cold[0].logprobs[:4]


def test_a_next_turn_goes_on_from_the_last_state(offload: Engine) -> None:
    """The prompt grew by an answer and a question: it goes on from the state before the first prompt's end."""
    server, one = offload.server(), prompt(990, 1500)
    first = server.complete(one, ANSWER_TOKENS)
    longer = [*one, *first.token_ids, *prompt(991, 300)]
    push_out(server, seed=70)
    before = loaded_tokens(server)
    back = server.complete(longer, ANSWER_TOKENS)
    assert loaded_tokens(server) - before > 1000
    again = server.complete(longer, ANSWER_TOKENS)
    assert again.token_ids == back.token_ids
    comes_to_rest(offload)
