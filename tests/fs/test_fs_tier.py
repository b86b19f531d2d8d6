"""The filesystem tier on a healthy filesystem."""

import json
import os
import stat
import sys
import threading
import time
from pathlib import Path

import pytest
from fs_kit import (
    FRAME,
    HIT,
    MISS,
    REQ,
    RETRY,
    ROW,
    Bench,
    FaultyFiles,
    HandLane,
    chunk_files,
    content,
    fingerprint,
    inline_lanes,
    keys_of,
    make_rows,
    temporaries,
)

from vllm_tiered_offload.contract.jobs import JobMetadata, LookupResult
from vllm_tiered_offload.settings import SettingsError
from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.lanes import Lane
from vllm_tiered_offload.tiers.fs.owner import host_token
from vllm_tiered_offload.tiers.fs.tier import FsTier


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("fsync", ["none", "data"])
def test_round_trip_on_real_threads(tmp_path: Path, io: str, fsync: str) -> None:
    bench = Bench(tmp_path, real_lanes=True, io=io, fsync=fsync, read_threads=3)
    keys = keys_of("a", 8)
    bench.fill(keys)
    assert bench.store(keys).successful_keys == tuple(keys)
    bench.wipe()
    back = [7, 6, 5, 4, 3, 2, 1, 0]
    assert bench.load(keys, back).success
    assert [bytes(bench.rows[row]) for row in back] == [content(key, ROW) for key in keys]
    assert bench.stat("tier_bytes_total|tier=fs|direction=store") == 8 * FRAME
    assert bench.stat("tier_bytes_total|tier=fs|direction=load") == 8 * FRAME
    bench.assert_idle()
    bench.tier.shutdown()


def test_a_new_process_finds_everything_at_once_after_the_scan(tmp_path: Path) -> None:
    keys = keys_of("a", 8)
    first = Bench(tmp_path)
    first.fill(keys)
    first.store(keys)
    first.tier.shutdown()
    second = Bench(tmp_path, engine_id="another")
    unknown = keys_of("unknown", 1)
    assert second.tier.lookup([*keys, *unknown], REQ) == [HIT] * 8 + [MISS]
    assert second.load(keys).success
    assert [bytes(row) for row in second.rows] == [content(key, ROW) for key in keys]
    assert second.stat("tier_bytes_used|tier=fs") == 8 * FRAME


def test_unknown_is_asked_once_a_pass_and_answered_by_the_next(tmp_path: Path) -> None:
    asking = HandLane()
    bench = Bench(tmp_path, lanes=inline_lanes(lookup=asking))
    bench.clock.now += 10  # the scan at the start is too old to say "nowhere"
    keys = keys_of("a", 3)
    Bench(tmp_path, engine_id="other").store(keys[:2])
    assert bench.tier.lookup(keys[:2], REQ) == [RETRY, RETRY]
    assert bench.tier.lookup(keys, REQ) == [RETRY] * 3
    assert not asking.jobs, "one task a pass, not one a call"
    bench.tier.on_schedule_end()
    assert len(asking.jobs) == 1
    assert bench.tier.lookup(keys, REQ) == [RETRY] * 3
    bench.tier.on_schedule_end()
    assert len(asking.jobs) == 1, "what was asked is not asked again"
    asking.run()
    assert bench.tier.lookup(keys, REQ) == [HIT, HIT, MISS]
    bench.assert_idle()


@pytest.mark.parametrize("one_leaves", [False, True])
def test_what_is_known_of_one_key_never_stands_for_another(tmp_path: Path, one_leaves: bool) -> None:
    """A batch that is all alike is answered as one, so every mix of what there is must not be taken for such a batch.

    Mutations: without its look at the writes, at `leaving`, at what is absent or at what is asked, the short way of
    lookup answers at least one of these wrongly.
    """
    asking, writing = HandLane(), HandLane()
    bench = Bench(tmp_path, lanes=inline_lanes(lookup=asking, write=writing), capacity=2 * FRAME)
    bench.clock.now += 30
    there, coming, nowhere, asked, going = keys_of("a", 5)
    known = {there: HIT, coming: LookupResult.HIT_PENDING, nowhere: MISS, asked: RETRY}
    if one_leaves:
        bench.submit([there, going], load=False)
        known[going] = MISS
    else:
        bench.submit([there], load=False)
    writing.run_all()
    assert bench.lookup([nowhere]) == [RETRY]
    asking.run()
    bench.submit([coming], load=False)  # `going` has to leave for it
    assert bench.lookup([asked]) == [RETRY]
    for one, answer in known.items():
        assert bench.tier.lookup([one], REQ) == [answer]
        for other, its_answer in known.items():
            assert bench.tier.lookup([one, other], REQ) == [answer, its_answer]
    for number, (one, answer) in enumerate(known.items()):
        assert bench.tier.lookup([one, *keys_of(f"new{number}", 1)], REQ) == [answer, RETRY]
        assert bench.tier.lookup([*keys_of(f"newer{number}", 1), one], REQ) == [RETRY, answer]
    bench.tier.check()


def test_no_more_is_asked_than_can_be_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_tiered_offload.tiers.fs.lookups.MAX_QUESTIONS", 2)
    bench = Bench(tmp_path, lanes=inline_lanes(lookup=HandLane()))
    bench.clock.now += 60
    assert bench.tier.lookup(keys_of("a", 3), REQ) == [RETRY, RETRY, MISS]


def test_what_a_scan_finds_is_taken_in_by_small_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million files must not stop the scheduler thread; meanwhile each key that somebody wants is asked for."""
    keys = keys_of("a", 8)
    Bench(tmp_path).store(keys)
    monkeypatch.setattr("vllm_tiered_offload.tiers.fs.tier.SCANNED_FILES_A_PASS", 1)
    monkeypatch.setattr("vllm_tiered_offload.tiers.fs.scan.FILES_A_PART", 1)
    bench = Bench(tmp_path)
    assert bench.stat("tier_chunks|tier=fs") < 8
    assert bench.lookup(keys) == [HIT] * 8
    for _ in range(8):
        bench.tier.on_schedule_end()
    assert bench.tier.lookup(keys_of("b", 1), REQ) == [MISS], "all has been told: the rest is nowhere"
    assert bench.stat("tier_bytes_used|tier=fs") == 8 * FRAME


def test_a_miss_is_looked_for_again_after_share_refresh(tmp_path: Path) -> None:
    bench, other = Bench(tmp_path, share_refresh=5.0), Bench(tmp_path, engine_id="other")
    keys = keys_of("a", 1)
    bench.clock.now += 100
    assert bench.lookup(keys) == [MISS]
    other.store(keys)
    bench.clock.now += 4
    assert bench.lookup(keys) == [MISS]
    bench.clock.now += 2
    assert bench.tier.lookup(keys, REQ) == [RETRY]
    bench.tier.on_schedule_end()
    assert bench.tier.lookup(keys, REQ) == [HIT]


def test_a_file_that_vanished_is_a_miss_for_that_block_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, events=True)
    keys = keys_of("a", 3)
    bench.store(keys)
    bench.path(keys[1]).unlink()
    assert bench.tier.lookup(keys, REQ) == [HIT] * 3
    result = bench.load(keys)
    assert not result.success
    assert result.successful_keys == (keys[0], keys[2])
    assert bench.tier.lookup(keys, REQ) == [HIT, MISS, HIT]
    assert bench.failures("load") == {"gone": 1}
    events = [(event.keys, event.stored) for event in bench.tier.take_events()]
    assert events[-1] == ((keys[1],), False)
    assert bench.store(keys[1:2]).success
    assert bench.lookup(keys) == [HIT] * 3
    bench.assert_idle()


def test_one_key_in_two_jobs_is_written_once(tmp_path: Path) -> None:
    writing = HandLane()
    bench = Bench(tmp_path, lanes=inline_lanes(write=writing))
    key = keys_of("a", 1)
    jobs = {bench.submit(key, load=False), bench.submit([*key, *key], [1, 2], load=False)}
    assert bench.tier.lookup(key, REQ) == [LookupResult.HIT_PENDING]
    assert bench.tier.has_pending_work()
    assert len(writing.jobs) == 1
    assert not list(bench.tier.get_finished_jobs())
    writing.run()
    results = list(bench.tier.get_finished_jobs())
    assert {result.job_id for result in results} == jobs
    assert all(result.success for result in results)
    assert not bench.tier.has_pending_work()
    bench.assert_idle()


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    keys = keys_of("a", 2)
    bench, other = Bench(tmp_path), Bench(tmp_path, engine_id="other")
    other.store(keys[:1])
    inode = bench.path(keys[0]).stat().st_ino
    assert bench.store(keys).success
    assert bench.path(keys[0]).stat().st_ino == inode
    assert bench.store(keys).success
    assert bench.stat("fs_already_stored_total") == 3
    assert bench.stat("tier_bytes_used|tier=fs") == 2 * FRAME


def test_a_job_without_keys_and_a_row_that_is_none_end_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    key = keys_of("a", 1)
    assert bench.store([]).success
    assert not bench.store(key, [99]).success
    assert not bench.store(key, []).success
    assert not bench.load(key, [-1]).success
    bench.assert_idle()


def test_loads_overtake_stores(tmp_path: Path) -> None:
    writing = HandLane()
    bench = Bench(tmp_path, lanes=inline_lanes(write=writing))
    old, new = keys_of("old", 1), keys_of("new", 4)
    bench.submit(old, load=False)
    writing.run()
    bench.submit(new, load=False)
    bench.submit(old, load=True)
    assert [result.job_id for result in bench.tier.get_finished_jobs()] == [1, 3]
    writing.run_all()
    assert bench.tier.drain(0)


@pytest.mark.parametrize("umask", [0, 0o777])
def test_nobody_else_can_read_it_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        bench = Bench(tmp_path / "root", on_corrupt="quarantine")
        bench.store(keys_of("a", 2))
        bench.path(keys_of("a", 1)[0]).write_bytes(b"bad")
        bench.load(keys_of("a", 1))
    finally:
        os.umask(before)
    found = [tmp_path / "root", *(tmp_path / "root").rglob("*")]
    assert len(found) > 6
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_manifest_says_what_the_directory_is_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, model=fingerprint(model="some/model", block_tokens=[16]))
    [manifest] = tmp_path.rglob("manifest.json")
    text = json.loads(manifest.read_text())
    assert text["fields"]["model"] == "some/model"
    assert text["fields"]["block_tokens"] == [16]
    assert manifest.parent.name == bench.tier._holdings.namespace.fingerprint.digest
    assert not temporaries(tmp_path)


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"\xff", b"[" * 5000, None], ids=["empty", "no fields", "binary", "deep", "other model"]
)
def test_a_directory_with_a_wrong_manifest_is_not_used(
    tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of("a", 2)
    first = Bench(tmp_path)
    first.store(keys)
    Bench(tmp_path, model=fingerprint(model="other"))
    manifests = {path.parent.name: path for path in tmp_path.rglob("manifest.json")}
    mine = manifests.pop(fingerprint().digest)
    mine.write_bytes(manifests.popitem()[1].read_bytes() if damage is None else damage)
    second = Bench(tmp_path)
    assert second.lookup(keys) == [MISS, MISS]
    assert not second.store(keys_of("b", 1)).success
    assert len(chunk_files(mine.parent)) == 2, "nothing was taken away"
    assert len([record for record in caplog.records if "not used" in record.message]) == 1
    second.assert_idle()


@pytest.mark.parametrize(
    "change",
    [
        {"tensor_parallel": 2},
        {"kv_dtype": "fp8"},
        {"layout": "NHD"},
        {"block_tokens": [32]},
        {"kv_groups": ["full", "window"]},
        {"hf_config": "rope factor 2"},
        {"revision": "B"},
        {"hash_seed": "01"},
    ],
    ids=str,
)
def test_what_decides_the_bytes_makes_a_miss(tmp_path: Path, change: dict) -> None:
    """Cases 43 and 44."""
    keys = keys_of("a", 1)
    Bench(tmp_path).store(keys)
    assert Bench(tmp_path, model=fingerprint(**change)).lookup(keys) == [MISS]
    assert Bench(tmp_path).lookup(keys) == [HIT]


def test_a_file_copied_from_another_namespace_is_foreign(tmp_path: Path) -> None:
    key, other = keys_of("a", 2)
    source, target = Bench(tmp_path), Bench(tmp_path, model=fingerprint(model="other"))
    source.store([key, other])
    target.store([other])
    target.path(key).parent.mkdir(exist_ok=True)
    target.path(key).write_bytes(source.path(key).read_bytes())
    target.clock.now += 60
    assert target.lookup([key]) == [HIT]
    assert not target.load([key]).success
    assert target.failures("load") == {"foreign": 1}
    source.path(key).write_bytes(source.path(other).read_bytes())  # a whole frame under another name
    assert not source.load([key]).success
    assert source.failures("load") == {"foreign": 1}


# Reset


def test_reset_goes_on_in_a_private_directory(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    old, new = keys_of("old", 3), keys_of("new", 2)
    bench.store(old)
    shared = bench.tier.namespace_path
    bench.tier.reset()
    assert bench.tier.lookup(old, REQ) == [MISS] * 3, "a private directory knows at once what it does not have"
    bench.fill(old)
    assert bench.store([*old[:1], *new]).success
    private = Path(bench.tier.namespace_path)
    assert len(chunk_files(shared)) == 3
    assert len(chunk_files(private)) == 3
    assert bench.load(new).success
    bench.assert_idle()
    neighbour = Bench(tmp_path, engine_id="neighbour")
    assert neighbour.lookup([*old, *new]) == [HIT] * 3 + [MISS] * 2
    assert private.is_dir(), "the private directory of a living engine is left alone"
    bench.tier.shutdown()
    assert not private.exists()
    assert len(chunk_files(shared)) == 3
    assert Bench(tmp_path).lookup(old) == [HIT] * 3


def test_a_second_reset_removes_the_first_private_directory(tmp_path: Path) -> None:
    bench = Bench(tmp_path, capacity=10 * FRAME)
    bench.store(keys_of("a", 2))
    bench.tier.reset()
    bench.store(keys_of("b", 3))
    first = Path(bench.tier.namespace_path)
    assert bench.stat("tier_bytes_used|tier=fs") == 5 * FRAME
    bench.tier.reset()
    assert not first.exists()
    assert bench.stat("tier_bytes_used|tier=fs") == 2 * FRAME


def test_keep_on_reset_keeps(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keep_on_reset=True)
    keys = keys_of("a", 2)
    bench.store(keys)
    bench.tier.reset()
    assert bench.lookup(keys) == [HIT] * 2
    assert len(list((tmp_path / "v1").iterdir())) == 1


def test_what_was_in_flight_at_a_reset_ends_and_changes_nothing(tmp_path: Path) -> None:
    reading, writing, asking = HandLane(), HandLane(), HandLane()
    bench = Bench(tmp_path, lanes=inline_lanes(read=reading, write=writing, lookup=asking))
    stored, written, asked = keys_of("a", 1), keys_of("b", 1), keys_of("c", 1)
    bench.submit(stored, load=False)
    writing.run()
    list(bench.tier.get_finished_jobs())
    bench.clock.now += 60
    load, store = bench.submit(stored, load=True), bench.submit(written, [1], load=False)
    assert bench.tier.lookup(asked, REQ) == [RETRY]
    bench.tier.on_schedule_end()
    assert not bench.tier.drain(0)
    bench.tier.reset()
    assert bench.tier.has_pending_work()
    for lane in (reading, writing, asking):
        lane.run_all()
    results = {result.job_id: result for result in bench.tier.get_finished_jobs()}
    assert results.keys() == {load, store}
    assert not any(result.success or result.successful_keys for result in results.values())
    assert bench.lookup([*stored, *written, *asked]) == [MISS] * 3
    bench.assert_idle()


# Capacity


def test_capacity_evicts_the_oldest_and_is_never_exceeded(tmp_path: Path) -> None:
    most = [0]

    class Watching(FaultyFiles):
        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            most[0] = max(most[0], sum(path.stat().st_size for path in chunk_files(tmp_path)))

    bench = Bench(tmp_path, capacity=4 * FRAME + 100, files=Watching(), events=True)
    keys = keys_of("a", 4)
    bench.store(keys)
    bench.tier.touch(keys[:2], REQ)
    more = keys_of("b", 2)
    assert bench.store(more).success
    assert bench.lookup([*keys, *more]) == [HIT, HIT, MISS, MISS, HIT, HIT]
    assert most[0] == 4 * FRAME
    assert bench.stat("tier_bytes_used|tier=fs") == sum(path.stat().st_size for path in chunk_files(tmp_path))
    assert bench.stat("evictions_total|tier=fs") == 2
    gone = [key for event in bench.tier.take_events() if not event.stored for key in event.keys]
    assert sorted(gone) == sorted(keys[2:])
    bench.assert_idle()


def test_case_24_files_removed_behind_our_back_are_not_counted_for_ever(tmp_path: Path) -> None:
    bench = Bench(tmp_path, capacity=4 * FRAME)
    keys, more = keys_of("a", 4), keys_of("b", 4)
    bench.store(keys)
    for path in chunk_files(tmp_path):
        path.unlink()
    assert bench.store(more).success
    assert bench.stat("tier_bytes_used|tier=fs") == 4 * FRAME
    assert len(chunk_files(tmp_path)) == 4


def test_with_a_capacity_nothing_is_stored_before_the_scan_has_counted(tmp_path: Path) -> None:
    Bench(tmp_path).store(keys_of("a", 3))
    background = HandLane()
    bench = Bench(tmp_path, capacity=4 * FRAME, lanes=inline_lanes(background=background))
    assert not bench.store(keys_of("b", 1)).success
    assert bench.failures("store") == {"not_ready": 1}
    background.run_all()
    bench.tier.on_schedule_end()
    assert bench.store(keys_of("b", 4)).success
    assert len(chunk_files(tmp_path)) == 4


def test_a_capacity_below_one_chunk_is_said_and_stores_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, capacity=FRAME - 1)
    assert "less than one chunk" in caplog.text
    assert not bench.store(keys_of("a", 1)).success
    bench.assert_idle()


# Threads


watched: dict[int, list[str]] = {}


@sys.addaudithook
def _watch(event: str, arguments: tuple) -> None:
    """Note what a watched thread asks the system for. A hook cannot be taken away, so it looks for who is watched."""
    if watched and event.partition(".")[0] in ("open", "os", "socket", "shutil"):
        watched.get(threading.get_ident(), []).append(f"{event} {arguments[:1]}")


def test_the_scheduler_thread_touches_no_file(tmp_path: Path) -> None:
    """Start included. Mutation: with inline lanes the same calls fail this test."""
    scheduler = threading.get_ident()
    host_token.cache_clear()
    seen = watched[scheduler] = []

    class OffThread(FaultyFiles):
        def _apply(self, operation: str, target: object) -> None:
            assert threading.get_ident() != scheduler, operation
            super()._apply(operation, target)

    files = OffThread()
    bench = Bench(tmp_path, real_lanes=True, files=files)
    keys = keys_of("a", 4)
    bench.store(keys)
    bench.clock.now += 60
    bench.lookup([*keys, *keys_of("b", 2)])
    bench.load(keys)
    bench.tier.get_stats()
    bench.tier.reset()
    bench.store(keys)
    bench.tier.shutdown()
    del watched[scheduler]
    assert not seen
    assert len(files.calls) > 20
    assert len(list((tmp_path / "v1").iterdir())) == 1


def test_no_thread_touches_a_row_after_the_result(tmp_path: Path) -> None:
    """Loads of bad files, the failing way out included: rows are overwritten after the result and stay so."""
    bench = Bench(tmp_path, real_lanes=True, num_rows=16, read_threads=4)
    keys = keys_of("a", 16)
    bench.fill(keys)
    bench.store(keys)
    for key in keys[::3]:
        bench.path(key).write_bytes(b"short")
    for _ in range(20):
        bench.load(keys)
        bench.wipe()
        time.sleep(0.001)
        assert all(bytes(row) == b"\xee" * ROW for row in bench.rows)
    bench.tier.shutdown()


def test_a_read_that_hangs_does_not_hold_up_the_rest_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 39: of sixteen loads three hang, then a healthy one; shutdown is bounded all the same."""
    monkeypatch.setattr("vllm_tiered_offload.tiers.fs.tier.SHUTDOWN_SECONDS", 0.2)
    hung, release = set(keys_of("a", 3)), threading.Event()

    class Hanging(Files):
        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            if not flags & os.O_CREAT and any(path.endswith(key.hex()) for key in hung):
                release.wait(20)
            return super().open(path, flags, mode)

    bench = Bench(tmp_path, real_lanes=True, files=Hanging(), num_rows=16, read_threads=4)
    keys = keys_of("a", 16)
    bench.store(keys)
    slow = [bench.submit([key], [row], load=True) for row, key in enumerate(keys)]
    deadline = time.monotonic() + 10
    done: list = []
    while len(done) < 13 and time.monotonic() < deadline:
        done += bench.tier.get_finished_jobs()
        time.sleep(0.005)
    assert {result.job_id for result in done} == set(slow[3:])
    assert not bench.tier.drain(0.05)
    began = time.monotonic()
    bench.tier.shutdown()
    assert time.monotonic() - began < 3
    assert bench.tier.has_pending_work(), "no result before the I/O has ended"
    release.set()
    assert bench.tier.drain(10)
    assert len(list(bench.tier.get_finished_jobs())) == 3


def test_shutdown_cancels_what_has_not_begun_and_may_be_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_tiered_offload.tiers.fs.tier.SHUTDOWN_SECONDS", 0.01)
    writing = HandLane()
    bench = Bench(tmp_path, lanes=inline_lanes(write=writing))
    job = bench.submit(keys_of("a", 2), load=False)
    bench.tier.shutdown()
    bench.tier.shutdown()
    writing.run_all()
    later = bench.submit(keys_of("b", 1), load=False), bench.submit(keys_of("b", 1), load=True)
    assert [(r.job_id, r.success) for r in bench.tier.get_finished_jobs()] == [(j, False) for j in (job, *later)]
    assert bench.failures("store") == {"cancelled": 3}
    assert bench.tier.lookup(keys_of("c", 1), REQ) == [MISS]
    assert not chunk_files(tmp_path)
    bench.tier.reset()


def test_a_closed_lane_takes_nothing_and_its_threads_end() -> None:
    lane, ran = Lane(2, "lane"), threading.Event()
    lane.submit(lambda: 1 // 0)
    lane.submit(ran.set)
    lane.shutdown()
    assert ran.is_set()
    with pytest.raises(RuntimeError):
        lane.submit(ran.set)
    assert not any(thread.is_alive() for thread in lane._threads)


# Settings


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({}, "tiers[0].root: missing"),
        ({"root": ""}, "tiers[0].root: got"),
        ({"root": "a\0b"}, "tiers[0].root: got"),
        ({"root": 3}, "tiers[0].root: got 3, expected text"),
        ({"root": "/r", "capacity": "lots"}, "tiers[0].capacity: got"),
        ({"root": "/r", "capacity": 0}, "tiers[0].capacity: got 0, expected more than 0"),
        ({"root": "/r", "read_thread": 1}, 'tiers[0].read_thread: unknown key; did you mean "read_threads"?'),
        ({"root": "/r", "io": "mmap"}, "tiers[0].io: got"),
        ({"root": "/r", "fsync": True}, "tiers[0].fsync: got"),
        ({"root": "/r", "write_threads": 0}, "tiers[0].write_threads: got 0, expected at least 1"),
        ({"root": "/r", "share_refresh": 0}, "tiers[0].share_refresh: got 0, expected at least 0.1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mistake_in_the_settings_is_one_line(raw: dict, line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        FsTier.from_settings(raw, "tiers[0]", engine_id="e", lanes=inline_lanes())
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(line)


def test_a_relative_root_and_a_home_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, path in (("here/there", tmp_path / "here/there"), ("~/kv", tmp_path / "home/kv")):
        bench = Bench(given)
        assert bench.tier.namespace_path.startswith(f"{path}/v1/")
        assert bench.store(keys_of("a", 1)).success


def test_a_region_of_no_rows_fails_jobs_and_nothing_else(tmp_path: Path) -> None:
    tier = FsTier.from_settings({"root": str(tmp_path)}, engine_id="e", lanes=inline_lanes())
    tier.submit_load(JobMetadata(1, tuple(keys_of("a", 1)), (0,), True, REQ))
    assert [result.success for result in tier.get_finished_jobs()] == [False]
    assert len(make_rows(0)) == 0


def test_a_scan_does_not_bring_back_what_a_load_took_away(tmp_path: Path) -> None:
    """The scan saw a file, a load found it damaged and removed it, then the scan's message came: it is still gone.

    Mutation: adding every found key makes the store below count as stored without a file.
    """
    keys = keys_of("scan", 2)
    first = Bench(tmp_path)
    first.store(keys)
    damaged = first.path(keys[0])
    damaged.write_bytes(b"\0" * FRAME)
    background = HandLane()
    second = Bench(tmp_path, lanes=inline_lanes(background=background))
    background.run_all()
    assert second.load(keys).successful_keys == (keys[1],)
    second.tier.on_schedule_end()
    assert second.tier.lookup(keys, REQ) == [MISS, HIT]
    assert second.store(keys).success
    assert damaged.stat().st_size == FRAME
    assert second.load(keys).success
    second.assert_idle()


def test_a_root_that_cannot_be_written_is_said_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before there is a region or a request, once, and on a thread of the tier's."""
    (tmp_path / "file").write_text("in the way")
    tier = FsTier.from_settings({"root": str(tmp_path / "file")}, engine_id="e")
    tier.shutdown()
    deadline = time.monotonic() + 5
    while "cannot be written" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert caplog.text.count("cannot be written") == 1
