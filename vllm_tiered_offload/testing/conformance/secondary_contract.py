"""What a tier answers, when, and how often."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import pytest

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import LookupResult, OffloadPolicy, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import SecondaryTierManager
from vllm_tiered_offload.telemetry.metrics import parse_key
from vllm_tiered_offload.testing.conformance.material import Support, keys_of, require
from vllm_tiered_offload.testing.conformance.secondary_bench import SecondaryBench
from vllm_tiered_offload.testing.conformance.secondary_fixtures import NewBench, SecondaryTierFixtures

HIT, MISS = LookupResult.HIT, LookupResult.MISS


class ContractTests(SecondaryTierFixtures):
    """Settings, requests, lookups and results."""

    def test_class_is_a_secondary_tier(self, tier_class: type[SecondaryTierManager]) -> None:
        assert issubclass(tier_class, SecondaryTierManager)
        assert not getattr(tier_class, "__abstractmethods__", ()), "an abstract method is left"

    def test_medium_is_a_word(self, new_bench: NewBench) -> None:
        """It becomes a label of metrics and events."""
        medium = new_bench().tier.medium
        assert isinstance(medium, str)
        assert medium
        assert not set(medium) & set("|= \n"), f"medium {medium!r} cannot be a label"

    def test_unknown_setting_is_refused(
        self, tier_class: type[SecondaryTierManager], tier_settings: Mapping[str, Any]
    ) -> None:
        """With one line that names it and says where it stands."""
        with pytest.raises(ValueError, match="no_such_key") as caught:
            tier_class.from_settings({**tier_settings, "no_such_key": 1}, "here.tiers[3]", engine_id="engine-1")
        text = str(caught.value)
        assert "\n" not in text
        assert text.startswith("here.tiers[3]")

    def test_requests_and_polls_may_come_before_the_region(self, new_bench: NewBench) -> None:
        """The region is opened elsewhere while the first requests arrive."""
        bench = new_bench(bind=False)
        early, over = bench.begin("early"), bench.begin("over")
        bench.poll()
        bench.finish(over)
        bench.bind()
        keys = keys_of("early", 2)
        bench.put(keys, early)
        assert bench.resolve(keys, early) == [HIT, HIT]

    def test_new_request_answers_a_policy(self, bench: SecondaryBench) -> None:
        answer = bench.tier.on_new_request(ReqContext("policy", {"some": "params"}))
        assert isinstance(answer.policy, OffloadPolicy)

    def test_request_id_may_come_again(self, bench: SecondaryBench) -> None:
        keys = keys_of("again", 2)
        first = bench.begin("same")
        bench.put(keys, first)
        bench.finish(first)
        second = bench.begin("same")
        assert bench.get(keys, second).good == keys
        bench.finish(second)

    def test_lookup_of_nothing(self, bench: SecondaryBench, req: ReqContext) -> None:
        assert bench.lookup([], req) == []

    @pytest.mark.parametrize("count", [1, 7, 1000])
    def test_lookup_answers_one_result_a_key(self, bench: SecondaryBench, req: ReqContext, count: int) -> None:
        keys = keys_of("many", count)
        bench.lookup(keys, req)
        assert bench.resolve(keys, req) == [MISS] * count

    def test_unknown_key_becomes_a_miss(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Scheduling passes alone resolve RETRY: nobody submits anything for it."""
        assert bench.resolve(keys_of("unknown", 3), req) == [MISS] * 3
        assert not bench.ended

    def test_stored_key_becomes_a_hit(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Answers keep the order of the question."""
        stored, absent = keys_of("stored", 3), keys_of("absent", 2)
        bench.put(stored, req)
        assert bench.resolve([absent[0], *stored, absent[1]], req) == [MISS, HIT, HIT, HIT, MISS]

    def test_lookup_has_no_effect(self, bench: SecondaryBench, req: ReqContext) -> None:
        keys = keys_of("steady", 2)
        bench.put(keys, req)
        assert [bench.resolve(keys, req) for _ in range(20)] == [[HIT, HIT]] * 20

    def test_touch_is_harmless(self, bench: SecondaryBench, req: ReqContext) -> None:
        keys = keys_of("touched", 2)
        bench.call("touch", bench.tier.touch, keys_of("never seen", 2), req)
        bench.put(keys, req)
        bench.call("touch", bench.tier.touch, keys, req)
        bench.call("touch", bench.tier.touch, [], req)
        assert bench.resolve(keys, req) == [HIT, HIT]

    def test_each_job_has_one_result(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Never none, never a second one."""
        keys = keys_of("one", 8)
        for key in keys:
            bench.start_store([key], req)
        bench.wait_all()
        for row, key in enumerate(keys):
            bench.submit([key], [row], load=True, req=req)
        bench.wait_all()
        bench.watch()
        assert len(bench.ended) == 2 * len(keys)

    def test_empty_job_ends(self, bench: SecondaryBench, req: ReqContext) -> None:
        for load in (False, True):
            [ended] = bench.wait(bench.submit([], load=load, req=req))
            assert ended.result.success
            assert ended.result.successful_keys == ()

    def test_results_come_after_the_request_finished(self, bench: SecondaryBench) -> None:
        """on_request_finished ends the submits, not the completions."""
        req, keys = bench.begin("brief"), keys_of("brief", 4)
        bench.put(keys[:2], req)
        jobs = [bench.start_store(keys[2:], req, rows=(4, 5)), bench.submit(keys[:2], (8, 9), load=True, req=req)]
        bench.finish(req)
        stored, loaded = bench.wait(*jobs)
        assert stored.good == keys[2:]
        assert loaded.good == keys[:2]

    def test_finished_request_costs_no_chunk(self, bench: SecondaryBench) -> None:
        """Chunks belong to everybody, not to the request that stored them."""
        first, keys = bench.begin("first"), keys_of("shared", 2)
        bench.put(keys, first)
        bench.finish(first)
        assert bench.resolve(keys, bench.begin("second")) == [HIT, HIT]

    def test_no_work_is_pending_at_the_end(self, bench: SecondaryBench, req: ReqContext) -> None:
        """An engine that is idle must be able to sleep."""
        bench.put(keys_of("idle", 3), req)
        assert bench.call("has_pending_work", bench.tier.has_pending_work) is False


class TellingTests(SecondaryTierFixtures):
    """Stats and events."""

    def _stats(self, bench: SecondaryBench) -> Mapping[str, int | float]:
        return dict(bench.call("get_stats", bench.tier.get_stats))

    def test_stats_are_flat_numbers(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Under keys of the metric table, or under the tier's own: `medium_...`."""
        bench.put(keys_of("stats", 2), req)
        stats = self._stats(bench)
        for name, value in stats.items():
            assert isinstance(value, int | float), f"{name} is {value!r}"
            assert not isinstance(value, bool), f"{name} is a boolean"
            assert isfinite(value), f"{name} is {value}"
            assert isinstance(name, str)
            own = name.startswith(f"{bench.tier.medium}_")
            assert own or parse_key(name), f"{name} is not in the metric table, and does not begin with the medium"

    def test_counters_never_fall(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Not by a reset either: a falling counter reads as a restart."""
        keys = keys_of("counted", 2)
        bench.put(keys, req)
        before = self._stats(bench)
        bench.get(keys, req)
        bench.reset()
        after = self._stats(bench)
        fallen = [name for name in before if "_total" in name and after.get(name, 0) < before[name]]
        assert not fallen, f"counters {fallen} fell"

    def test_events_tell_what_was_stored(self, new_bench: NewBench, reports_events: Support) -> None:
        require(reports_events, "residency events")
        bench = new_bench(events=True)
        keys = keys_of("told", 3)
        bench.put(keys, bench.begin())
        resident = self._replay(bench, set())
        assert resident >= set(keys)
        assert not list(bench.tier.take_events()), "taken events came again"
        bench.reset()
        assert not self._replay(bench, resident) & set(keys), "a reset left keys resident"

    def _replay(self, bench: SecondaryBench, resident: set[OffloadKey]) -> set[OffloadKey]:
        """The keys that are resident after the events since the last call."""
        for event in bench.call("take_events", bench.tier.take_events):
            assert event.medium == bench.tier.medium
            assert event.keys, "an event without keys"
            resident = resident | set(event.keys) if event.stored else resident - set(event.keys)
        return resident

    def test_no_events_are_kept_for_nobody(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Without `events` nobody takes them, and they would grow for ever."""
        bench.put(keys_of("untold", 3), req)
        assert not list(bench.tier.take_events())


class ThreadTests(SecondaryTierFixtures):
    """Many jobs at once, and several tiers in one process."""

    def test_many_jobs_while_results_are_polled(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Loads and stores of a hundred keys, four rows each way, never waiting for an idle tier."""
        keys = keys_of("busy", 100)
        parts = [(keys[first : first + 4], range(first % 16, first % 16 + 4)) for first in range(0, len(keys), 4)]
        for part, rows in parts:
            bench.wait_for_rows(rows)
            bench.start_store(part, req, rows=rows)
            bench.poll()
        bench.wait_all()
        bench.put(keys, req)  # what a tier refused while it was busy; the rest is there already
        loads = []
        for part, rows in parts:
            bench.wait_for_rows(rows)
            loads.append(bench.submit(part, rows, load=True, req=req))
            bench.poll()
        for ended in bench.wait(*loads):
            assert ended.result.success
            assert not bench.wrong(ended)
        bench.check_rows()

    def test_one_key_in_many_jobs(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Stored by several requests at once, and loaded into several rows at once."""
        [key] = keys_of("popular", 1)
        bench.warm_up(req)
        jobs = [bench.start_store([key], req, rows=(row,)) for row in range(8)]
        assert any(ended.good for ended in bench.wait(*jobs))
        loads = [bench.submit([key], (row,), load=True, req=req) for row in range(8)]
        for ended in bench.wait(*loads):
            assert ended.good == [key]
            assert not bench.wrong(ended)

    def test_two_tiers_keep_their_results_apart(self, new_bench: NewBench) -> None:
        """Two engines in one process use the same job ids."""
        one, two = new_bench("engine-1"), new_bench("engine-2")
        first, second = one.begin(), two.begin()
        for index in range(6):
            one.start_store(keys_of(f"one {index}", 2), first, rows=(2 * index, 2 * index + 1))
            two.start_store(keys_of(f"two {index}", 1), second, rows=(index,))
        one.wait_all()
        two.wait_all()
        assert [len(ended.job.keys) for ended in two.ended.values()] == [1] * 6

    def test_regions_are_kept_apart(self, new_bench: NewBench) -> None:
        """Each tier reads and writes its own rows; shapes may differ."""
        one, two = new_bench("engine-1"), new_bench("engine-2", geometry=RegionGeometry(4, (8192,), 1))
        mine, theirs = keys_of("mine", 3), keys_of("theirs", 3)
        one.put(mine, one.begin())
        two.put(theirs, two.begin())
        assert not one.wrong(one.get(mine, one.begin("back")))
        ended = two.get(theirs, two.begin("back"), (3, 1, 0))
        assert ended.good == theirs
        assert not two.wrong(ended)
        one.check_rows()
