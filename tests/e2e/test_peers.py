"""Two engines of one model on one machine: what one has computed, the other pulls out of its memory."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .checks import served_well
from .engine import CONNECTOR, Engine, free_port
from .workload import ANSWER_TOKENS, BLOCK, SMALL_DEVICE_CACHE, Answers, contents, conversations, prompt, push_out

LEFT = 1  # the last conversation is asked for only when its owner is gone


def sharing(model: Path, log: Path, **tier: object) -> Engine:
    """An engine with the peer tier behind host memory."""
    extra = {**CONNECTOR["kv_connector_extra_config"], "tiers": [{"type": "p2p", **tier}]}
    connector = {**CONNECTOR, "kv_connector_extra_config": extra}
    return Engine(model, log, *SMALL_DEVICE_CACHE, connector=connector)


@pytest.fixture(scope="module")
def owner(tiny_model: Path, logs: Path, wanted: Answers) -> Iterator[tuple[Engine, int]]:
    """An engine that has answered all conversations, and the port on which it serves their rows."""
    port = free_port()
    with sharing(tiny_model, logs / "owner.log", port=port) as engine:
        for one in conversations():
            engine.server().complete(one, ANSWER_TOKENS)
        yield engine, port


@pytest.fixture(scope="module")
def puller(tiny_model: Path, logs: Path, owner: tuple[Engine, int]) -> Iterator[Engine]:
    peer = {"host": "127.0.0.1", "port": owner[1]}
    with sharing(tiny_model, logs / "puller.log", peers=[peer]) as engine:
        yield engine


def test_a_prompt_comes_from_the_other_engine(puller: Engine, wanted: Answers) -> None:
    """Every full block but the one with the last token is pulled; text and log-probabilities are a device hit's."""
    server = puller.server()
    before = server.settled_metrics()
    asked = conversations()[:-LEFT]
    pulled = [server.complete(one, ANSWER_TOKENS) for one in asked]
    after = server.settled_metrics()
    assert contents(pulled) == contents(wanted.device[:-LEFT])
    full = sum((len(one) - 1) // BLOCK * BLOCK for one in asked)
    assert after.cached_tokens("p2p") - before.cached_tokens("p2p") == full
    assert after.failures() == 0


def test_the_command_sees_both(puller: Engine, owner: tuple[Engine, int]) -> None:
    """While they run: the owner's port answers, and the puller tells what it pulled from there."""
    address = f"127.0.0.1:{owner[1]}"
    assert command("ping", address)["alive"]
    peer = command("status", puller.url)["0"]["peers"][address]
    assert (peer["up"], peer["failures"]) == (1, {})
    assert peer["pulled_bytes"] > 0
    assert peer["seconds"] > 0
    owner[0].server().complete(prompt(1, BLOCK), 1)  # its numbers are those of its last step
    assert command("status", owner[0].url)["0"]["p2p_sessions"] == 1


def command(*arguments: str) -> Any:
    """What `vllm-tiered-offload p2p` answers."""
    run = [sys.executable, "-m", "vllm_tiered_offload.cli.main", "p2p", *arguments, "--json"]
    return json.loads(subprocess.run(run, check=True, capture_output=True, timeout=60).stdout)


def test_a_decode_engine_pulls_what_a_prefill_engine_has_just_computed(
    puller: Engine, owner: tuple[Engine, int]
) -> None:
    """As a router does it: one token from the first, the answer from the second. The head of the prompt is resident at
    the first engine already, and its last chunks are still on their way to host memory when it answers.

    Answers are compared with the first engine's own second one, a device hit.
    """
    prefill, decode = owner[0].server(), puller.server()
    asked = [*conversations()[1][: 20 * BLOCK], *prompt(77, 1500)]
    prefill.complete(asked, 1, kv_transfer_params={"remote_decoder": {"kv_request_id": "1"}})
    source = {"kv_request_id": "1", "remote_host": "127.0.0.1", "remote_port": owner[1]}
    before = decode.settled_metrics()
    answer = decode.complete(asked, ANSWER_TOKENS, kv_transfer_params={"remote_prefiller": source})
    after = decode.settled_metrics()
    # The head was pulled for conversation 1 before: it comes from this engine's own device or memory.
    here = [after.cached_tokens(source) - before.cached_tokens(source) for source in ("device", "host", "p2p")]
    assert sum(here) == (len(asked) - 1) // BLOCK * BLOCK
    assert here[2] >= 1500 // BLOCK * BLOCK
    assert answer.content() == prefill.complete(asked, ANSWER_TOKENS).content()


def test_a_prompt_that_comes_in_part_is_answered_as_with_the_same_part_of_its_own(
    puller: Engine, owner: tuple[Engine, int]
) -> None:
    """The rest is computed in a batch of another shape than the whole prompt was, and bfloat16 rounds by that: so the
    answer is compared with the owner's, whose own memory gives it just as many tokens."""
    one, part = prompt(88, 1500), 20 * BLOCK
    limit = {"max_load_tokens": part}
    source, server = owner[0].server(), puller.server()
    source.complete(one, 1)
    push_out(source, seed=3)
    wanted = source.complete(one, ANSWER_TOKENS, kv_transfer_params=limit)
    before = server.settled_metrics()
    answer = server.complete(one, ANSWER_TOKENS, kv_transfer_params=limit)
    after = server.settled_metrics()
    assert after.cached_tokens("p2p") - before.cached_tokens("p2p") == part
    assert answer.content() == wanted.content()


def test_an_engine_outlives_its_peer(puller: Engine, owner: tuple[Engine, int], wanted: Answers) -> None:
    """Case 60: the owner is killed; what only it had is computed, what was pulled is still there."""
    owner[0].kill_group()
    server = puller.server()
    assert contents([server.complete(conversations()[-1], ANSWER_TOKENS)]) == contents(wanted.cold[-LEFT:])
    again = server.complete(conversations()[0], ANSWER_TOKENS)
    assert contents([again]) == contents(wanted.device[:1])
    served_well(puller)
