"""A model with three KV groups over the same tensors, two of them with a sliding window: equal answers, from loads."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .checks import comes_to_rest, equal_and_loaded, loaded_tokens, served_well
from .engine import CONNECTOR, Engine
from .tiny_model import make_tiny_gemma
from .workload import ANSWER_TOKENS, SMALL_DEVICE_CACHE, Answers, ask_twice, conversations, prompt, push_out

WINDOW = 200  # no multiple of a block
CACHE = [*SMALL_DEVICE_CACHE, "--num-gpu-blocks-override", "480"]  # three groups, and what a step stores is pinned


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gemma(tmp_path_factory.mktemp("model") / "tiny-gemma", WINDOW)


@pytest.fixture(scope="module")
def wanted_gemma(gemma: Path, logs: Path) -> Answers:
    """What an engine without the connector answers."""
    with Engine(gemma, logs / "plain-gemma.log", *CACHE) as engine:
        return ask_twice(engine.server(), conversations())


@pytest.fixture(scope="module")
def offload_gemma(gemma: Path, logs: Path, wanted_gemma: Answers) -> Iterator[Engine]:
    with Engine(gemma, logs / "offload-gemma.log", *CACHE, connector=CONNECTOR) as engine:
        yield engine
        served_well(engine)


def test_answers_are_equal_from_every_source(wanted_gemma: Answers, offload_gemma: Engine) -> None:
    """Case 51's kin: the start-up summary names the groups, and every block but the last comes from host memory."""
    assert "3 KV groups" in offload_gemma.log.read_text()
    equal_and_loaded(offload_gemma.server(), wanted_gemma)
    comes_to_rest(offload_gemma)


def test_answers_depend_on_the_kv_inside_and_outside_the_window(wanted_gemma: Answers, offload_gemma: Engine) -> None:
    """Guards every comparison here: were the model deaf to tokens before or in its window, wrong bytes would be too."""
    server, one = offload_gemma.server(), conversations()[0]
    early = [*prompt(777, 64), *one[64:]]
    late = [*one[:-100], *prompt(778, 40), *one[-60:]]
    for other in (early, late):
        assert server.complete(other, 4).logprobs != wanted_gemma.cold[0].logprobs[:4]


def test_a_branch_loads_its_part_of_the_window(offload_gemma: Engine) -> None:
    """Another end after a shared beginning: the window before the fork comes back, and the answer is that of a device
    hit."""
    server = offload_gemma.server()
    shared, ends = prompt(880, 1500), [prompt(881, 300), prompt(882, 300)]
    first = [server.complete([*shared, *end], ANSWER_TOKENS) for end in ends]
    again = [server.complete([*shared, *end], ANSWER_TOKENS) for end in ends]
    push_out(server, seed=60)
    before = loaded_tokens(server)
    back = [server.complete([*shared, *end], ANSWER_TOKENS) for end in ends]
    assert loaded_tokens(server) - before > 1500
    assert [answer.token_ids for answer in back] == [answer.token_ids for answer in first]
    assert back[0].content() == again[0].content()
    comes_to_rest(offload_gemma)
