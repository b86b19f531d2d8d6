"""Who leaves, and what gets in."""

from vllm_tiered_offload.contract.jobs import LookupResult, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.testing.conformance.material import Support, keys_of, require
from vllm_tiered_offload.testing.conformance.primary_bench import PrimaryBench
from vllm_tiered_offload.testing.conformance.primary_fixtures import NewBench, PrimaryTierFixtures

MISS = LookupResult.MISS


class EvictionTests(PrimaryTierFixtures):
    """Who leaves (V6)."""

    def test_tail_leaves_before_head(self, bench: PrimaryBench) -> None:
        """A prefix without its head is worth nothing."""
        keys = bench.fill("long", 8)
        bench.fill("newcomer", 3)
        assert bench.present(keys) == keys[:5]

    def test_order_of_completions_does_not_matter(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = keys_of("reversed", 8)
        parts = [bench.prepare_store(keys[first : first + 2], req) for first in (0, 2, 4, 6)]
        for part in reversed(parts):
            bench.complete_store(part)
        bench.finish(req)
        bench.fill("newcomer", 3)
        assert bench.present(keys) == keys[:5]

    def test_keys_of_the_call_stay(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = bench.fill("own", 8)
        new = keys_of("own continued", 4)
        prepared = bench.prepare_store([*keys[:6], *new], req)
        assert prepared.keys == tuple(new[:2])
        assert prepared.num_accepted == 8
        assert bench.present(keys) == keys[:6]

    def test_any_unpinned_row_can_be_had(self, bench: PrimaryBench, req: ReqContext) -> None:
        """However few, wherever they are in the order."""
        keys = bench.fill("old", 8)
        for spared in range(8):
            pinned = [key for index, key in enumerate(bench.present(keys)) if index != spared]
            loads = [bench.prepare_load([key], req) for key in pinned]
            other = bench.begin(f"other {spared}")
            prepared = bench.prepare_store(keys_of(f"newcomer {spared}", 1), other)
            assert len(prepared.keys) == 1, "one row was unpinned, and could not be had"
            bench.complete_store(prepared, failed=prepared.keys)
            bench.finish(other)
            for load in loads:
                bench.complete_load(load)
            bench.put(keys, req)
            bench.finish(req)
            req = bench.begin()

    def test_touched_outlives_untouched(self, bench: PrimaryBench, honours_recency: Support) -> None:
        require(honours_recency, "recency")
        old, young = bench.fill("old", 4), bench.fill("young", 4)
        req = bench.begin("user")
        bench.tier.touch(old, req)
        bench.finish(req)
        bench.fill("newcomer", 4)
        assert bench.present(old) == old
        assert bench.present(young) == []

    def _survivors(self, bench: PrimaryBench, *, lookups: int = 0, touches: int = 0) -> list[OffloadKey]:
        """What is left of three prefixes when one request used the first so often, and others came."""
        keys = [bench.fill(name, 2) for name in ("a", "b", "c")]
        req = bench.begin("user")
        for _ in range(lookups):
            bench.lookup(keys[0], req)
        for _ in range(touches):
            bench.tier.touch(keys[0], req)
        bench.finish(req)
        bench.fill("newcomer", 4)
        return [key for part in keys for key in bench.present(part)]

    def test_lookup_has_no_effect_on_the_order(self, new_bench: NewBench) -> None:
        assert self._survivors(new_bench(8), lookups=9) == self._survivors(new_bench(8))

    def test_one_touch_a_request(self, new_bench: NewBench) -> None:
        """A long generation calls touch every few tokens; it is still one use."""
        assert self._survivors(new_bench(8), touches=9) == self._survivors(new_bench(8), touches=1)

    def test_touch_of_unknown_keys(self, bench: PrimaryBench, req: ReqContext) -> None:
        bench.tier.touch(keys_of("unknown", 3), req)
        assert bench.tier.num_unpinned_rows == 8


class AdmissionTests(PrimaryTierFixtures):
    """Partial acceptance (V3)."""

    def _leave(self, bench: PrimaryBench, count: int) -> None:
        """Rows that can be had: `count`."""
        bench.prepare_load(bench.fill("blocker", bench.num_rows - count), bench.begin("blocker"))

    def test_longest_prefix_that_fits(self, bench: PrimaryBench, req: ReqContext) -> None:
        self._leave(bench, 3)
        keys = keys_of("prompt", 5)
        prepared = bench.prepare_store(keys, req)
        assert prepared.keys == tuple(keys[:3])
        assert prepared.num_accepted == 3

    def test_present_keys_count_as_accepted(self, bench: PrimaryBench, req: ReqContext) -> None:
        """Up to the first key that is declined."""
        self._leave(bench, 3)
        keys = keys_of("prompt", 5)
        bench.put([keys[0], keys[2]], req)
        prepared = bench.prepare_store(keys, req)
        assert prepared.keys == (keys[1],)
        assert prepared.num_accepted == 3

    def test_several_offers_share_what_fits(self, bench: PrimaryBench, req: ReqContext) -> None:
        """Each keeps its longest prefix; who comes first is served first."""
        self._leave(bench, 5)
        first, second, third = (keys_of(name, 3) for name in ("first", "second", "third"))
        prepared = bench.prepare_stores((first, req), (second, bench.begin("b")), (third, bench.begin("c")))
        assert list(prepared.accepted) == [3, 2, 0]
        assert list(prepared.parts()) == [tuple(first), tuple(second[:2])]
        bench.complete_store(prepared, [second[0]])
        assert bench.present([*first, *second]) == [*first, second[1]]

    def test_a_key_of_two_offers_gets_one_row(self, bench: PrimaryBench, req: ReqContext) -> None:
        """Two requests compute the same prefix in one step."""
        keys = keys_of("prompt", 3)
        prepared = bench.prepare_stores((keys, req), (keys, bench.begin("b")), ((), bench.begin("c")))
        assert prepared.keys == tuple(keys)
        assert (list(prepared.accepted), list(prepared.taken)) == ([3, 3, 0], [3, 0, 0])

    def test_nothing_fits(self, bench: PrimaryBench, req: ReqContext) -> None:
        """Without side effects: the tier is as before."""
        self._leave(bench, 0)
        blockers = keys_of("blocker", 8)
        prepared = bench.prepare_store(keys_of("prompt", 5), req)
        assert (prepared.keys, prepared.num_accepted) == ((), 0)
        assert bench.present(blockers) == blockers
        assert bench.lookup(keys_of("prompt", 5)) == [MISS] * 5

    def test_declined_range_is_accepted_later(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = keys_of("later", 4)
        blocker = bench.prepare_load(bench.fill("blocker", 8), bench.begin("blocker"))
        assert bench.prepare_store(keys, req).num_accepted == 0
        bench.complete_load(blocker)
        assert bench.prepare_store(keys, req).keys == tuple(keys)

    def test_prompt_larger_than_the_tier(self, bench: PrimaryBench, req: ReqContext) -> None:
        """Offered in parts, it keeps its head instead of pushing it out with its tail."""
        keys = keys_of("huge", 12)
        for first in range(0, 12, 4):
            bench.put(keys[first : first + 4], req)
        assert bench.present(keys) == keys[:8]
