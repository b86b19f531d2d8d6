"""One engine with the connector: equal answers, aborts, crowds, pause and resume, reset."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from http_client import Answer, Server, completion_body

from .checks import comes_to_rest, equal_and_loaded, loaded_tokens, reset_succeeds
from .engine import MODEL_NAME, Engine
from .workload import ANSWER_TOKENS, Answers, contents, conversations, prompt, push_out


def test_answers_depend_on_the_kv_of_early_tokens(wanted: Answers, offload: Engine) -> None:
    """Guards every comparison here: were the model deaf to its early tokens, wrong bytes there would not show."""
    server = offload.server()
    one = conversations()[0]
    other = [*prompt(777, 64), *one[64:]]
    assert server.complete(other, 4).logprobs != wanted.cold[0].logprobs[:4]


def test_answers_are_equal_from_every_source(wanted: Answers, offload: Engine) -> None:
    equal_and_loaded(offload.server(), wanted)
    comes_to_rest(offload)


@pytest.mark.parametrize("delay_ms", [0, 1, 3, 10, 30, 100])
def test_abort_while_computing(offload: Engine, delay_ms: int) -> None:
    """The client hangs up at different points of a chunked prefill."""
    hang_up_after(offload, prompt(500 + delay_ms, 4000), delay_ms)
    comes_to_rest(offload)
    assert len(offload.server().complete(prompt(501, 300), 4).token_ids) == 4


@pytest.mark.parametrize("delay_ms", [0, 1, 2, 3, 5, 8, 12, 20])
def test_abort_while_loading(wanted: Answers, offload: Engine, delay_ms: int) -> None:
    """The client hangs up while its prompt comes back from host memory; the next one gets it whole."""
    server = offload.server()
    push_out(server, seed=20 + delay_ms)
    hang_up_after(offload, conversations()[2], delay_ms)
    comes_to_rest(offload)
    assert server.complete(conversations()[2], ANSWER_TOKENS).content() == wanted.device[2].content()


def test_abort_while_decoding(wanted: Answers, offload: Engine) -> None:
    server = offload.server()
    for i in range(4):
        read_some_chunks(server, prompt(600 + i, 700), chunks=3 + 20 * i)
    comes_to_rest(offload)
    assert server.complete(conversations()[0], ANSWER_TOKENS).content() == wanted.device[0].content()


@pytest.mark.parametrize("crowd", [16, 100])
def test_crowd_on_one_prefix(offload: Engine, crowd: int) -> None:
    """All ask at once for one prefix that only host memory has. Their batches differ, so only the ends are compared."""
    server = offload.server()
    prefix = prompt(700 + crowd, 1600)
    server.complete(prefix, 1)
    push_out(server, seed=40 + crowd)
    before = loaded_tokens(server)
    with ThreadPoolExecutor(crowd) as pool:
        answers = list(pool.map(lambda i: ask_alone(offload, [*prefix, *prompt(i, 40)]), range(crowd)))
    assert [len(answer.token_ids) for answer in answers] == [8] * crowd
    assert loaded_tokens(server) - before >= 1600
    comes_to_rest(offload)


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_pause_and_resume_while_storing(offload: Engine, mode: str) -> None:
    """Pause completes though stores are in flight, and everything goes on afterwards."""
    requests = [prompt(800 + 10 * len(mode) + i, 1200) for i in range(4)]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(ask_alone, offload, one, 64) for one in requests]
        time.sleep(0.3)
        offload.post("/pause", mode=mode, timeout=60)
        offload.post("/resume")
        finished = [a.result(timeout=60) for a in answers]
    if mode != "abort":
        assert [len(answer.token_ids) for answer in finished] == [64] * 4
    comes_to_rest(offload)
    assert len(offload.server().complete(requests[0], 4).token_ids) == 4


def test_sleep_and_wake_up(wanted: Answers, offload: Engine) -> None:
    """vLLM resets every cache before it sleeps, so the prompt is computed again, not loaded."""
    server = offload.server()
    server.complete(conversations()[3], 1)
    offload.post("/sleep", level=1, timeout=60)
    offload.post("/wake_up")
    before = loaded_tokens(server)
    assert server.complete(conversations()[3], ANSWER_TOKENS).content() == wanted.cold[3].content()
    assert loaded_tokens(server) == before


def test_reset_forgets_what_host_memory_holds(wanted: Answers, offload: Engine) -> None:
    server = offload.server()
    server.complete(conversations()[1], 1)
    before = server.settled_metrics()
    assert reset_succeeds(offload)
    assert server.complete(conversations()[1], ANSWER_TOKENS).content() == wanted.cold[1].content()
    after = server.settled_metrics()
    for source in ("host", "device"):
        assert after.cached_tokens(source) == before.cached_tokens(source)


def test_reset_during_a_storm(wanted: Answers, offload: Engine) -> None:
    """Resets while requests compute, store and load: each ends, and no answer afterwards is wrong."""
    stop = threading.Event()

    def keep_asking(seed: int) -> None:
        while not stop.is_set():
            ask_alone(offload, prompt(900 + seed, 1500))

    with ThreadPoolExecutor(4) as pool:
        storm = [pool.submit(keep_asking, seed) for seed in range(4)]
        for _ in range(6):
            time.sleep(0.4)
            offload.post("/reset_prefix_cache", reset_external=True)
        stop.set()
        for one in storm:
            one.result(timeout=60)
    comes_to_rest(offload)
    assert reset_succeeds(offload)
    answers = [offload.server().complete(one, ANSWER_TOKENS) for one in conversations()]
    assert contents(answers) == contents(wanted.cold)


def ask_alone(engine: Engine, one: list[int], max_tokens: int = 8) -> Answer:
    """Over a connection of its own, so that many can be open at once."""
    return engine.server().complete(one, max_tokens)


def hang_up_after(engine: Engine, one: list[int], delay_ms: int) -> None:
    """Send a request and close its connection after a while, whether or not anything came back."""
    body = completion_body(MODEL_NAME, one, 64)
    with suppress(httpx.ReadTimeout):
        timeout = httpx.Timeout(30, read=max(delay_ms, 0.5) / 1000)
        httpx.post(engine.url + "/v1/completions", json=body, timeout=timeout, verify=False)


def read_some_chunks(server: Server, one: list[int], chunks: int) -> None:
    """Read that many pieces of a long answer, then close the connection."""
    body = completion_body(server.model, one, 500)
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number >= chunks:
                return
