"""A model with three KV groups over the same tensors, two of them with a sliding window: equal answers, from loads."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .checks import comes_to_rest, equal_and_loaded, loaded_tokens, served_well
from .conftest import TWO_RANKS, one_core_per_rank
from .disk import chunk_files, connector, prompt_chunks, stored_chunks, tier_failures, wait_until
from .engine import CONNECTOR, Engine
from .tiny_model import make_tiny_gemma
from .workload import (
    ANSWER_TOKENS,
    BLOCK,
    SMALL_DEVICE_CACHE,
    Answers,
    ask_twice,
    contents,
    conversations,
    prompt,
    push_out,
)

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


@pytest.mark.slow
def test_answers_are_equal_on_two_ranks(gemma: Path, logs: Path) -> None:
    """Tensor parallel 2: each rank has its half of every row, of each group."""
    args, env = [*CACHE, *TWO_RANKS], one_core_per_rank()
    with Engine(gemma, logs / "plain-gemma-tp2.log", *args, env=env) as engine:
        wanted = ask_twice(engine.server(), conversations())
    with Engine(gemma, logs / "offload-gemma-tp2.log", *args, connector=CONNECTOR, env=env) as engine:
        assert len(engine.members("Worker")) == 2
        equal_and_loaded(engine.server(), wanted)
        served_well(engine)


@pytest.mark.slow
def test_a_restart_answers_from_disk(wanted_gemma: Answers, gemma: Path, logs: Path, tmp_path: Path) -> None:
    """What one engine stored on disk, of every group, the next one loads: all but the block with the last token."""
    with Engine(gemma, logs / "gemma-disk-first.log", *CACHE, connector=connector(tmp_path)) as engine:
        assert contents(ask_twice(engine.server(), conversations()).cold) == contents(wanted_gemma.cold)
        wait_until(lambda: len(chunk_files(tmp_path)) >= 3 * stored_chunks(), "every chunk is on disk")
        served_well(engine)
    with Engine(gemma, logs / "gemma-disk-second.log", *CACHE, connector=connector(tmp_path)) as engine:
        server = engine.server()
        answers = [server.complete(one, ANSWER_TOKENS) for one in conversations()]
        metrics = server.settled_metrics()
        assert contents(answers) == contents(wanted_gemma.device)
        assert metrics.cached_tokens("disk") == prompt_chunks() * BLOCK
        assert metrics.cached_tokens("host") == 0
        assert metrics.failures() == tier_failures(metrics) == 0
        served_well(engine)
