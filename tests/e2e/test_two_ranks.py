"""Tensor parallel 2: each rank loads its own half of every row, and nothing outlives a SIGKILL. Data parallel 2."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from .checks import comes_to_rest, equal_and_loaded, same_until_a_tie, served_well
from .conftest import one_core_per_rank
from .disk import chunk_files, connector, generations, prompt_chunks, stored_chunks, tier_failures, wait_until
from .engine import Engine
from .workload import ANSWER_TOKENS, BLOCK, SMALL_DEVICE_CACHE, Answers, conversations, prompt


def test_answers_are_equal_on_two_ranks(wanted_two_ranks: Answers, offload_two_ranks: Engine) -> None:
    assert len(offload_two_ranks.members("Worker")) == 2
    equal_and_loaded(offload_two_ranks.server(), wanted_two_ranks)
    comes_to_rest(offload_two_ranks)


LONG_ANSWER = 2500  # tokens; long enough that nobody has it before the kill, also on a busy machine


def test_nothing_is_left_after_sigkill(offload_two_ranks: Engine) -> None:
    """Last test of its engine: EngineCore is killed while requests compute and their KV is stored. CASES 48."""
    engine = offload_two_ranks
    (core,) = engine.members("EngineCore")
    with ThreadPoolExecutor(16) as pool:
        requests = [pool.submit(engine.server().complete, prompt(950 + i, 1000), LONG_ANSWER) for i in range(16)]
        wait_until_stores_flow(engine)
        engine.note_rank_files()
        os.kill(core, signal.SIGKILL)
        wait(requests, timeout=60)
    whole = [r.result() for r in requests if not r.exception() and len(r.result().token_ids) == LONG_ANSWER]
    assert len(whole) < len(requests), "every request had ended before the kill"
    assert engine.wait_empty(30), f"still there: {engine.leftovers()}"
    assert engine.leftovers() == []


def wait_until_stores_flow(engine: Engine, timeout_s: float = 30) -> None:
    """Bytes arrived in host memory between two readings a moment apart, while every request goes on decoding.

    Not checked: that a copy was under way at the very instant of the kill. The tiny model's copies take microseconds.
    """
    server, deadline = engine.server(), time.monotonic() + timeout_s
    before = server.metrics().moved_bytes("store")
    while (now := server.metrics().moved_bytes("store")) == before:
        assert time.monotonic() < deadline, "no store was seen"
        time.sleep(0.02)
    assert now > before


@pytest.mark.slow
def test_replicas_share_a_directory_and_nothing_else(tiny_model: Path, logs: Path, tmp_path: Path) -> None:
    """Data parallel 2: a host region each, one namespace on disk, which an engine without replicas reads as well."""
    args = [*SMALL_DEVICE_CACHE, "--data-parallel-size", "2"]
    with Engine(tiny_model, logs / "dp2.log", *args, connector=connector(tmp_path), env=one_core_per_rank()) as engine:
        assert len(engine.members("EngineCore")) == 2
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda one: engine.server().complete(one, ANSWER_TOKENS), conversations()))
        assert [len(answer.token_ids) for answer in answers] == [ANSWER_TOKENS] * len(answers)
        assert engine.log_text().count("GiB of host memory") == 2
        wait_until(lambda: len(chunk_files(tmp_path)) >= stored_chunks(), "every chunk is on disk")
        assert len(generations(tmp_path, private=False)) == 1
        served_well(engine)
    with Engine(tiny_model, logs / "dp1.log", *SMALL_DEVICE_CACHE, connector=connector(tmp_path)) as engine:
        server = engine.server()
        for one, other in zip((server.complete(one, ANSWER_TOKENS) for one in conversations()), answers, strict=True):
            same_until_a_tie(one, other)
        metrics = server.settled_metrics()
        assert metrics.cached_tokens("disk") == prompt_chunks() * BLOCK
        assert metrics.failures() == tier_failures(metrics) == 0
        served_well(engine)
