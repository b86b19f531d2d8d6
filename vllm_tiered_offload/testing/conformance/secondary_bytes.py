"""Bytes come back as they were, or not at all, and no other row changes."""

import pytest

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import LookupResult, ReqContext
from vllm_tiered_offload.testing.conformance.material import content, keys_of, make_fingerprint
from vllm_tiered_offload.testing.conformance.secondary_bench import SecondaryBench
from vllm_tiered_offload.testing.conformance.secondary_fixtures import NewBench, SecondaryTierFixtures


class BytesTests(SecondaryTierFixtures):
    """Round trips, neighbours, partial success."""

    def test_bytes_come_back(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Into other rows than they came from, in another order."""
        keys = keys_of("round trip", 6)
        bench.put(keys, req)
        ended = bench.get(keys[::-1], req, (9, 2, 15, 7, 0, 4))
        assert ended.good == keys[::-1]
        assert not bench.wrong(ended)

    def test_neighbour_rows_stay(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Rows below, above and between those of the jobs."""
        keys = keys_of("neighbours", 3)
        bench.warm_up(req)
        bench.wait(bench.start_store(keys, req, rows=(1, 3, 5)))
        bench.check_rows()
        bench.put(keys, req)
        bench.get(keys, req, (1, 3, 5))
        bench.check_rows()

    def test_store_only_reads_its_rows(self, bench: SecondaryBench, req: ReqContext) -> None:
        keys = keys_of("read only", 4)
        bench.warm_up(req)
        bench.wait(bench.start_store(keys, req))
        bench.check_rows()

    def test_no_row_is_touched_after_its_result(self, bench: SecondaryBench, req: ReqContext) -> None:
        """With the result the rows are somebody else's: written late, they would carry wrong bytes under a good key."""
        keys = keys_of("late", 4)
        bench.put(keys, req)
        bench.get(keys, req)
        bench.get([*keys[2:], *keys_of("late and absent", 2)], req, (8, 9, 10, 11))
        bench.watch()
        bench.check_rows()

    def test_stored_rows_may_be_overwritten_after_the_result(self, bench: SecondaryBench, req: ReqContext) -> None:
        """A tier that goes on reading stores somebody else's bytes."""
        keys = keys_of("read late", 4)
        bench.warm_up(req)
        [ended] = bench.wait(bench.start_store(keys, req))
        for row in range(4):
            bench.seal(row)
        bench.watch()
        again = bench.get(ended.good, req, range(8, 8 + len(ended.good)))
        assert not bench.wrong(again)

    def test_absent_key_fails_alone(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Good keys of the same batch are kept (D6)."""
        present, absent = keys_of("present", 3), keys_of("absent", 2)
        bench.put(present, req)
        ended = bench.get([present[0], absent[0], present[1], absent[1], present[2]], req)
        assert ended.good == present
        assert not bench.wrong(ended)

    def test_absent_key_is_never_called_loaded(self, bench: SecondaryBench, req: ReqContext) -> None:
        """The lookup may be old by the time of the load."""
        ended = bench.get(keys_of("nowhere", 2), req)
        assert ended.good == []
        bench.check_rows()

    def test_absent_key_stays_a_miss_after_a_failed_load(self, bench: SecondaryBench, req: ReqContext) -> None:
        keys = keys_of("still nowhere", 2)
        bench.get(keys, req)
        assert bench.resolve(keys, req) == [LookupResult.MISS] * 2

    def test_key_stored_twice(self, bench: SecondaryBench, req: ReqContext) -> None:
        """One after the other, and as a part of a larger job."""
        keys = keys_of("twice", 4)
        bench.put(keys[:2], req)
        bench.put(keys[:2], req)
        bench.put(keys, req)
        ended = bench.get(keys, req)
        assert ended.good == keys
        assert not bench.wrong(ended)

    @pytest.mark.parametrize("hash_bytes", [32, 16, 8, 64])
    def test_keys_of_any_length(self, bench: SecondaryBench, req: ReqContext, hash_bytes: int) -> None:
        """sha256 and 128-bit hashes are vLLM's today."""
        keys = keys_of("length", 3, hash_bytes=hash_bytes)
        bench.put(keys, req)
        ended = bench.get(keys, req)
        assert ended.good == keys
        assert not bench.wrong(ended)

    def test_groups_are_told_apart(self, bench: SecondaryBench, req: ReqContext) -> None:
        """The same hash in two KV groups names two chunks."""
        first, second = keys_of("groups", 3), keys_of("groups", 3, group=1)
        bench.put(first, req)
        assert bench.resolve(second, req) == [LookupResult.MISS] * 3
        bench.put(second, req)
        ended = bench.get([*second, *first], req)
        assert ended.good == [*second, *first]
        assert not bench.wrong(ended)

    @pytest.mark.parametrize(
        "shape",
        [RegionGeometry(4, (5000, 1000), 2), RegionGeometry(4, (1 << 20,), 16), RegionGeometry(1, (1,), 1)],
        ids=["two ranks", "1 MiB", "one row"],
    )
    def test_rows_of_any_shape(self, new_bench: NewBench, shape: RegionGeometry) -> None:
        """The whole row is the chunk: all ranks' slots, padding too."""
        bench = new_bench(geometry=shape)
        req, keys = bench.begin(), keys_of("shape", shape.num_rows)
        bench.put(keys, req)
        ended = bench.get(keys, req)
        assert ended.good == keys
        assert not bench.wrong(ended)

    def test_bytes_that_compress_badly_and_well(self, bench: SecondaryBench, req: ReqContext) -> None:
        """Zeros, ones, and noise."""
        size = bench.geometry.row_bytes
        keys = keys_of("patterns", 3)
        patterns = dict(zip(keys, (bytes(size), b"\xff" * size, content(keys[2], size)), strict=True))
        bench.warm_up(req)
        for row, key in enumerate(keys):
            bench.write(row, patterns[key])
        [stored] = bench.wait(bench.submit(keys, load=False, req=req))
        assert stored.good == keys
        assert bench.get(keys, req, (4, 5, 6)).loaded == patterns

    def test_other_fingerprint_is_another_namespace(self, new_bench: NewBench) -> None:
        """The same keys of another model are other bytes (D5)."""
        keys = keys_of("namespace", 3)
        one = new_bench("engine-1")
        one.put(keys, one.begin())
        two = new_bench("engine-2", fingerprint=make_fingerprint(model="another"))
        req = two.begin()
        assert two.resolve(keys, req) == [LookupResult.MISS] * 3
        assert two.get(keys, req).good == []
