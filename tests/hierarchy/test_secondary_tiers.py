"""The hierarchy with tiers behind the primary one: cascades, promotions, holds, finalisation, resets."""

from typing import Any

import pytest

from vllm_tiered_offload.contract.fingerprint import FIELDS, Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import LookupResult, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.hierarchy.manager import HierarchyLimits, TieringOffloadingManager
from vllm_tiered_offload.hierarchy.region_access import RegionAccess
from vllm_tiered_offload.testing.fakes.memory_tier import MemoryTier
from vllm_tiered_offload.testing.fakes.seams import ManualClock
from vllm_tiered_offload.tiers.cpu.tier import CpuTier, CpuTierSettings
from vllm_tiered_offload.tiers.guard import GuardLimits, TierGuard

HIT, MISS, PENDING, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.RETRY
FINGERPRINT = Fingerprint.of(dict.fromkeys(FIELDS, 1))
A, B = ReqContext("a"), ReqContext("b")


def keys(count: int, name: str = "k", first: int = 0) -> list[OffloadKey]:
    return [OffloadKey(f"{name}{index}".encode()) for index in range(first, first + count)]


class FakeRegion:
    """Rows in this process; there at once, or when the test says so."""

    failed = False

    def __init__(self, geometry: RegionGeometry) -> None:
        self.geometry = geometry
        self.memory = [memoryview(bytearray(geometry.row_bytes)) for _ in range(geometry.num_rows)]
        self.opened = True

    def start(self, announcement: RegionAnnouncement) -> None:
        pass

    def take(self) -> "FakeRegion | None":
        return self if self.opened else None

    def rows(self) -> list[memoryview]:
        return self.memory

    def close(self) -> None:
        pass


class Hierarchy:
    def __init__(self, rows: int = 16, tiers: int = 1, bind: bool = True, **limits: Any) -> None:
        self.clock = ManualClock()
        self.primary = CpuTier(CpuTierSettings(capacity=rows * 4096), strict=True)
        self.tiers = [MemoryTier() for _ in range(tiers)]
        guards = [
            TierGuard(tier, f"memory{index}", GuardLimits(5.0, 3, 10.0), self.clock)
            for index, tier in enumerate(self.tiers)
        ]
        geometry = RegionGeometry(rows, (4096,), 1)
        self.region: Any = FakeRegion(geometry)
        self.manager = TieringOffloadingManager(
            self.primary,
            guards,
            strict=True,
            limits=HierarchyLimits(**limits),
            clock=self.clock,
            region_access=self.region,
        )
        if bind:
            self.manager.bind_region(geometry)
            self.manager.open_region(RegionAnnouncement(1, 1, 1, geometry, FINGERPRINT))
            self.manager.on_schedule_end()

    @property
    def tier(self) -> MemoryTier:
        return self.tiers[0]

    def store(self, names: list[OffloadKey], ctx: ReqContext) -> None:
        """A device store of `names` with their name as bytes."""
        prepared = self.manager.prepare_store(names, ctx)
        for key, row in zip(prepared.keys, prepared.block_ids, strict=True):
            self.region.memory[row][: len(key)] = key
        self.manager.complete_store(prepared)

    def seed(self, names: list[OffloadKey]) -> None:
        """Chunks that only the tier behind has."""
        for key in names:
            self.tier.chunks[key] = key.ljust(4096, b"\0")

    def end_pass(self) -> None:
        self.manager.on_schedule_end()

    def look(self, names: list[OffloadKey], ctx: ReqContext) -> list[LookupResult]:
        results = self.manager.lookup(names, ctx)
        self.end_pass()
        return results

    def assert_empty(self) -> None:
        self.manager.has_pending_work()
        assert set(self.manager.leftovers().values()) == {0}, self.manager.leftovers()
        assert set(self.primary.leftovers().values()) == {0}, self.primary.leftovers()
        self.primary.check()


def test_stores_cascade_and_come_back_with_their_bytes() -> None:
    h = Hierarchy(rows=4, cascade_share=1.0)
    h.manager.on_new_request(A)
    h.store(keys(3), A)
    assert h.tier.run_jobs() == 1
    h.manager.on_request_finished(A)
    h.end_pass()
    filler = ReqContext("filler")
    h.manager.on_new_request(filler)
    h.store(keys(4, "other"), filler)  # pushes everything out of the primary tier
    h.manager.on_request_finished(filler)
    h.tier.run_jobs()
    h.end_pass()
    h.manager.on_new_request(B)
    assert h.look(keys(3), B) == [PENDING] * 3
    assert h.tier.run_jobs() == 1
    assert h.look(keys(3), B) == [HIT] * 3
    load = h.manager.prepare_load(keys(3), B)
    for key, row in zip(load.keys, load.block_ids, strict=True):
        assert bytes(h.region.memory[row][: len(key)]) == key
    assert h.manager.hit_media(load.keys, B) == ["memory"] * 3
    h.manager.complete_load(load)
    h.manager.on_request_finished(B)
    h.assert_empty()


def test_what_must_not_leave_the_process_does_not() -> None:
    """Case 46: keys that name a LoRA adapter, not its weights. Nothing goes to a tier behind, nothing comes from it.

    Mutation: cascading to `self.guards` gives the tier a job.
    """
    h = Hierarchy(rows=8)
    h.seed(keys(4, "behind"))
    ctx = ReqContext("lora", memory_only=True)
    h.manager.on_new_request(ctx)
    assert h.look(keys(4, "behind"), ctx) == [MISS] * 4
    h.store(keys(3), ctx)
    h.manager.touch(keys(3), ctx)
    assert h.look(keys(3), ctx) == [HIT] * 3
    assert not h.tier.waiting
    h.manager.on_request_finished(ctx)
    h.assert_empty()
    assert {name for name, req in h.tier.calls if req == "lora"} == {"on_new_request", "on_request_finished"}


def test_a_tier_behind_hears_of_the_end_after_the_last_cascade() -> None:
    """L3, L4. Mutation: finalising in on_request_finished regardless of stores makes the order below fail."""
    h = Hierarchy()
    h.manager.on_new_request(A)
    first = h.manager.prepare_store(keys(1), A)
    second = h.manager.prepare_store(keys(1, first=1), A)
    h.manager.on_request_finished(A)
    assert ("on_request_finished", "a") not in h.tier.calls
    h.manager.complete_store(second)
    assert ("on_request_finished", "a") not in h.tier.calls
    h.manager.complete_store(first, first.keys)
    assert [name for name, _ in h.tier.calls if name.startswith(("submit", "on_request"))] == [
        "submit_store",
        "on_request_finished",
    ]
    h.tier.run_jobs()
    h.assert_empty()


def test_what_the_last_store_brought_is_cascaded_before_the_end() -> None:
    """L4. Mutation: finalising as soon as the last store is counted down cascades nothing."""
    h = Hierarchy()
    h.manager.on_new_request(A)
    last = h.manager.prepare_store(keys(1), A)
    h.manager.on_request_finished(A)
    h.manager.complete_store(last)
    assert [name for name, _ in h.tier.calls][-2:] == ["submit_store", "on_request_finished"]
    h.tier.run_jobs()
    h.assert_empty()


def test_finish_with_a_promotion_on_its_way() -> None:
    """Case 11: lookup starts a promotion and the request finishes in the same step: nothing is submitted after."""
    h = Hierarchy()
    h.seed(keys(2))
    h.manager.on_new_request(A)
    assert h.manager.lookup(keys(2), A) == [PENDING] * 2
    h.manager.on_request_finished(A)
    h.end_pass()
    calls = [name for name, req in h.tier.calls if req == "a"]
    assert calls == ["on_new_request", "lookup", "submit_load", "on_request_finished"]
    h.tier.run_jobs()
    h.assert_empty()
    h.manager.on_new_request(B)
    assert h.look(keys(2), B) == [HIT] * 2  # what was promoted stays, unheld
    h.manager.on_request_finished(B)
    h.assert_empty()


def test_only_what_continues_the_prefix_is_promoted() -> None:
    h = Hierarchy()
    h.seed([*keys(1), *keys(2, first=2)])
    h.manager.on_new_request(A)
    assert h.look(keys(4), A)[:2] == [PENDING, MISS]
    assert h.tier.waiting[0].keys == (keys(1)[0],)


def test_a_probe_knows_what_is_behind_and_moves_nothing() -> None:
    """Each key is answered on its own: in the primary tier, behind it, nowhere; later on its way."""
    h = Hierarchy()
    h.manager.on_new_request(A)
    h.store(keys(1), A)
    h.tier.run_jobs()
    h.seed(keys(1, first=1))
    assert h.manager.probe(keys(3), A) == [HIT, HIT, MISS]
    h.end_pass()
    assert not h.tier.waiting
    h.look(keys(2), A)
    assert h.manager.probe(keys(3), A) == [HIT, PENDING, MISS]


def test_one_promotion_for_fifty_requests() -> None:
    """Case 29: the first one asks for it, the others see it coming."""
    h = Hierarchy()
    h.seed(keys(8))
    for index in range(50):
        ctx = ReqContext(f"r{index}")
        h.manager.on_new_request(ctx)
        assert h.manager.lookup(keys(8), ctx) == [PENDING] * 8
    h.end_pass()
    assert h.tier.run_jobs() == 1
    for index in range(50):
        assert h.manager.lookup(keys(8), ReqContext(f"r{index}")) == [HIT] * 8
        h.manager.on_request_finished(ReqContext(f"r{index}"))
    h.assert_empty()


def test_promotions_leave_headroom_and_a_full_pool_is_a_miss() -> None:
    """Case 27: 16 rows, 8 waiting requests of 4 chunks on disk, one running request storing: its stores go on."""
    h = Hierarchy(rows=16, promotion_headroom=0.25)
    contexts = [ReqContext(f"w{index}") for index in range(8)]
    names = [keys(4, f"w{index}-") for index in range(8)]
    h.manager.on_new_request(A)
    for ctx, wanted in zip(contexts, names, strict=True):
        h.seed(wanted)
        h.manager.on_new_request(ctx)
    answers = [h.manager.lookup(wanted, ctx) for ctx, wanted in zip(contexts, names, strict=True)]
    h.end_pass()
    assert answers == [[PENDING] * 4] * 3 + [[MISS] * 4] * 5
    h.tier.run_jobs()
    h.end_pass()
    prepared = h.manager.prepare_store(keys(4, "running"), A)
    assert len(prepared.keys) == 4  # from the headroom: what was promoted is held
    for ctx, wanted in zip(contexts[:3], names, strict=False):
        assert h.look(wanted, ctx) == [HIT] * 4
    assert [name for name, _ in h.tier.calls].count("submit_load") == 3  # no storm
    h.manager.complete_store(prepared)
    for ctx in [A, *contexts]:
        h.manager.on_request_finished(ctx)
    h.tier.run_jobs()
    h.assert_empty()


def test_promoted_rows_are_held_until_admission_end_or_time() -> None:
    """V2."""
    h = Hierarchy(rows=4, promotion_hold=30.0)
    h.seed(keys(2))
    for ctx in (A, B):
        h.manager.on_new_request(ctx)
    h.look(keys(2), A)
    h.tier.run_jobs()
    h.end_pass()
    assert h.primary.num_unpinned_rows == 2
    released = h.manager.prepare_load(keys(2), A)
    h.manager.complete_load(released)  # vLLM had no room: not admitted, so still held
    assert h.primary.num_unpinned_rows == 2
    h.manager.touch(keys(2), A)
    assert h.primary.num_unpinned_rows == 4
    h.seed(keys(2, "t"))
    h.look(keys(2, "t"), B)
    h.tier.run_jobs()
    h.end_pass()
    assert h.primary.num_unpinned_rows == 2
    h.clock.advance(30.0)
    h.end_pass()
    assert h.primary.num_unpinned_rows == 4


def test_unknown_keys_are_asked_again() -> None:
    h = Hierarchy()
    h.tier.retries = 1
    h.seed(keys(2))
    h.manager.on_new_request(A)
    assert h.look(keys(3), A) == [RETRY] * 3
    assert h.look(keys(3), A) == [PENDING, PENDING, MISS]


def test_lookups_wait_for_the_region_to_be_opened() -> None:
    h = Hierarchy()
    h.region.opened = False
    late = Hierarchy(bind=False)
    late.region.opened = False
    late.manager.bind_region(late.region.geometry)
    late.manager.on_new_request(A)
    assert late.look(keys(1), A) == [MISS]  # nobody said where the region is: there is nothing to wait for
    late.manager.open_region(RegionAnnouncement(1, 1, 1, late.region.geometry, FINGERPRINT))
    assert late.look(keys(1), A) == [RETRY]
    late.region.opened = True
    late.seed(keys(1))
    assert late.look(keys(1), A) == [PENDING]


def test_a_bad_block_is_a_miss_for_itself_alone() -> None:
    """D6: good blocks of the same job are kept."""
    h = Hierarchy()
    h.seed(keys(3))
    h.tier.bad_keys = {keys(3)[1]}
    h.manager.on_new_request(A)
    h.look(keys(3), A)
    h.tier.run_jobs()
    h.tier.chunks.pop(keys(3)[1])
    assert h.look(keys(3), A) == [HIT, MISS, HIT]


def test_a_late_promotion_misses_and_its_rows_wait_for_it() -> None:
    """Case 25, D4: one terminal result at the deadline; the rows are reusable only when the late I/O has ended."""
    h = Hierarchy(rows=4)
    h.seed(keys(2))
    h.manager.on_new_request(A)
    assert h.look(keys(2), A) == [PENDING] * 2
    h.clock.advance(5.0)
    h.end_pass()
    assert h.manager.prepare_load(keys(2), A).keys == ()
    assert h.primary.num_unpinned_rows == 2
    stored = h.manager.prepare_store(keys(4, "x"), A)
    assert len(stored.keys) == 2
    h.manager.complete_store(stored)
    h.tier.run_jobs(1)
    h.end_pass()
    assert h.primary.num_unpinned_rows == 2  # two rows still on their way into the tier
    h.tier.run_jobs()
    h.manager.on_request_finished(A)
    h.assert_empty()


def test_reset_with_everything_in_flight() -> None:
    """Case 14: promotion, cascade and device store in flight; rows come free with their own end, keys never."""
    h = Hierarchy(rows=8, drain_timeout=0.01)
    h.seed(keys(2, "p"))
    h.manager.on_new_request(A)
    h.manager.on_new_request(B)
    h.store(keys(2), A)
    h.look(keys(2, "p"), A)
    device = h.manager.prepare_store(keys(2, "d"), B)
    h.manager.on_request_finished(B)
    h.manager.reset_cache()
    assert ("on_request_finished", "b") in h.tier.calls
    assert ("reset", "") in h.tier.calls
    assert h.primary.num_unpinned_rows == 2
    h.tier.run_jobs()
    h.manager.complete_store(device)
    assert ("submit_store", "b") not in h.tier.calls
    h.end_pass()
    assert h.primary.num_unpinned_rows == 8
    h.tier.chunks.clear()
    assert h.look([*keys(2), *keys(2, "p"), *keys(2, "d")], A) == [MISS] * 6
    h.manager.on_request_finished(A)
    h.assert_empty()


def test_cascades_hold_a_share_of_the_rows_at_most() -> None:
    h = Hierarchy(rows=8, cascade_share=0.5)
    h.manager.on_new_request(A)
    h.store(keys(3), A)
    h.store(keys(3, "x"), A)
    assert [len(job.keys) for job in h.tier.waiting] == [3, 1]
    assert h.manager.get_stats()["cascades_skipped_total|tier=memory0"] == 2


def test_two_tiers_behind() -> None:
    """Every tier is offered every chunk; the nearest that has one supplies it."""
    h = Hierarchy(tiers=2)
    near, far = h.tiers
    h.manager.on_new_request(A)
    h.store(keys(2), A)
    assert (near.run_jobs(), far.run_jobs()) == (1, 1)
    h.manager.reset_cache()
    far.chunks[keys(1)[0]] = near.chunks[keys(1)[0]] = b"n".ljust(4096)
    far.chunks[keys(2)[1]] = b"f".ljust(4096)
    assert h.look(keys(2), A) == [PENDING] * 2
    assert (near.waiting[0].keys, far.waiting[0].keys) == ((keys(1)[0],), (keys(2)[1],))


@pytest.mark.parametrize("method", ["on_new_request", "lookup", "submit_store", "submit_load", "get_finished_jobs"])
def test_a_tier_that_raises_costs_its_hits_and_nothing_else(method: str) -> None:
    """V4: errors of a tier never travel up; it is switched off after failures in a row, and tried again."""
    h = Hierarchy()
    h.seed(keys(1, "s"))
    h.tier.raising = {method}
    for index in range(4):
        ctx = ReqContext(f"r{index}")
        h.manager.on_new_request(ctx)
        assert h.look(keys(1, "s"), ctx)[0] in (MISS, PENDING)
        h.store(keys(1, f"r{index}"), ctx)
        h.manager.on_request_finished(ctx)
        h.end_pass()
    assert h.manager.get_stats()["tier_off|tier=memory0"] == 1
    h.tier.raising = set()
    h.clock.advance(10.0)
    h.manager.on_new_request(A)
    h.store(keys(1, "probe"), A)
    h.tier.run_jobs()
    h.end_pass()
    assert h.manager.get_stats()["tier_off|tier=memory0"] == 0
    h.manager.on_request_finished(A)
    h.tier.run_jobs()
    h.assert_empty()


def test_region_access_opens_aside() -> None:
    from vllm_tiered_offload.region import HostRegion

    aside: list[Any] = []
    with HostRegion.create(RegionGeometry(2, (4096,), 1)) as region:
        access = RegionAccess(aside.append)
        access.start(region.announcement())
        assert access.take() is None
        aside.pop()()
        opened = access.take()
        assert opened is not None
        assert access.take() is None
        opened.array[1, 5] = 7
        assert region.array[1, 5] == 7
        access.close()
    gone = RegionAccess(lambda job: job())
    gone.start(RegionAnnouncement(1, 99999, 1, RegionGeometry(1, (4096,), 1)))
    assert gone.failed
    assert gone.take() is None


def test_chunks_that_a_promotion_may_still_fail_to_bring_are_not_counted_as_stored() -> None:
    """V3: the request computes on while its promotion is late; what the promotion fails to bring is offered again.

    Mutation: counting keys under promotion as accepted leaves them out of every tier.
    """
    h = Hierarchy()
    h.seed(keys(4))
    h.manager.on_new_request(A)
    h.look(keys(4), A)
    early = h.manager.prepare_store(keys(6), A)
    assert (early.keys, early.num_accepted) == ((), 0)
    h.end_pass()
    h.tier.run_jobs(fail=True)
    again = h.manager.prepare_store(keys(6), A)
    assert again.keys == tuple(keys(6))
    h.manager.complete_store(again)
    h.manager.on_request_finished(A)
    h.tier.run_jobs()
    h.assert_empty()
