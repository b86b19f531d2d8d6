"""REQUEST_LEVEL tiers get every block of a request (L5), and every layer's lifecycle holds around it (L1 to L4)."""

from typing import Any

import pytest
from test_secondary_tiers import FINGERPRINT, FakeRegion, keys

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import OffloadPolicy, ReqContext, RequestOffloadingContext
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.hierarchy.manager import HierarchyLimits, TieringOffloadingManager
from vllm_tiered_offload.hierarchy.parked import ParkedOffers
from vllm_tiered_offload.testing.fakes.memory_tier import MemoryTier
from vllm_tiered_offload.testing.fakes.seams import ManualClock
from vllm_tiered_offload.tiers.cpu.tier import CpuTier, CpuTierSettings
from vllm_tiered_offload.tiers.guard import GuardLimits, TierGuard

A, B = ReqContext("a"), ReqContext("b")


class RequestLevelTier(MemoryTier):
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        super().on_new_request(req_context)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)


class Bench:
    """One REQUEST_LEVEL tier and one BLOCK_LEVEL tier behind sixteen rows."""

    def __init__(self) -> None:
        self.every, self.new = RequestLevelTier(), MemoryTier()
        self.primary = CpuTier(CpuTierSettings(capacity=16 * 4096), strict=True)
        geometry = RegionGeometry(16, (4096,), 1)
        clock = ManualClock()
        region: Any = FakeRegion(geometry)
        limits = HierarchyLimits(cascade_share=1.0)
        guards = [
            TierGuard(tier, name, GuardLimits(), clock) for tier, name in ((self.every, "every"), (self.new, "new"))
        ]
        self.manager = TieringOffloadingManager(
            self.primary, guards, strict=True, limits=limits, clock=clock, region_access=region
        )
        self.manager.bind_region(geometry)
        self.manager.open_region(RegionAnnouncement(1, 1, 1, geometry, FINGERPRINT))
        self.manager.on_schedule_end()

    def submitted(self, tier: MemoryTier, req_id: str) -> list[str]:
        return [name for name, request in tier.calls if request == req_id and name != "lookup"]

    def assert_empty(self) -> None:
        for tier in (self.every, self.new):
            tier.run_jobs()
        self.manager.has_pending_work()
        assert set(self.manager.leftovers().values()) == {0}, self.manager.leftovers()


def test_on_new_request_lifecycle() -> None:
    """L1: every tier is asked for its policy first, the strongest one counts, and each hears of the end once."""
    bench = Bench()
    assert bench.manager.on_new_request(A).policy is OffloadPolicy.REQUEST_LEVEL
    bench.manager.on_request_finished(A)
    for tier in (bench.every, bench.new):
        assert bench.submitted(tier, "a") == ["on_new_request", "on_request_finished"]
    bench.assert_empty()


def test_prepare_store_cascades_existing_blocks_to_request_level_tiers() -> None:
    """L5: what is in the primary tier already goes to the tier that wants every block, and to no other."""
    bench = Bench()
    bench.manager.on_new_request(A)
    bench.manager.complete_store(bench.manager.prepare_store(keys(3), A))
    bench.manager.on_request_finished(A)
    bench.manager.on_new_request(B)
    prepared = bench.manager.prepare_store(keys(4), B)
    assert prepared.keys == (keys(4)[3],)
    assert [job.keys for job in bench.every.waiting if job.req_context == B] == [tuple(keys(3))]
    assert not [job for job in bench.new.waiting if job.req_context == B]
    bench.manager.complete_store(prepared)
    assert [job.keys for job in bench.every.waiting if job.req_context == B] == [tuple(keys(3)), (keys(4)[3],)]
    assert [job.keys for job in bench.new.waiting if job.req_context == B] == [(keys(4)[3],)]
    bench.manager.on_request_finished(B)
    bench.assert_empty()


@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize("finish_first", [True, False])
def test_a_block_in_flight_is_parked_and_offered_when_it_resolves(success: bool, finish_first: bool) -> None:
    """L5, L3. Mutation: finalising without asking for parked offers makes the submit come after the finish signal."""
    bench = Bench()
    bench.manager.on_new_request(A)
    in_flight = bench.manager.prepare_store(keys(2), A)
    bench.manager.on_new_request(B)
    assert bench.manager.prepare_store(keys(2), B).num_accepted == 2
    assert "submit_store" not in bench.submitted(bench.every, "b")
    if finish_first:
        bench.manager.on_request_finished(B)
        assert "on_request_finished" not in bench.submitted(bench.every, "b")
    bench.manager.complete_store(in_flight, () if success else in_flight.keys)
    if not finish_first:
        bench.manager.on_request_finished(B)
    offered = ["submit_store"] if success else []
    assert bench.submitted(bench.every, "b") == ["on_new_request", *offered, "on_request_finished"]
    bench.manager.on_request_finished(A)
    bench.assert_empty()


def test_no_offload_call_after_on_request_finished() -> None:
    """L1 to L4 at the tiers behind, in the order that the scheduler half makes calls: prepare, finish, complete."""
    bench = Bench()
    bench.manager.on_new_request(A)
    first = bench.manager.prepare_store(keys(1), A)
    second = bench.manager.prepare_store(keys(2), A)
    bench.manager.on_request_finished(A)
    for prepared in (second, first):
        bench.manager.complete_store(prepared)
    for tier in (bench.every, bench.new):
        calls = bench.submitted(tier, "a")
        assert calls[-1] == "on_request_finished"
        assert calls.count("on_request_finished") == 1
        assert calls.count("submit_store") >= 2
    bench.assert_empty()


def test_a_reset_ends_what_was_parked() -> None:
    bench = Bench()
    bench.manager.on_new_request(A)
    in_flight = bench.manager.prepare_store(keys(1), A)
    bench.manager.on_new_request(B)
    bench.manager.prepare_store(keys(1), B)
    bench.manager.on_request_finished(B)
    bench.manager.reset_cache()
    assert bench.submitted(bench.every, "b") == ["on_new_request", "on_request_finished"]
    bench.manager.complete_store(in_flight)
    bench.manager.on_request_finished(A)
    assert "submit_store" not in bench.submitted(bench.every, "b")
    bench.assert_empty()


def test_parked_offers_are_counted_per_request() -> None:
    parked = ParkedOffers()
    first, second = keys(2)
    parked.park(first, 1)
    parked.park(first, 1)
    parked.park(first, 2)
    parked.park(second, 2)
    assert parked.resolve([first]) == {1: [first], 2: [first]}
    assert (parked.has(1), parked.has(2)) == (False, True)
    assert parked.resolve([second, first]) == {2: [second]}
    assert not parked.has(2)
    assert len(parked) == 0
