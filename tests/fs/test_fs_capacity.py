"""The bytes of a root: counted, whoever changes them, and never more than they may be."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fs_kit import FRAME, HIT, MISS, REQ, Bench, FaultyFiles, HandLane, chunk_files, fingerprint, inline_lanes, keys_of

from vllm_tiered_offload.contract.jobs import JobMetadata, OffloadPolicy, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.settings import SettingsError
from vllm_tiered_offload.tiers.cpu.policies.lru import LruPolicy
from vllm_tiered_offload.tiers.fs import economy
from vllm_tiered_offload.tiers.fs.economy import Sightings, WriteBudget
from vllm_tiered_offload.tiers.fs.scan import IDLE_SECONDS
from vllm_tiered_offload.tiers.registry import EVICTION_POLICIES

USED = "tier_bytes_used|tier=fs"


def bytes_in(root: Path) -> int:
    return sum(path.stat().st_size for path in chunk_files(root))


def age(paths: Sequence[Path], seconds: float) -> None:
    for path in paths:
        os.utime(path, (time.time() - seconds,) * 2)


def rescan(*benches: Bench) -> None:
    """The time for the next scan has come, and it is over."""
    for bench in benches:
        bench.clock.now += bench.tier.settings.scan_period + 1
        bench.tier.on_schedule_end()
        bench.tier.on_schedule_end()
        bench.tier.check()


def store_as(bench: Bench, request: str, keys: Sequence[OffloadKey]) -> int:
    """How many of one request's chunks are there afterwards."""
    bench.tier.submit_store(JobMetadata(1000, tuple(keys), tuple(range(len(keys))), False, ReqContext(request)))
    assert bench.tier.drain(10)
    [result] = bench.tier.get_finished_jobs()
    return len(result.successful_keys)


# What changes behind our back


def test_case_24_a_scan_notices_what_vanished_and_what_appeared(tmp_path: Path) -> None:
    """Case 24 without a store in between. Mutation: a scan that tells only of what is there."""
    bench, other = Bench(tmp_path, capacity=9 * FRAME, events=True), Bench(tmp_path, engine_id="other")
    keys, more = keys_of("a", 4), keys_of("b", 3)
    bench.store(keys)
    bench.tier.take_events()
    for key in keys[:3]:
        bench.path(key).unlink()
    other.store(more)
    rescan(bench)
    assert bench.stat(USED) == bytes_in(tmp_path) == 4 * FRAME
    assert bench.tier.lookup([*keys, *more], REQ) == [MISS] * 3 + [HIT] * 4
    [event] = bench.tier.take_events()
    assert (sorted(event.keys), event.stored) == (sorted(keys[:3]), False)
    bench.assert_idle()


def test_a_directory_dropped_as_a_whole_is_noticed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    keys = keys_of("a", 4)
    bench.store(keys)
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    rescan(bench)
    assert bench.stat(USED) == 0
    assert bench.tier.lookup(keys, REQ) == [MISS] * 4


def test_a_scan_of_what_is_known_asks_for_names_alone(tmp_path: Path) -> None:
    """A million files are looked at every minute. Mutation: a stat for each name."""
    bench = Bench(tmp_path)
    bench.store(keys_of("a", 8))
    bench.files.calls.clear()
    rescan(bench)
    assert bench.files.calls.count("info") == 0
    assert 0 < bench.files.calls.count("listdir") <= 12


def test_what_a_start_finds_goes_in_the_order_of_its_last_use(tmp_path: Path) -> None:
    keys, new = keys_of("a", 6), keys_of("b", 3)
    first = Bench(tmp_path)
    first.store(keys)
    for number, key in enumerate(keys):
        age([first.path(key)], 10 ** (number % 3 + 2))
    bench = Bench(tmp_path, capacity=6 * FRAME)
    store_as(bench, "new", new)
    there = {key for key in keys if bench.path(key).exists()}
    assert there >= {keys[0], keys[3]}, "used most recently"
    assert not there & {keys[2], keys[5]}, "used longest ago"


# Several engines and generations in one root


def test_several_engines_come_back_under_the_capacity_within_a_scan(tmp_path: Path) -> None:
    benches = [Bench(tmp_path, capacity=8 * FRAME, engine_id=f"engine-{number}") for number in range(3)]
    for number, bench in enumerate(benches):
        store_as(bench, "r", keys_of(f"{number}-", 6))
    assert bytes_in(tmp_path) > 8 * FRAME, "none knew of the others"
    rescan(*benches)
    assert bytes_in(tmp_path) <= 8 * FRAME
    rescan(*benches)
    for bench in benches:
        assert bench.stat(USED) == bytes_in(tmp_path) > 0
        bench.assert_idle()


def test_what_another_model_left_counts_and_goes_when_it_is_idle(tmp_path: Path) -> None:
    """Mutations: not counting it exceeds the capacity; not making room stores nothing for ever."""
    old = Bench(tmp_path, model=fingerprint(revision="old"), num_rows=40)
    old.store(keys_of("old", 40))
    bench = Bench(tmp_path, capacity=40 * FRAME)
    assert bench.stat("fs_elsewhere_bytes") == bench.stat(USED) == 40 * FRAME
    assert store_as(bench, "r", keys_of("a", 4)) == 0, "somebody may be using that"
    assert len(chunk_files(tmp_path)) == 40
    oldest = [old.path(key) for key in keys_of("old", 2)]
    age(oldest, 3 * IDLE_SECONDS)
    age([old.path(key) for key in keys_of("old", 38, start=2)], 2 * IDLE_SECONDS)
    rescan(bench)
    assert not any(path.exists() for path in oldest)
    assert len(chunk_files(tmp_path)) == 38
    assert store_as(bench, "r", keys_of("a", 4)) == 2
    assert bytes_in(tmp_path) == bench.stat(USED) == 40 * FRAME
    rescan(bench)
    assert bytes_in(tmp_path) <= 38 * FRAME
    bench.assert_idle()


def test_after_a_reset_the_shared_generation_counts_and_makes_room(tmp_path: Path) -> None:
    bench = Bench(tmp_path, capacity=8 * FRAME)
    bench.store(keys_of("a", 8))
    shared = Path(bench.tier.namespace_path)
    bench.tier.reset()
    new = keys_of("b", 2)
    assert store_as(bench, "r", new) == 0
    age(chunk_files(shared), 2 * IDLE_SECONDS)
    rescan(bench)
    assert store_as(bench, "r", new[:1]) == 1
    assert bytes_in(tmp_path) == bench.stat(USED) == 8 * FRAME
    bench.clock.now += 30
    assert bench.tier.lookup(new, REQ) == [HIT, MISS], "what nobody else writes to needs no question"
    bench.assert_idle()


def test_the_quarantine_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path, capacity=4 * FRAME, on_corrupt="quarantine")
    keys = keys_of("a", 4)
    bench.store(keys)
    data = bytearray(bench.path(keys[0]).read_bytes())
    data[5000] ^= 1
    bench.path(keys[0]).write_bytes(data)
    assert not bench.load(keys).success
    assert bench.stat(USED) == 4 * FRAME == bytes_in(tmp_path)
    assert bench.stat("fs_elsewhere_bytes") == FRAME
    store_as(bench, "r", keys_of("b", 1))
    assert bytes_in(tmp_path) == 4 * FRAME
    rescan(bench)
    assert bench.stat("fs_elsewhere_bytes") == FRAME
    bench.assert_idle()


def test_a_directory_of_somebody_else_that_cannot_be_read_stops_nothing(tmp_path: Path) -> None:
    files = FaultyFiles()
    other = Bench(tmp_path, model=fingerprint(model="other"))
    other.store(keys_of("o", 1))
    files.fail("listdir", 13, match=other.tier.namespace_path)
    bench = Bench(tmp_path, files=files, capacity=4 * FRAME)
    assert store_as(bench, "r", keys_of("a", 4)) == 4


def test_what_changes_during_a_scan_is_believed_over_it(tmp_path: Path) -> None:
    """Chunks go before the scan lists the directory and come again after it. Mutation: `_changed` is not kept."""
    background = HandLane()
    keys, late = keys_of("a", 4), keys_of("b", 2)
    bench = Bench(tmp_path, capacity=4 * FRAME, lanes=inline_lanes(background=background))
    background.run_all()
    bench.tier.on_schedule_end()
    store_as(bench, "a", keys)

    def evict_some(_: object) -> None:
        bench.files.rules.clear()
        store_as(bench, "b", late)

    bench.clock.now += 61
    bench.tier.on_schedule_end()
    bench.files.rules["listdir"] = evict_some
    background.run_all()
    assert [bench.path(key).exists() for key in keys] == [True, True, False, False]
    store_as(bench, "c", keys[2:])
    bench.tier.on_schedule_end()
    there = [key for key in (*keys, *late) if bench.path(key).exists()]
    assert bench.tier.lookup(there, REQ) == [HIT] * 4
    assert bench.stat(USED) == bytes_in(tmp_path) == 4 * FRAME
    bench.assert_idle()


# Policy, age, economy


class Newest(LruPolicy):
    """Evicts what came last."""

    def evict(self, count, is_pinned):
        victims = []
        for key in reversed(list(self._order._access_of)):
            if len(victims) < count and not is_pinned(key):
                victims.append(key)
        self.remove(victims)
        return victims


def test_the_eviction_policy_is_found_by_name(tmp_path: Path) -> None:
    keys = keys_of("a", 5)
    with EVICTION_POLICIES.registered("newest", Newest):
        bench = Bench(tmp_path, capacity=4 * FRAME, eviction_policy="newest")
        for number, key in enumerate(keys):
            store_as(bench, str(number), [key])
        assert [bench.path(key).exists() for key in keys] == [True, True, True, False, True]
        with pytest.raises(
            SettingsError, match=r"tiers\[0\].eviction_policy: unknown eviction policy 'newst'; did you"
        ):
            Bench(tmp_path, eviction_policy="newst")
    arc = Bench(tmp_path, capacity=4 * FRAME, eviction_policy="arc", engine_id="arc")
    assert store_as(arc, "r", keys_of("b", 4)) == 4
    arc.assert_idle()


def test_a_chunk_older_than_the_ttl_is_not_used_and_goes(tmp_path: Path) -> None:
    """Known or not, before a scan and by it. Mutations: no look at the age in a read, in a question, in a scan."""
    bench = Bench(tmp_path, ttl=100.0)
    young, old, older, unknown = keys_of("a", 4)
    bench.store([young, old, older])
    age([bench.path(old), bench.path(older)], 101)
    assert bench.load([young, old]).successful_keys == (young,)
    assert bench.failures("load") == {"expired": 1}
    assert bench.stat("fs_discarded_files_total") == 0
    assert not bench.path(old).exists()
    assert bench.tier.lookup([young, old], REQ) == [HIT, MISS]
    rescan(bench)
    assert not bench.path(older).exists()
    assert bench.stat(USED) == bytes_in(tmp_path) == FRAME
    bench.files.fail("info", 5)
    rescan(bench)
    bench.files.rules.clear()
    assert bench.tier.lookup([young], REQ) == [HIT], "trouble of the machine says nothing about a file"
    Bench(tmp_path, engine_id="other").store([unknown])
    age([bench.path(unknown)], 101)
    bench.clock.now += 30
    assert bench.lookup([unknown]) == [MISS]
    assert bench.store([unknown]).success
    assert bench.lookup([unknown]) == [HIT], "written again"
    bench.assert_idle()


def test_a_chunk_is_stored_when_enough_requests_had_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, store_threshold=3)
    keys = keys_of("a", 2)
    assert bench.tier.on_new_request(REQ).policy is OffloadPolicy.REQUEST_LEVEL
    assert bench.store(keys).skipped_keys == tuple(keys), "no failure"
    assert [store_as(bench, request, keys) for request in "23"] == [0, 2]
    assert bench.stat("fs_skipped_stores_total|reason=threshold") == 4
    assert store_as(bench, "4", keys) == 2
    assert Bench(tmp_path).tier.on_new_request(REQ).policy is OffloadPolicy.BLOCK_LEVEL
    bench.assert_idle()


def test_sightings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(economy, "SIGHTINGS_KEPT", 2)
    sightings, (a, b, c) = Sightings(2), keys_of("k", 3)
    assert not any(sightings.enough(key) for key in (a, b, c))
    assert len(sightings) == 2
    assert not sightings.enough(a), "forgotten"
    assert sightings.enough(c)


def test_no_more_is_written_in_a_day_than_may_be(tmp_path: Path) -> None:
    """Mutation: a budget that is not given back for what was not written."""
    bench = Bench(tmp_path, write_bytes_per_day=24 * 3 * FRAME)
    assert store_as(bench, "a", keys_of("a", 5)) == 3
    assert bench.stat("fs_skipped_stores_total|reason=budget") == 2
    bench.clock.now += 1200
    bench.files.fail("pwritev", 5)
    assert store_as(bench, "b", keys_of("b", 1)) == 0
    bench.files.rules.clear()
    Bench(tmp_path, engine_id="other").store(keys_of("d", 1))
    bench.clock.now += 30
    assert store_as(bench, "d", keys_of("d", 1)) == 1, "nothing had to be written"
    assert store_as(bench, "c", keys_of("c", 2)) == 1
    bench.assert_idle()


def test_a_budget_is_spread_over_the_day() -> None:
    now = [0.0]
    budget = WriteBudget(2400, lambda: now[0])
    written = 0
    for minute in range(25 * 60):
        now[0] = minute * 60.0
        while budget.take(10):
            written += 10
    assert 2400 <= written <= 2400 * 26 / 24
