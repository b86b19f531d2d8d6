"""L7: what a broken contract costs. "strict" raises with the request's history, "tolerant" skips that request's offload
with one warning and a counter; either way before anything is allocated, at the scheduler half and at the manager.
"""

import logging
from collections.abc import Callable

import pytest

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.lifecycle import InvalidTransition, Phase
from vllm_tiered_offload.hierarchy.manager import TieringOffloadingManager
from vllm_tiered_offload.scheduler.scheduler import OffloadingConnectorScheduler
from vllm_tiered_offload.scheduler.views import GroupShape
from vllm_tiered_offload.settings import Settings
from vllm_tiered_offload.tiers.cpu.tier import CpuTier, CpuTierSettings

from .harness import BLOCK, Half, Request

COUNTER = "lifecycle_violations_total"


class RealHalf(Half):
    """The half over a real manager and CPU tier of 64 rows."""

    def __init__(self, lifecycle: str) -> None:
        super().__init__(bind=False, lifecycle=lifecycle)
        settings = Settings.parse({"cpu": {"capacity": "1GiB"}, "lifecycle": lifecycle})
        self.tier = CpuTier(CpuTierSettings(capacity=64 * 4096), strict=True)
        self.real = TieringOffloadingManager(self.tier, strict=lifecycle == "strict", clock=self.clock)
        shape = GroupShape(BLOCK, BLOCK, BLOCK)
        self.inner = OffloadingConnectorScheduler(settings, self.real, shape, clock=self.clock)
        self.inner.bind_device(self.pool, lambda req_id: (self.tables.get(req_id, []),))
        self.announce()

    def rows_in_use(self) -> int:
        return 64 - self.tier.num_unpinned_rows

    def stored(self, req_id: str, num_tokens: int) -> None:
        """A request that computed and stored everything, and is gone."""
        request = self.add(req_id, num_tokens)
        self.ack(self.start(request, num_tokens))
        request.append(-1)
        self.finish(request)
        self.ack(self.step())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def count(half: Half) -> float:
    """Violations counted since the last call."""
    stats = half.inner.take_stats()
    return 0 if stats is None else stats.counters.get(COUNTER, 0)


def told_too_early(half: RealHalf, request: Request) -> None:
    """A bug somewhere: the manager hears of the end while the request goes on."""
    half.real.on_request_finished(half.inner._requests[request.request_id].ctx)


def look_up(half: RealHalf, request: Request) -> None:
    told_too_early(half, request)
    assert half.ask(request) == (0, False)
    assert not half.step().loads


def admit(half: RealHalf, request: Request) -> None:
    told_too_early(half, request)
    half.allocate(request, 8)


def prefill(half: RealHalf, request: Request) -> None:
    half.allocate(request, 8)
    told_too_early(half, request)
    assert not half.step({request: 8}).stores


CALLS = pytest.mark.parametrize(("call", "name"), [(look_up, "probe"), (admit, "touch"), (prefill, "prepare_stores")])


@CALLS
def test_strict_raises_with_the_story(call: Callable[[RealHalf, Request], None], name: str) -> None:
    """The text names the request, what came when, and the call; no row and no device block is taken.

    Mutation: asking the primary tier before the check in TieringOffloadingManager.prepare_stores leaves rows in use.
    """
    half = RealHalf("strict")
    half.stored("warm", 9)
    request = half.add("a", 9)
    with pytest.raises(InvalidTransition, match=f"request a: submit while signalled; history: finish signal <{name}>"):
        call(half, request)
    assert half.rows_in_use() == 0
    assert half.inner.num_pinned_blocks == 0
    assert half.inner.debug_state()["jobs"] == 0


@CALLS
def test_tolerant_skips_the_request_alone(
    caplog: pytest.LogCaptureFixture, call: Callable[[RealHalf, Request], None], name: str
) -> None:
    """One warning and a counter, nothing allocated, however long it goes on; others and its next life are offloaded."""
    half = RealHalf("tolerant")
    half.stored("warm", 9)
    request = half.add("a", 9)
    with caplog.at_level(logging.WARNING):
        call(half, request)
        for _ in range(3):
            half.ask(request)
            half.step()
    (text,) = warnings(caplog)
    assert "request a" in text
    assert f"history: finish signal <{name}>" in text
    assert count(half) >= 1
    assert half.rows_in_use() == 0
    assert half.inner.num_pinned_blocks == 0
    other = half.add("other", 8, first_token=50)
    message = half.start(other, 8)
    assert len(message.stores) == 1
    half.ack(message)
    half.finish(request, aborted=True)
    half.finish(other, aborted=True)
    half.step()
    again = half.add("a", 12, first_token=80)
    message = half.start(again, 12)
    assert len(message.stores) == 1
    half.ack(message)
    half.finish(again, aborted=True)
    half.step()
    assert set(half.inner.debug_state().values()) == {0}
    assert len(warnings(caplog)) == 1


def test_strict_half_raises_before_it_asks_or_pins() -> None:
    """The half's own table: it takes no pin and does not even ask the manager.

    Mutation: advancing the table after prepare_store in the half fails here and below.
    """
    half = Half()
    request = half.add("a", 8)
    half.inner._requests["a"].lifecycle.phase = Phase.SIGNALLED
    with pytest.raises(InvalidTransition, match="request a: submit while signalled"):
        half.start(request, 8)
    assert "prepare_store" not in half.manager.of("a")
    assert half.inner.num_pinned_blocks == 0


def test_tolerant_half_skips_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The same, survived: one warning that names the setting, a counter, no later offer, a proper end."""
    half = Half(lifecycle="tolerant")
    request = half.add("a", 12)
    life = half.inner._requests["a"].lifecycle
    life.phase = Phase.SIGNALLED
    with caplog.at_level(logging.WARNING):
        assert not half.start(request, 4).stores
        life.phase = Phase.TRACKED
        assert not half.step({request: 8}).stores
    (text,) = warnings(caplog)
    assert "request a is not offloaded any more: request a: submit while signalled" in text
    assert "'strict'" in text
    assert count(half) == 1
    half.finish(request, aborted=True)
    half.step()
    assert half.manager.of("a") == ["on_new_request", "lookup", "on_request_finished"]
    half.assert_empty()


@pytest.mark.parametrize("lifecycle", ["strict", "tolerant"])
def test_nothing_is_skipped_without_a_reason(lifecycle: str, caplog: pytest.LogCaptureFixture) -> None:
    """Both modes do the same work as long as the contract holds."""
    half = RealHalf(lifecycle)
    half.stored("warm", 9)
    request = half.add("a", 9)
    keys: list[OffloadKey] = half.inner._requests["a"].keys[0].slice(0, 2)
    assert half.ask(request) == (8, True)
    half.allocate(request, 9, external=8)
    message = half.step()
    assert len(message.loads) == 1
    assert half.rows_in_use() == len(keys)
    half.ack(message)
    half.finish(request, aborted=True)
    half.step()
    assert half.rows_in_use() == 0
    assert count(half) == 0
    assert not warnings(caplog)
