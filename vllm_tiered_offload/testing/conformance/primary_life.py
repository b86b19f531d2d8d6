"""What was in flight when its keys were forgotten."""

from vllm_tiered_offload.contract.jobs import LookupResult, ReqContext
from vllm_tiered_offload.testing.conformance.material import keys_of
from vllm_tiered_offload.testing.conformance.primary_bench import PrimaryBench
from vllm_tiered_offload.testing.conformance.primary_fixtures import PrimaryTierFixtures

HIT, MISS = LookupResult.HIT, LookupResult.MISS


class GenerationTests(PrimaryTierFixtures):
    """reset_cache, and what was in flight (L6)."""

    def test_reset_forgets(self, bench: PrimaryBench) -> None:
        keys = bench.fill("forgotten", 8)
        bench.tier.reset_cache()
        assert bench.lookup(keys) == [MISS] * 8
        assert bench.lease(keys).keys == ()
        assert bench.tier.num_unpinned_rows == 8

    def test_store_in_flight_leaves_nothing(self, bench: PrimaryBench, req: ReqContext) -> None:
        """Its rows are taken until it ends, then free."""
        keys = keys_of("late", 3)
        old = bench.prepare_store(keys, req)
        bench.tier.reset_cache()
        assert bench.lookup(keys) == [MISS] * 3
        assert bench.tier.num_unpinned_rows == 5
        assert len(bench.prepare_store(keys_of("newcomer", 8), req).keys) == 5
        bench.complete_store(old)
        assert bench.lookup(keys) == [MISS] * 3

    def test_late_store_spares_a_newer_one(self, bench: PrimaryBench, req: ReqContext) -> None:
        """The same keys are stored again after the reset; both ends come, the old one last or first."""
        keys = keys_of("raced", 2)
        for old_first in (True, False):
            old = bench.prepare_store(keys, req)
            bench.tier.reset_cache()
            new = bench.prepare_store(keys, req)
            assert new.keys == tuple(keys)
            for prepared in (old, new) if old_first else (new, old):
                bench.complete_store(prepared, failed=keys if prepared is old else ())
            load = bench.prepare_load(keys, req)
            assert load.block_ids == new.block_ids
            bench.complete_load(load)
            bench.tier.reset_cache()

    def test_load_in_flight(self, bench: PrimaryBench, req: ReqContext) -> None:
        """It may go on reading; a failure of it says nothing about the new generation."""
        keys = bench.fill("reading", 3)
        old = bench.prepare_load(keys, req)
        bench.tier.reset_cache()
        assert len(bench.put(keys, req).keys) == 3
        bench.complete_load(old, failed=keys)
        assert bench.lookup(keys) == [HIT] * 3

    def test_requests_live_through_a_reset(self, bench: PrimaryBench, req: ReqContext) -> None:
        bench.tier.touch(bench.fill("before", 2), req)
        bench.tier.reset_cache()
        bench.tier.touch(keys_of("before", 2), req)
        assert len(bench.put(keys_of("after", 2), req).keys) == 2
        bench.finish(req)

    def test_handles_name_their_generation(self, bench: PrimaryBench, req: ReqContext) -> None:
        before = bench.prepare_store(keys_of("before", 1), req)
        bench.tier.reset_cache()
        after = bench.prepare_store(keys_of("after", 1), req)
        assert before.generation != after.generation


class AbandonTests(PrimaryTierFixtures):
    """abandon: a store that is late is forgotten, its rows are not free (D4)."""

    def test_keys_are_forgotten_rows_stay_taken(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = keys_of("late", 3)
        prepared = bench.prepare_store(keys, req)
        bench.tier.abandon(prepared)
        assert bench.lookup(keys) == [MISS] * 3
        assert bench.tier.num_unpinned_rows == 5
        assert len(bench.prepare_store(keys_of("newcomer", 8), req).keys) == 5
        bench.complete_store(prepared)
        assert bench.lookup(keys) == [MISS] * 3

    def test_keys_can_be_stored_again(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = keys_of("again", 2)
        late = bench.prepare_store(keys, req)
        bench.tier.abandon(late)
        new = bench.prepare_store(keys, req)
        bench.complete_store(late)
        bench.complete_store(new)
        assert bench.prepare_load(keys, req).block_ids == new.block_ids

    def test_abandon_after_a_reset(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = keys_of("reset", 2)
        late = bench.prepare_store(keys, req)
        bench.tier.reset_cache()
        new = bench.prepare_store(keys, req)
        bench.tier.abandon(late)
        bench.complete_store(new)
        assert bench.lookup(keys) == [HIT, HIT]

    def test_abandon_of_a_store_that_has_ended(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = keys_of("ended", 2)
        prepared = bench.put(keys, req)
        bench.tier.abandon(prepared)
        assert bench.lookup(keys) == [HIT, HIT]
