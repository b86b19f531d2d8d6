"""What the end-to-end tests assert about a served engine."""

import time

import pytest
from http_client import Answer, Metrics, Server

from .engine import Engine
from .workload import ANSWER_TOKENS, BLOCK, Answers, ask_twice, contents, conversations, push_out


def equal_and_loaded(server: Server, wanted: Answers) -> None:
    """Answers from computing, from the device and from host memory equal the engine's without us, bit for bit, and
    the counters prove where each came from."""
    came_from_host(*equal_from_every_source(server, wanted))


def equal_from_every_source(server: Server, wanted: Answers) -> tuple[Metrics, Metrics]:
    """Answers equal those of the engine without us; the counters before and after those from host memory."""
    answers = ask_twice(server, conversations())
    push_out(server, seed=1)
    before = server.settled_metrics()
    from_host = [server.complete(one, ANSWER_TOKENS) for one in conversations()]
    after = server.settled_metrics()

    assert contents(answers.cold) == contents(wanted.cold)
    assert contents(answers.device) == contents(wanted.device)
    # A prompt that is loaded computes the same tail as a device hit does.
    assert contents(from_host) == contents(wanted.device)
    return before, after


def came_from_host(before: Metrics, after: Metrics) -> None:
    """Every full block but the one with the last token came from host memory, and none from the device."""
    full = sum((len(one) - 1) // BLOCK * BLOCK for one in conversations())
    assert after.cached_tokens("host") - before.cached_tokens("host") == full
    assert after.cached_tokens("device") == before.cached_tokens("device")
    assert after.moved_bytes("load") > before.moved_bytes("load")
    assert after.moved_bytes("store") >= after.moved_bytes("load") - before.moved_bytes("load")
    assert after.failures() == 0


def same_until_a_tie(one: Answer, other: Answer) -> None:
    """For answers whose batches had different shapes: sums are rounded differently, so the last bits may differ, and
    two words that are as good as equally likely may change places, from where on the answers are not comparable."""
    assert len(one.token_ids) == len(other.token_ids)
    pairs = list(zip(one.token_ids, other.token_ids, strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert same > 0
    assert one.logprobs[: same + 1] == pytest.approx(other.logprobs[: same + 1], abs=0.05)


def loaded_tokens(server: Server) -> float:
    return server.settled_metrics().cached_tokens("host")


def comes_to_rest(engine: Engine, timeout_s: float = 20) -> None:
    """No request is left in the engine, and nothing of ours is pinned."""
    deadline = time.monotonic() + timeout_s
    server = engine.server()
    while (busy := what_is_busy(server.metrics())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not busy, f"not at rest after {timeout_s:.0f} s: {busy}\n{engine.log_tail()}"


def what_is_busy(metrics: Metrics) -> dict[str, float]:
    gauges = [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:tiered_offload_rows_pinned",
        "vllm:tiered_offload_device_blocks_pinned",
    ]
    return {name: value for name in gauges if (value := metrics.total(name))}


def served_well(engine: Engine) -> None:
    """At its end an engine is alive, has nothing left to do, and ends by itself without a trace."""
    assert engine.healthy(), f"the engine died:\n{engine.log_tail()}"
    comes_to_rest(engine)
    assert engine.stop() == 0, f"the engine did not stop by itself:\n{engine.log_tail()}"
    assert engine.leftovers() == []


def reset_succeeds(engine: Engine, timeout_s: float = 10, *, external: bool = True) -> bool:
    """Forget every prefix: the device's alone, or `external` ones, too. vLLM declines while a block is in use and says
    that callers may ask again."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if engine.post("/reset_prefix_cache", reset_external=external).json()["success"]:
            return True
        time.sleep(0.1)
    return False
