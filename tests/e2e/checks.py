"""What the end-to-end tests assert about a served engine."""

import time

from http_client import Metrics, Server

from .engine import Engine
from .workload import ANSWER_TOKENS, BLOCK, Answers, ask_twice, contents, conversations, push_out


def equal_and_loaded(server: Server, wanted: Answers) -> None:
    """Answers from computing, from the device and from host memory equal the engine's without us, bit for bit, and
    the counters prove where each came from."""
    answers = ask_twice(server, conversations())
    push_out(server, seed=1)
    before = server.settled_metrics()
    from_host = [server.complete(one, ANSWER_TOKENS) for one in conversations()]
    after = server.settled_metrics()

    assert contents(answers.cold) == contents(wanted.cold)
    assert contents(answers.device) == contents(wanted.device)
    # A prompt that is loaded computes the same tail as a device hit does.
    assert contents(from_host) == contents(wanted.device)
    came_from_host(before, after)


def came_from_host(before: Metrics, after: Metrics) -> None:
    """Every full block but the one with the last token came from host memory, and none from the device."""
    full = sum((len(one) - 1) // BLOCK * BLOCK for one in conversations())
    assert after.cached_tokens("host") - before.cached_tokens("host") == full
    assert after.cached_tokens("device") == before.cached_tokens("device")
    assert after.moved_bytes("load") > before.moved_bytes("load")
    assert after.moved_bytes("store") >= after.moved_bytes("load") - before.moved_bytes("load")
    assert after.failures() == 0


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
