"""Many requests at once on a prefix that another engine has computed: it is pulled once, and everybody is served."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from http_client import Metrics

from .checks import comes_to_rest, served_well
from .engine import Engine, free_port
from .test_bursts import ANSWER_TOKENS, BURSTS, BYTES_PER_TOKEN, CHUNK, burst, crowded, nothing_was_skipped
from .workload import prompt

# Two engines of a real model, and a minute of computing.
pytestmark = pytest.mark.slow

PREFIXES = {crowd: prompt(50_000 + crowd, 2900) for crowd in BURSTS}
WHOLE = 2900 // CHUNK * CHUNK


@pytest.fixture(scope="module")
def puller(logs: Path) -> Iterator[Engine]:
    """Its peer has computed the prefixes, and does nothing any more."""
    port = free_port()
    with crowded(logs / "peer-owner.log", {"type": "p2p", "port": port}) as owner:
        for prefix in PREFIXES.values():
            owner.server().complete(prefix, 1)
        settle(owner)
        peer = {"host": "127.0.0.1", "port": port}
        with crowded(logs / "peer-puller.log", {"type": "p2p", "peers": [peer]}) as engine:
            yield engine
            settle(engine)
            served_well(engine)
        settle(owner)
        served_well(owner)


def settle(engine: Engine) -> None:
    """One more step, which tells the gauges: a last chunk is handed to the tier after its step has told its own."""
    engine.server().complete(prompt(1, CHUNK // 2), 1)
    comes_to_rest(engine)


@pytest.mark.parametrize("crowd", BURSTS)
def test_burst_on_a_prefix_of_another_engine(puller: Engine, crowd: int) -> None:
    """CASES 29, across engines. Made to fail by requests that do not wait for another one's promotion: each pulls."""
    started = puller.members("EngineCore")
    before = puller.server().settled_metrics()
    answers = burst(puller, crowd, 0, PREFIXES[crowd])
    after = puller.server().settled_metrics()
    assert [len(answer.token_ids) for answer in answers] == [ANSWER_TOKENS] * crowd
    assert all(answer.text for answer in answers)
    one_pull_served_all(before, after)
    nothing_was_skipped(after)
    settle(puller)
    assert puller.members("EngineCore") == started


def one_pull_served_all(before: Metrics, after: Metrics) -> None:
    """The bytes of the prefix came over once, and whoever waited for them loaded or shared them."""
    name = "vllm:tiered_offload_tier_bytes_total"
    pulled = after.total(name, tier="p2p", direction="load") - before.total(name, tier="p2p", direction="load")
    assert WHOLE * BYTES_PER_TOKEN <= pulled < 1.5 * WHOLE * BYTES_PER_TOKEN
    assert after.total("vllm:tiered_offload_p2p_peer_failures_total") == 0
    assert after.cached_tokens("p2p") - before.cached_tokens("p2p") >= WHOLE
