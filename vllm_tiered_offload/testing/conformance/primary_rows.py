"""Rows and who holds them: stores, loads, leases."""

import threading

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import LookupResult, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import Lease
from vllm_tiered_offload.testing.conformance.caller import call_bounded
from vllm_tiered_offload.testing.conformance.material import Support, keys_of, require
from vllm_tiered_offload.testing.conformance.primary_bench import PrimaryBench
from vllm_tiered_offload.testing.conformance.primary_fixtures import NewBench, NewPrimary, PrimaryTierFixtures

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


class RowTests(PrimaryTierFixtures):
    """absent -> being written -> readable, and the rows that go with it."""

    def test_everything_misses_before_the_region(self, new_primary: NewPrimary) -> None:
        tier = new_primary(8, events=False)
        req = ReqContext("early")
        tier.on_new_request(req)
        assert tier.num_rows == 0
        assert tier.lookup(keys_of("early", 2), req) == [MISS, MISS]
        tier.bind_region(RegionGeometry(8, (4096,), 1))
        assert tier.num_rows == 8
        tier.on_request_finished(req)

    def test_key_from_absent_to_readable(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = keys_of("life", 3)
        assert bench.lookup(keys) == [MISS] * 3
        prepared = bench.prepare_store(keys, req)
        assert prepared.keys == tuple(keys)
        assert bench.lookup(keys) == [PENDING] * 3
        bench.complete_store(prepared)
        assert bench.lookup(keys) == [HIT] * 3

    def test_failed_key_is_absent_and_its_row_free(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = keys_of("failed", 8)
        prepared = bench.prepare_store(keys, req)
        bench.complete_store(prepared, failed=keys[2:5])
        assert bench.present(keys) == [*keys[:2], *keys[5:]]
        assert bench.prepare_store(keys[2:5], req).keys == tuple(keys[2:5])
        assert bench.present(keys) == [*keys[:2], *keys[5:]], "rows of failed keys were not used again"

    def test_present_and_pending_keys_get_no_row(self, bench: PrimaryBench, req: ReqContext) -> None:
        """They count as accepted: nobody has to offer them again."""
        keys = keys_of("mixed", 5)
        bench.put(keys[:2], req)
        first = bench.prepare_store(keys[2:3], req)
        second = bench.prepare_store(keys, bench.begin("other"))
        assert first.keys == (keys[2],)
        assert second.keys == tuple(keys[3:])
        assert second.num_accepted == 5

    def test_nothing_new(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = keys_of("known", 3)
        bench.put(keys, req)
        again = bench.prepare_store(keys, req)
        assert (again.keys, again.block_ids, again.num_accepted) == ((), (), 3)
        bench.complete_store(again)

    def test_empty_calls(self, bench: PrimaryBench, req: ReqContext) -> None:
        assert bench.lookup([], req) == []
        assert bench.prepare_store([], req).keys == ()
        assert bench.prepare_load([], req).keys == ()
        assert bench.lease([]).keys == ()
        bench.tier.touch([], req)

    def test_unpinned_rows_are_counted(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = keys_of("counted", 4)
        assert bench.tier.num_unpinned_rows == 8
        prepared = bench.prepare_store(keys, req)
        assert bench.tier.num_unpinned_rows == 4
        bench.complete_store(prepared)
        assert bench.tier.num_unpinned_rows == 8
        load, lease = bench.prepare_load(keys[:2], req), bench.lease(keys[1:3])
        assert bench.tier.num_unpinned_rows == 5
        bench.complete_load(load)
        bench.release(lease)
        assert bench.tier.num_unpinned_rows == 8

    def test_completions_after_the_request_finished(self, bench: PrimaryBench) -> None:
        req, keys = bench.begin("brief"), keys_of("brief", 2)
        prepared = bench.prepare_store(keys, req)
        bench.finish(req)
        bench.complete_store(prepared)
        assert bench.lookup(keys) == [HIT, HIT]

    def test_events_tell_what_is_resident(self, new_bench: NewBench, reports_events: Support) -> None:
        require(reports_events, "residency events")
        bench = new_bench(4, events=True)
        resident: set[OffloadKey] = set()
        everything: list[OffloadKey] = []
        for name in ("one", "two", "three"):
            everything += bench.fill(name, 3)
            for event in bench.tier.take_events():
                assert event.medium == bench.tier.medium
                resident = resident | set(event.keys) if event.stored else resident - set(event.keys)
            assert resident == set(bench.present(everything))
        assert not bench.tier.take_events()


class PinTests(PrimaryTierFixtures):
    """Rows that a load reads (D8)."""

    def test_load_reads_where_the_store_wrote(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = keys_of("where", 4)
        stored = bench.put(keys, req)
        load = bench.prepare_load(keys, req)
        assert dict(zip(load.keys, load.block_ids, strict=True)) == dict(
            zip(stored.keys, stored.block_ids, strict=True)
        )

    def test_load_ends_before_the_first_gap(self, bench: PrimaryBench, req: ReqContext) -> None:
        """Absent or still being written: the answer is shorter, the load never fails."""
        keys = keys_of("gap", 5)
        bench.put([*keys[:2], keys[3]], req)
        assert bench.prepare_load(keys, req).keys == tuple(keys[:2])
        bench.prepare_store([keys[2]], req)
        assert bench.prepare_load(keys, req).keys == tuple(keys[:2])
        assert bench.prepare_load(keys[4:], req).keys == ()

    def test_pinned_rows_are_not_evicted(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = bench.fill("pinned", 4)
        bench.fill("others", 4)
        load = bench.prepare_load(keys, req)
        prepared = bench.prepare_store(keys_of("newcomer", 6), req)
        assert len(prepared.keys) == 4
        assert bench.present(keys) == keys
        bench.complete_load(load)

    def test_two_loads_of_one_row(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = bench.fill("popular", 8)
        first, second = bench.prepare_load(keys, req), bench.prepare_load(keys, bench.begin("other"))
        bench.complete_load(first)
        assert bench.tier.num_unpinned_rows == 0
        assert bench.prepare_store(keys_of("newcomer", 1), req).keys == ()
        bench.complete_load(second)
        assert bench.tier.num_unpinned_rows == 8

    def test_failed_key_of_a_load_is_a_miss(self, bench: PrimaryBench, req: ReqContext) -> None:
        """It is not looked up again in vain (D7); the others stay."""
        keys = bench.fill("unreadable", 4)
        bench.complete_load(bench.prepare_load(keys, req), failed=[keys[1]])
        assert bench.lookup(keys) == [HIT, MISS, HIT, HIT]
        assert bench.put(keys, req).keys == (keys[1],)

    def test_failure_of_one_load_spares_a_newer_row(self, bench: PrimaryBench, req: ReqContext) -> None:
        """Two loads fail on one key; it is stored again between their ends."""
        keys = bench.fill("twice", 1)
        first, second = bench.prepare_load(keys, req), bench.prepare_load(keys, req)
        bench.complete_load(first, failed=keys)
        bench.put(keys, req)
        bench.complete_load(second, failed=keys)
        assert bench.lookup(keys) == [HIT]


class LeaseTests(PrimaryTierFixtures):
    """Pins for peers: any thread, at any time."""

    def test_lease_from_another_thread(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = bench.fill("leased", 4)
        bench.fill("others", 4)
        lease = call_bounded("lease", lambda: bench.lease(keys), 5)
        assert lease.keys == tuple(keys)
        assert len(bench.prepare_store(keys_of("newcomer", 8), req).keys) == 4
        assert bench.present(keys) == keys
        call_bounded("release", lambda: bench.release(lease), 5)

    def test_lease_covers_the_readable_prefix(self, bench: PrimaryBench, req: ReqContext) -> None:
        keys = keys_of("prefix", 4)
        bench.put(keys[:2], req)
        bench.prepare_store(keys[2:3], req)
        assert bench.lease(keys).keys == tuple(keys[:2])
        assert bench.lease(keys[2:]).keys == ()

    def test_second_release_changes_nothing(self, bench: PrimaryBench) -> None:
        keys = bench.fill("released", 2)
        first, second = bench.lease(keys), bench.lease(keys)
        bench.release(first)
        bench.release(first)
        assert bench.tier.num_unpinned_rows == 6
        bench.release(second)
        assert bench.tier.num_unpinned_rows == 8

    def test_released_rows_can_be_had_again(self, bench: PrimaryBench, req: ReqContext) -> None:
        lease = bench.lease(bench.fill("released", 8))
        assert bench.prepare_store(keys_of("newcomer", 1), req).keys == ()
        bench.release(lease)
        assert len(bench.prepare_store(keys_of("newcomer", 8), req).keys) == 8

    def test_leased_rows_survive_a_reset(self, bench: PrimaryBench, req: ReqContext) -> None:
        """The key is forgotten, the peer may go on reading the row."""
        keys = bench.fill("read by a peer", 3)
        lease = bench.lease(keys)
        bench.tier.reset_cache()
        assert bench.lookup(keys) == [MISS] * 3
        assert len(bench.prepare_store(keys_of("newcomer", 8), req).keys) == 5
        bench.release(lease)

    def test_a_version_tells_what_a_row_held_from_what_it_holds(self, bench: PrimaryBench, req: ReqContext) -> None:
        """The same until the row is written again, be it for the same key, after an eviction, a failure or a reset."""

        def versions_of(keys: list[OffloadKey]) -> dict[int, int]:
            lease = bench.lease(keys)
            bench.release(lease)
            return dict(zip(lease.block_ids, lease.versions, strict=True))

        keys = bench.fill("first", 8)
        first = versions_of(keys)
        assert versions_of(keys[:3]) == {row: first[row] for row in list(first)[:3]}
        bench.complete_load(bench.prepare_load(keys, req))
        assert versions_of(keys) == first
        for write in (
            lambda: bench.complete_load(bench.prepare_load(keys, req), failed=keys),
            lambda: bench.fill("others", 8),
            bench.tier.reset_cache,
        ):
            before = versions_of(keys)
            write()
            bench.fill("first", 8)
            after = versions_of(keys)
            assert after.keys() == before.keys() == set(range(8))
            assert all(after[row] != before[row] for row in after)

    def test_peers_and_stores_at_once(self, bench: PrimaryBench, req: ReqContext) -> None:
        """While peers hold a lease, none of its rows is given to a store."""
        held: dict[int, Lease] = {}
        stop, errors = threading.Event(), []
        names = [keys_of(f"busy {index}", 3) for index in range(6)]

        def peer(number: int) -> None:
            try:
                for turn in range(number, 1 << 30):
                    if stop.is_set():
                        return
                    held[number] = lease = bench.tier.lease(names[turn % 6])
                    stop.wait(0.0005)
                    del held[number]  # before the release: what is in `held` is pinned
                    bench.tier.release(lease)
            except BaseException as error:
                errors.append(error)

        peers = [threading.Thread(target=peer, args=(number,), daemon=True) for number in range(3)]
        for thread in peers:
            thread.start()
        for index in range(300):
            prepared = bench.prepare_store(names[index % 6], req)
            # A lease in `held` now was there before the store or has got none of its rows, which are not readable yet.
            leased = {row for lease in list(held.values()) for row in lease.block_ids}
            bench.complete_store(prepared)
            assert not leased & set(prepared.block_ids)
        stop.set()
        for thread in peers:
            thread.join(5)
        assert not errors
