"""A model with latent attention (MLA): loaded from host memory where vLLM can go on from a prefix of it, and elsewhere
served as if we were not there.

vLLM's CPU backend can with AMX alone, and turns prefix caching off otherwise. Which of the two it is on this machine is
told by vLLM's own configuration, as /metrics shows it, and never by what we do or say. With VLLM_MLA_DISABLE=1 in the
environment the other half of the test runs on a machine without AMX: the model then caches the keys and values of each
head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from http_client import Metrics

from .checks import comes_to_rest, equal_from_every_source, served_well
from .engine import CONNECTOR, Engine
from .tiny_kinds import make_tiny_deepseek
from .workload import Answers, ask_twice, conversations, prompt

CACHE = [
    *("--block-size", "32"),  # vLLM makes them 16 tokens long where its kernels for CPUs without AMX need that
    *("--num-gpu-blocks-override", "320"),  # no more tokens than push_out's, and room for a model's longest prompt
    *("--max-model-len", "4096"),
    *("--max-num-batched-tokens", "1024"),
]


@dataclass
class Plain:
    """What an engine without the connector is like."""

    answers: Answers
    caches_prefixes: bool
    cached_tokens: float


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_deepseek(tmp_path_factory.mktemp("model") / "tiny-deepseek")


@pytest.fixture(scope="module")
def plain(deepseek: Path, logs: Path) -> Plain:
    with Engine(deepseek, logs / "plain-latent.log", *CACHE) as engine:
        answers = ask_twice(engine.server(), conversations())
        metrics = engine.server().settled_metrics()
        return Plain(answers, caches_prefixes(metrics), metrics.cached_tokens("device"))


@pytest.fixture(scope="module")
def offload(deepseek: Path, logs: Path, plain: Plain) -> Iterator[Engine]:
    with Engine(deepseek, logs / "offload-latent.log", *CACHE, connector=CONNECTOR) as engine:
        yield engine
        served_well(engine)


def test_answers_are_equal_and_loaded_where_vllm_caches_prefixes(plain: Plain, offload: Engine) -> None:
    """Case 51: the engine starts, and what cannot be offloaded is said once with the reason.

    Without AMX it fails when the model is offloaded all the same (a prompt that goes on from loaded latents is answered
    otherwise), and when the reason is not said, or twice; where prefixes are cached, when nothing is loaded.
    """
    server = offload.server()
    start = server.settled_metrics()
    assert caches_prefixes(start) == plain.caches_prefixes == (plain.cached_tokens > 0)
    before, after = equal_from_every_source(server, plain.answers)
    if plain.caches_prefixes:
        from_device = before.cached_tokens("device") - start.cached_tokens("device")
        assert after.cached_tokens("host") - before.cached_tokens("host") == from_device == plain.cached_tokens
        assert reasons(offload) == []
    else:
        (reason,) = reasons(offload)
        assert all(word in reason for word in ("AMX", "VLLM_MLA_DISABLE=1")), "it names what would change it"
        assert after.cached_tokens("host") == after.cached_tokens("device") == 0
        assert after.moved_bytes("store") == after.moved_bytes("load") == 0
    assert after.failures() == 0
    comes_to_rest(offload)


def test_answers_depend_on_early_latents(plain: Plain, offload: Engine) -> None:
    """Guards the comparison: were the model deaf to its early tokens, wrong latents would not show."""
    one = conversations()[0]
    other = [*prompt(777, 64), *one[64:]]
    assert offload.server().complete(other, 4).logprobs != plain.answers.cold[0].logprobs[:4]


def caches_prefixes(metrics: Metrics) -> bool:
    """Whether vLLM goes on from prefixes of this model here: its configuration, which it publishes as labels."""
    said = {value: metrics.total("vllm:cache_config_info", enable_prefix_caching=value) for value in ("True", "False")}
    assert sorted(said.values()) == [0, 1], said
    return said["True"] == 1


def reasons(engine: Engine) -> list[str]:
    """Why nothing is offloaded, as the log says it."""
    return [line for line in engine.log_text().splitlines() if "nothing is offloaded" in line]
