"""Restart, reset and the end."""

import threading

from vllm_tiered_offload.contract.jobs import LookupResult, ReqContext
from vllm_tiered_offload.testing.conformance.caller import call_bounded
from vllm_tiered_offload.testing.conformance.material import Support, keys_of, require
from vllm_tiered_offload.testing.conformance.secondary_bench import SecondaryBench
from vllm_tiered_offload.testing.conformance.secondary_fixtures import NewBench, NewTier, SecondaryTierFixtures

HIT, MISS = LookupResult.HIT, LookupResult.MISS


class RestartTests(SecondaryTierFixtures):
    """What is left for the next engine, and for the one beside."""

    def test_chunks_survive_a_restart(self, new_bench: NewBench, survives_restart: Support) -> None:
        require(survives_restart, "surviving a restart")
        keys = keys_of("kept", 4)
        before = new_bench("engine-1")
        before.put(keys, before.begin())
        before.close()
        after = new_bench("engine-2")
        req = after.begin()
        assert after.resolve(keys, req) == [HIT] * 4
        ended = after.get(keys, req)
        assert ended.good == keys
        assert not after.wrong(ended)

    def test_tier_works_after_another_ones_end(self, new_bench: NewBench) -> None:
        """Whatever a shutdown leaves behind must not be in the next one's way."""
        keys = keys_of("next", 3)
        before = new_bench("engine-1")
        before.put(keys[:2], before.begin())
        before.close()
        after = new_bench("engine-1")
        req = after.begin()
        after.put(keys, req)
        assert not after.wrong(after.get(keys, req))

    def test_live_tiers_share(self, new_bench: NewBench, shares_between_instances: Support) -> None:
        """Also a key that the second one has asked for in vain before."""
        require(shares_between_instances, "sharing between live instances")
        keys = keys_of("shared", 3)
        one, two = new_bench("engine-1"), new_bench("engine-2")
        req = two.begin()
        assert two.resolve(keys, req) == [MISS] * 3
        one.put(keys, one.begin())
        two.wait_until(lambda: two.resolve(keys, req) == [HIT] * 3, "finding what the other instance stored")
        ended = two.get(keys, req)
        assert ended.good == keys
        assert not two.wrong(ended)

    def test_shutdown_of_one_leaves_the_other(self, new_bench: NewBench) -> None:
        one, two = new_bench("engine-1"), new_bench("engine-2")
        req, keys = two.begin(), keys_of("beside", 3)
        two.put(keys, req)
        one.close()
        ended = two.get(keys, req)
        assert ended.good == keys
        assert not two.wrong(ended)

    def test_bytes_stored_after_a_reset_reach_nobody_else(self, new_bench: NewBench) -> None:
        """A reset may mean new weights, which no fingerprint tells: only this process may see what follows (L6)."""
        keys = keys_of("private", 3)
        one = new_bench("engine-1")
        req = one.begin()
        one.put(keys, req, salt="old weights")
        one.reset()
        one.put(keys, req, salt="new weights")
        beside = new_bench("engine-2")
        assert not beside.wrong(beside.get(keys, beside.begin()), salt="old weights")
        one.close()
        after = new_bench("engine-3")
        assert not after.wrong(after.get(keys, after.begin()), salt="old weights")


class ResetTests(SecondaryTierFixtures):
    """reset: forget every key (L6). Called from another thread, with jobs in flight or without."""

    def test_reset_forgets(self, bench: SecondaryBench, req: ReqContext) -> None:
        """For lookups and for loads: a lookup from before the reset may still lead to a load."""
        keys = keys_of("forgotten", 4)
        bench.put(keys, req)
        assert bench.resolve(keys, req) == [HIT] * 4
        bench.reset()
        assert bench.resolve(keys, req) == [MISS] * 4
        assert bench.get(keys, req).good == []

    def test_store_after_a_reset(self, bench: SecondaryBench, req: ReqContext) -> None:
        """The same keys with other bytes: the new ones come back. Requests live on through a reset."""
        keys = keys_of("anew", 4)
        bench.put(keys, req, salt="old weights")
        bench.reset()
        bench.put(keys, req, salt="new weights")
        ended = bench.get(keys, req)
        assert ended.good == keys
        assert not bench.wrong(ended, salt="new weights")
        bench.finish(req)

    def test_jobs_in_flight_at_a_reset_end_once(self, bench: SecondaryBench, req: ReqContext) -> None:
        """As failed, unless they had ended before; in any case once, and nothing of them is there afterwards."""
        stored, late = keys_of("stored", 4), keys_of("late", 8)
        bench.put(stored, req)
        for index, key in enumerate(late):
            bench.start_store([key], req, rows=(index,))
        for index, key in enumerate(stored):
            bench.submit([key], (12 + index,), load=True, req=req)
        bench.reset()
        bench.wait_all()
        bench.watch()
        assert bench.resolve([*stored, *late], req) == [MISS] * 12
        bench.check_rows()

    def test_late_store_does_not_replace_a_newer_one(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Old bytes of a store from before the reset never come back under a key that was stored after it."""
        keys = keys_of("raced", 4)
        bench.warm_up(req)
        for index, key in enumerate(keys):
            bench.start_store([key], req, rows=(index,), salt="old weights")
        bench.reset()
        for index, key in enumerate(keys):
            bench.start_store([key], req, rows=(8 + index,), salt="new weights")
        bench.wait_all()
        bench.put(keys, req, salt="new weights")
        assert not bench.wrong(bench.get(keys, req), salt="new weights")

    def test_reset_after_reset(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Of an empty tier, and again and again."""
        keys = keys_of("thrice", 2)
        bench.reset()
        for salt in ("one", "two", "three"):
            bench.put(keys, req, salt=salt)
            assert not bench.wrong(bench.get(keys, req), salt=salt)
            bench.reset()
        assert bench.resolve(keys, req) == [MISS, MISS]

    def test_drain_and_reset_as_the_engine_does(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Drain first, then reset; results come afterwards."""
        for index in range(4):
            bench.start_store(keys_of(f"drained {index}", 2), req, rows=(2 * index, 2 * index + 1))
        assert bench.drain(bench.limits.patience) is True
        bench.reset()
        bench.wait_all()
        assert bench.resolve(keys_of("drained 0", 2), req) == [MISS, MISS]


class ShutdownTests(SecondaryTierFixtures):
    """shutdown: bounded, more than once, at any moment. Called from another thread."""

    def test_shutdown_twice(self, bench: SecondaryBench, req: ReqContext) -> None:
        bench.put(keys_of("end", 2), req)
        bench.shutdown()
        bench.shutdown()

    def test_shutdown_before_the_region(self, new_tier: NewTier, shutdown_limit: float) -> None:
        """An engine may fail before there is a region."""
        tier = new_tier()
        call_bounded("shutdown", tier.shutdown, shutdown_limit)
        call_bounded("shutdown", tier.shutdown, shutdown_limit)

    def test_shutdown_with_jobs_in_flight(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Afterwards no row is touched (the region goes away), and no job has two results."""
        keys = keys_of("cut short", 8)
        bench.put(keys, req)
        for index, key in enumerate(keys):
            bench.submit([key], (index,), load=True, req=req)
            bench.start_store(keys_of(f"cut short {index}", 1), req, rows=(8 + index,))
        bench.shutdown()
        for row in range(8):
            bench.seal(row)
        rows_at_the_end = [bytes(row) for row in bench.rows]
        threading.Event().wait(bench.limits.settle)
        assert [bytes(row) for row in bench.rows] == rows_at_the_end, "a row was written after shutdown came back"

    def test_results_may_be_taken_after_shutdown(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Ones that are missing may stay away, but a job never ends twice."""
        for index in range(4):
            bench.start_store(keys_of(f"last {index}", 1), req, rows=(index,))
        bench.shutdown()
        for result in [*bench.tier.get_finished_jobs(), *bench.tier.get_finished_jobs()]:
            bench._take(result)

    def test_no_thread_is_left(self, new_bench: NewBench) -> None:
        """A thread that is no daemon keeps the process alive."""
        before = set(threading.enumerate())
        bench = new_bench()
        bench.put(keys_of("threads", 2), bench.begin())
        bench.close()

        def left() -> list[threading.Thread]:
            return [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]

        for thread in left():
            thread.join(bench.limits.patience)
        assert not left(), f"threads are left: {left()}"
