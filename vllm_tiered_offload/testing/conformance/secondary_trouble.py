"""A medium that fails, loses, lies or hangs; and the scheduler thread, which must not feel any of it."""

import pytest

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import LookupResult, ReqContext
from vllm_tiered_offload.testing.conformance.caller import call_bounded
from vllm_tiered_offload.testing.conformance.material import content, keys_of
from vllm_tiered_offload.testing.conformance.secondary_bench import SecondaryBench
from vllm_tiered_offload.testing.conformance.secondary_fixtures import Faults, NewBench, SecondaryTierFixtures


def _every_call(bench: SecondaryBench) -> None:
    """Each method of the scheduler thread, with something to do."""
    req, keys = bench.begin("every call"), keys_of("every call", 12)
    bench.put(keys, req)
    unknown = keys_of("unknown", 200)
    bench.resolve([*keys, *unknown], req)
    bench.call("touch", bench.tier.touch, keys, req)
    bench.get([*keys[:6], *unknown[:2]], req)
    bench.finish(req)
    bench.call("has_pending_work", bench.tier.has_pending_work)
    bench.call("get_stats", bench.tier.get_stats)
    bench.call("take_events", bench.tier.take_events)


def _move_large_rows(bench: SecondaryBench, req: ReqContext, name: str) -> None:
    """Stores, loads and long questions."""
    keys, unknown = keys_of(name, 8), keys_of(f"{name}, unknown", 2000)
    for part in (keys[:4], keys[4:]):
        bench.wait(bench.start_store(part, req))
    bench.wait(*[bench.submit([key], [row], load=True, req=req) for row, key in enumerate(keys)])
    bench.resolve(unknown, req)
    bench.call("touch", bench.tier.touch, unknown, req)
    bench.call("get_stats", bench.tier.get_stats)


class DeadlineTests(SecondaryTierFixtures):
    """No call on the scheduler thread waits for a medium."""

    def test_no_file_and_no_socket_on_the_calling_thread(self, new_bench: NewBench) -> None:
        """An audit hook refuses them there, while the tier's own threads may do what they like."""
        bench = new_bench(refuse_io=True, events=True)
        _every_call(bench)
        assert not bench.call.forbidden, "on the scheduler thread: " + "; ".join(bench.call.forbidden)

    def test_no_call_holds_up_the_calling_thread(self, new_bench: NewBench, call_limit: float) -> None:
        """Large rows, so that moving them on the calling thread shows. What is slow three times is no accident."""
        bench = new_bench(geometry=RegionGeometry(8, (1 << 20,), 1))
        req = bench.begin()
        bench.warm_up(req)
        slow: dict[str, float] = {}
        for turn in range(3):
            bench.call.slowest.clear()
            _move_large_rows(bench, req, f"large {turn}")
            now = bench.call.slower_than(call_limit)
            slow = {name: taken for name, taken in now.items() if turn == 0 or name in slow}
            if not slow:
                return
        pytest.fail(f"calls on the scheduler thread that take longer than {call_limit:g} s: {slow}")

    def test_drain_of_an_idle_tier(self, bench: SecondaryBench, req: ReqContext) -> None:
        assert bench.drain(0.0) is True
        bench.put(keys_of("idle", 2), req)
        assert bench.drain(0.0) is True

    def test_drain_ends_with_the_jobs(self, bench: SecondaryBench, req: ReqContext) -> None:
        """It waits for them, takes no result away, and says that all have ended."""
        jobs = [
            bench.start_store(keys_of(f"drained {index}", 2), req, rows=(2 * index, 2 * index + 1))
            for index in (0, 1, 2)
        ]
        assert bench.drain(bench.limits.patience) is True
        bench.poll()
        assert not [job_id for job_id in jobs if job_id in bench.open], "drained, but a job has no result"

    def test_drain_without_time_is_a_question(self, bench: SecondaryBench, req: ReqContext) -> None:
        """It answers at once, and its word is good: True means that no result is missing."""
        for index in range(8):
            bench.start_store(keys_of(f"asked {index}", 2), req, rows=(2 * index, 2 * index + 1))
        if bench.drain(0.0):
            bench.poll()
            assert not bench.open
        bench.wait_all()


class FaultTests(SecondaryTierFixtures):
    """Needs the fixture `faults`."""

    def test_damaged_chunk_fails_alone(self, bench: SecondaryBench, req: ReqContext, trouble: Faults) -> None:
        """Wrong bytes are found before they count as loaded, and the chunk is a miss afterwards."""
        keys = keys_of("damaged", 4)
        bench.put(keys, req)
        trouble.damage(bench.tier, keys[1])
        ended = bench.get(keys, req)
        assert ended.good == [keys[0], *keys[2:]]
        assert not bench.wrong(ended)
        assert bench.resolve([keys[1]], req) == [LookupResult.MISS], "the next request would fail on it again"
        bench.check_rows()

    def test_lost_chunk_fails_alone(self, bench: SecondaryBench, req: ReqContext, trouble: Faults) -> None:
        keys = keys_of("lost", 4)
        bench.put(keys, req)
        trouble.lose(bench.tier, keys[2])
        ended = bench.get(keys, req)
        assert ended.good == [*keys[:2], keys[3]]
        assert not bench.wrong(ended)
        assert bench.resolve([keys[2]], req) == [LookupResult.MISS], "the next request would fail on it again"

    def test_lost_chunk_can_be_stored_again(self, bench: SecondaryBench, req: ReqContext, trouble: Faults) -> None:
        keys = keys_of("lost and found", 2)
        bench.put(keys, req)
        trouble.lose(bench.tier, keys[0])
        bench.get(keys, req)
        bench.put(keys, req)
        ended = bench.get(keys, req)
        assert ended.good == keys
        assert not bench.wrong(ended)

    @pytest.mark.parametrize("load", [False, True], ids=["store", "load"])
    def test_broken_medium_fails_jobs(
        self, bench: SecondaryBench, req: ReqContext, trouble: Faults, load: bool
    ) -> None:
        """Each job ends, as a failure; no method raises; and when the medium works again, so does the tier."""
        keys, other = keys_of("before", 3), keys_of("during", 3)
        bench.put(keys, req)
        with trouble.broken(bench.tier):
            job_id = bench.submit(keys, load=True, req=req) if load else bench.start_store(other, req)
            [ended] = bench.wait(job_id)
            assert ended.good == []
            bench.lookup([*keys, *other], req)
            bench.poll()
        bench.put(other, req)
        assert bench.get(other, req).good == other
        bench.check_rows()

    def test_broken_store_leaves_no_hit(self, bench: SecondaryBench, req: ReqContext, trouble: Faults) -> None:
        keys = keys_of("half written", 2)
        bench.warm_up(req)
        with trouble.broken(bench.tier):
            bench.wait(bench.start_store(keys, req))
        assert bench.resolve(keys, req) == [LookupResult.MISS] * 2
        assert bench.get(keys, req).good == []

    def test_hanging_medium_holds_up_nobody(self, new_bench: NewBench, trouble: Faults) -> None:
        """The scheduler thread goes on, drain keeps to its time, and the late jobs end once the medium is back."""
        bench = new_bench()
        req, keys, other = bench.begin(), keys_of("here", 2), keys_of("hung", 2)
        bench.put(keys, req)
        for row, key in enumerate(other, start=4):
            bench.write(row, content(key, bench.geometry.row_bytes))
        jobs: list[int] = []

        def go_on() -> None:
            jobs.append(bench.submit(keys, (0, 1), load=True, req=req))
            jobs.append(bench.submit(other, (4, 5), load=False, req=req))
            bench.lookup([*keys, *other], req)
            bench.finish(req)
            bench.watch()

        with trouble.hanging(bench.tier):
            call_bounded("a call on the scheduler thread", go_on, bench.limits.patience)
            assert bench.drain(0.2) is False
            assert set(bench.open) == set(jobs), "a job that hangs has a result: its rows would be given away"
        bench.wait(*jobs)

    def test_shutdown_while_the_medium_hangs(self, new_bench: NewBench, trouble: Faults) -> None:
        """Within `shutdown_limit`: the engine gives up on the tier, not the other way round."""
        bench = new_bench()
        req, keys = bench.begin(), keys_of("hung for good", 2)
        bench.put(keys, req)
        with trouble.hanging(bench.tier):
            bench.submit(keys, (0, 1), load=True, req=req)
            bench.watch()
            bench.shutdown()
