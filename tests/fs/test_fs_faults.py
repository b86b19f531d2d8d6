"""The filesystem tier on a filesystem that fails."""

import errno
import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fs_kit import (
    FRAME,
    HIT,
    MISS,
    OPERATIONS,
    REQ,
    ROW,
    Bench,
    FaultyFiles,
    HandLane,
    chunk_files,
    content,
    inline_lanes,
    keys_of,
    make_rows,
    temporaries,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_tiered_offload.tiers import block_frame

FOUR = keys_of("four", 4)


def filled(root: Path, **settings: object) -> Bench:
    """Four blocks of 4096 bytes, stored."""
    bench = Bench(root, **settings)
    bench.fill(FOUR)
    assert bench.store(FOUR).success
    bench.wipe()
    return bench


@pytest.mark.parametrize("size", [0, 10, 4095, 4096, FRAME - 1])
@pytest.mark.parametrize("on_corrupt", ["remove", "quarantine"])
def test_case_7_a_short_file_costs_its_block_alone(tmp_path: Path, size: int, on_corrupt: str) -> None:
    bench = filled(tmp_path, on_corrupt=on_corrupt)
    os.truncate(bench.path(FOUR[2]), size)
    assert bench.lookup(FOUR) == [HIT] * 4
    result = bench.load(FOUR)
    assert not result.success
    assert result.successful_keys == (FOUR[0], FOUR[1], FOUR[3])
    assert bytes(bench.rows[1]) == content(FOUR[1], ROW)
    assert bench.failures("load") == {"short": 1}
    for _ in range(3):
        assert bench.lookup(FOUR) == [HIT, HIT, MISS, HIT], "nothing loops on it"
    bench.clock.now += 100
    assert bench.lookup(FOUR) == [HIT, HIT, MISS, HIT]
    assert not bench.path(FOUR[2]).exists()
    kept = list(tmp_path.rglob(f"quarantine/{FOUR[2].hex()}"))
    assert len(kept) == (on_corrupt == "quarantine")
    assert bench.stat("fs_discarded_files_total") == 1
    bench.fill(FOUR)
    assert bench.store(FOUR).success
    assert bench.load(FOUR).success
    bench.assert_idle()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("operation", ["open", "preadv", "info"])
def test_case_7_trouble_of_the_machine_never_costs_a_file(tmp_path: Path, number: int, operation: str) -> None:
    bench = filled(tmp_path)
    bench.files.fail(operation, number)
    assert bench.load(FOUR).successful_keys == ()
    assert bench.tier.lookup(FOUR, REQ) == [MISS] * 4
    bench.files.rules.clear()
    assert len(chunk_files(tmp_path)) == 4
    assert sum(bench.failures("load").values()) == 4
    bench.clock.now += 11
    assert bench.lookup(FOUR) == [HIT] * 4
    assert bench.load(FOUR).success
    assert bench.stat("tier_bytes_used|tier=fs") == 4 * FRAME


@pytest.mark.parametrize("position", [0, 8, 10, 40, 70, 100, 3000, 4090, 4096, 6000, FRAME - 1])
def test_case_39_a_flipped_bit_is_never_served(tmp_path: Path, position: int) -> None:
    bench = filled(tmp_path)
    path = bench.path(FOUR[1])
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)
    assert bench.load(FOUR).successful_keys == (FOUR[0], FOUR[2], FOUR[3])
    assert bench.lookup(FOUR) == [HIT, MISS, HIT, HIT]
    assert not path.exists()
    bench.fill(FOUR)
    assert bench.store(FOUR).success
    assert bench.load(FOUR).success, "repaired"
    bench.assert_idle()


def test_a_file_longer_than_a_frame_is_foreign(tmp_path: Path) -> None:
    bench = filled(tmp_path)
    with bench.path(FOUR[0]).open("ab") as file:
        file.write(b"more")
    assert not bench.load(FOUR[:1]).success
    assert bench.failures("load") == {"foreign": 1}


@pytest.mark.parametrize("torn", [False, True], ids=["one field", "its checksum too"])
@pytest.mark.parametrize("field", [slice(8, 10), slice(10, 12)], ids=["version", "algorithm"])
@pytest.mark.parametrize("value", [b"\x00\x00", b"\x03\x00", b"\xff\xff", b"\x01\x01"])
def test_a_header_that_says_another_version_is_damaged(tmp_path: Path, field: slice, value: bytes, torn: bool) -> None:
    """In a directory of this version. Mutation: what is "unsupported" instead stays for ever, and is never repaired."""
    bench = filled(tmp_path)
    path = bench.path(FOUR[0])
    frame = bytearray(path.read_bytes())
    frame[field] = value
    if torn:
        frame[4080:4096] = bytes(16)
    path.write_bytes(frame)
    assert bench.load(FOUR).successful_keys == tuple(FOUR[1:])
    assert bench.failures("load") == {"corrupt": 1}
    assert not path.exists()
    bench.clock.now += 60
    assert bench.store(FOUR).success
    assert bench.load(FOUR).success, "repaired"
    bench.assert_idle()


def test_a_frame_of_another_version_is_out_of_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, with a checksum that is right."""
    with monkeypatch.context() as patch:
        patch.setattr(block_frame, "VERSION", 2)
        bench = filled(tmp_path)
    assert not bench.load(FOUR[:1]).success
    assert bench.failures("load") == {"foreign": 1}
    assert not bench.path(FOUR[0]).exists()


def test_a_bad_file_that_cannot_be_removed_is_not_tried_all_the_time(tmp_path: Path) -> None:
    bench = filled(tmp_path)
    os.truncate(bench.path(FOUR[0]), 5)
    bench.files.fail("unlink", errno.EROFS)
    assert not bench.load(FOUR[:1]).success
    for _ in range(5):
        assert bench.lookup(FOUR[:1]) == [MISS]
    assert bench.path(FOUR[0]).exists()
    assert bench.stat("fs_discarded_files_total") == 0


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    bench = filled(tmp_path)
    target = bench.path(FOUR[0]).rename(tmp_path / "elsewhere")
    bench.path(FOUR[0]).symlink_to(target)
    assert not bench.load(FOUR[:1]).success
    assert target.exists()


# Case 38


@pytest.mark.parametrize("row_bytes", [ROW, 3 * ROW + 512])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_case_38_odd_rows_are_buffered_and_right(
    tmp_path: Path, row_bytes: int, shift: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, rows=make_rows(4, row_bytes, shift))
    bench.fill(FOUR)
    assert bench.store(FOUR).success
    bench.wipe()
    assert bench.load(FOUR).success
    assert [bytes(row) for row in bench.rows] == [content(key, row_bytes) for key in FOUR]
    odd = bool(shift or row_bytes % ROW)
    assert bench.stat("fs_buffered_io_total|reason=unaligned") == odd
    assert len([record for record in caplog.records if "no direct I/O" in record.message]) == odd


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("operation", ["open", "pwritev", "preadv"])
def test_case_38_a_filesystem_that_refuses_o_direct(
    tmp_path: Path, operation: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    class NotDirect(FaultyFiles):
        def __init__(self) -> None:
            super().__init__()
            self.direct: set[int] = set()

        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            fd = super().open(path, flags, mode)  # a new file is there, even where O_DIRECT is refused
            if flags & os.O_DIRECT:
                if operation == "open":
                    self.close(fd)
                    raise OSError(number, os.strerror(number))
                self.direct.add(fd)
            return fd

        def close(self, fd: int) -> None:
            self.direct.discard(fd)
            super().close(fd)

        def _apply(self, call: str, target: object) -> None:
            super()._apply(call, target)
            if call == operation and target in self.direct:
                raise OSError(number, os.strerror(number))

    bench = Bench(tmp_path, files=NotDirect())
    bench.fill(FOUR)
    assert bench.store(FOUR).success
    bench.wipe()
    assert bench.load(FOUR).success
    assert [bytes(row) for row in bench.rows[:4]] == [content(key, ROW) for key in FOUR]
    assert not temporaries(tmp_path)
    reason = "read" if operation == "preadv" else "write"
    assert bench.stat(f"fs_buffered_io_total|reason={reason}") == 1
    assert len([record for record in caplog.records if "no direct I/O" in record.message]) == 1


def test_case_38_buffered_means_no_o_direct(tmp_path: Path) -> None:
    bench = filled(tmp_path, io="buffered")
    assert not any(name.startswith("fs_buffered_io") for name in bench.tier.get_stats())


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs here")
def test_case_38_tmpfs() -> None:
    with TemporaryDirectory(dir="/dev/shm") as root:
        bench = filled(Path(root))
        assert bench.load(FOUR).success
        assert [bytes(row) for row in bench.rows[:4]] == [content(key, ROW) for key in FOUR]


def test_parts_of_reads_and_writes_are_continued(tmp_path: Path) -> None:
    class Piecemeal(FaultyFiles):
        def preadv(self, fd, buffers, offset):
            return super().preadv(fd, [buffers[0][:1000]], offset)

        def pwritev(self, fd, buffers, offset):
            return super().pwritev(fd, [buffers[0][:1000]], offset)

    bench = filled(tmp_path, files=Piecemeal(), io="buffered")
    assert bench.load(FOUR).success
    assert [bytes(row) for row in bench.rows[:4]] == [content(key, ROW) for key in FOUR]


# Stores that fail


@pytest.mark.parametrize(
    ("number", "kind", "pauses"),
    [
        (errno.EROFS, "not_allowed", True),
        (errno.EACCES, "not_allowed", True),
        (errno.EIO, "io", False),
        (errno.EMFILE, "too_many_files", False),
    ],
)
@pytest.mark.parametrize("operation", ["open", "pwritev", "rename", "chmod"])
def test_a_store_that_fails_leaves_nothing_and_loads_go_on(
    tmp_path: Path, operation: str, number: int, kind: str, pauses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = filled(tmp_path)
    more = keys_of("more", 3)
    bench.files.fail(operation, number, match="" if operation in ("pwritev", "chmod") else "/.tmp-")
    assert bench.store(more).successful_keys == ()
    bench.files.rules.clear()
    assert bench.failures("store") == {kind: 3}
    assert not temporaries(tmp_path)
    assert bench.load(FOUR).success
    assert bench.store(more).success is not pauses
    bench.clock.now += 11
    assert bench.store(more).success, "stores come back by themselves"
    assert bench.lookup(more) == [HIT] * 3
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == pauses
    bench.assert_idle()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("operation", ["open", "pwritev", "rename", "chmod"])
def test_a_device_that_is_full_before_the_capacity(
    tmp_path: Path, operation: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """First as much goes as comes, then, if that does not help, stores pause; loads go on all the time.

    Mutations: no ceiling makes the first store fail for ever; a ceiling that is never taken away the last one.
    """
    bench = filled(tmp_path, capacity=100 * FRAME)
    more, others = keys_of("more", 2), keys_of("others", 2)
    match = "" if operation in ("pwritev", "chmod") else "/.tmp-"
    bench.files.fail(operation, number, match=match)
    assert bench.store(more).successful_keys == ()
    assert not temporaries(tmp_path)
    assert bench.stat("fs_stores_paused") == 0
    bench.files.fail(operation, number, times=0)
    assert bench.store(more).success, "two of the old ones went"
    assert bench.stat("evictions_total|tier=fs") == 2
    assert len(chunk_files(tmp_path)) == 4
    bench.files.fail(operation, number, match=match)
    assert bench.store(others).successful_keys == ()
    assert bench.stat("fs_stores_paused") == 1, "what was evicted did not help"
    bench.files.rules.clear()
    assert bench.load([key for key in (*FOUR, *more) if bench.path(key).exists()]).success
    assert bench.store(others).successful_keys == ()
    assert bench.failures("store") == {"no_space": 4, "paused": 2}
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    bench.clock.now += 61
    bench.tier.on_schedule_end()
    assert bench.store([*others, *keys_of("new", 4)]).success, "the device may have room again"
    assert bench.stat("tier_bytes_used|tier=fs") == len(chunk_files(tmp_path)) * FRAME == 8 * FRAME
    bench.assert_idle()


def test_room_is_left_on_the_device(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mutation: without the look at what is free all five are stored."""
    files = FaultyFiles()
    free = [3 * FRAME + 1000]
    files.free_bytes = lambda _: free[0] - len(chunk_files(tmp_path)) * FRAME  # type: ignore[method-assign]
    bench = Bench(tmp_path, files=files, min_free=1000)
    keys = keys_of("a", 5)
    assert bench.store(keys).successful_keys == tuple(keys[:3])
    assert bench.failures("store") == {"no_space": 2}
    assert "min_free" in caplog.text
    assert bench.store(keys_of("b", 2)).success, "something went for it"
    assert len(chunk_files(tmp_path)) == 3
    free[0] = 0  # others filled the device
    assert not bench.store(keys_of("c", 1)).success
    assert bench.load([key for key in keys if bench.path(key).exists()]).success
    bench.assert_idle()


def test_a_device_that_does_not_say_what_is_free_takes_nothing(tmp_path: Path) -> None:
    """Mutation: going on as if there were room."""
    files = FaultyFiles()
    files.fail("free_bytes", errno.EIO)
    bench = Bench(tmp_path, files=files, min_free=1)
    assert not bench.store(FOUR).success
    assert bench.failures("store") == {"io": 4}
    files.rules.clear()
    assert bench.store(FOUR).success
    bench.assert_idle()


def test_what_is_trimmed_and_cannot_be_unlinked_keeps_its_bytes(tmp_path: Path) -> None:
    bench = filled(tmp_path, capacity=4 * FRAME)
    Bench(tmp_path, engine_id="other").store(keys_of("more", 2))
    bench.files.fail("unlink", errno.EIO)
    for _ in range(2):
        bench.clock.now += 61
        bench.tier.on_schedule_end()
        bench.tier.on_schedule_end()
        assert bench.stat("tier_bytes_used|tier=fs") == 6 * FRAME
        bench.tier.check()
    bench.files.rules.clear()
    bench.clock.now += 61
    bench.tier.on_schedule_end()
    bench.tier.on_schedule_end()
    assert bench.stat("tier_bytes_used|tier=fs") == 4 * FRAME == len(chunk_files(tmp_path)) * FRAME
    bench.assert_idle()


def test_fsync_that_fails_fails_the_store(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fsync="data")
    bench.files.fail("fdatasync", errno.EIO)
    assert not bench.store(FOUR).success
    assert not chunk_files(tmp_path)
    assert not temporaries(tmp_path)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_a_root_that_cannot_be_made_is_said_once_and_nothing_is_stored(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    files.fail("mkdir", number)
    bench = Bench(tmp_path / "root", files=files)
    lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 1
    assert "cannot be written" in lines[0]
    assert "\n" not in lines[0]
    for _ in range(3):
        assert not bench.store(FOUR).success
        assert bench.lookup(FOUR) == [MISS] * 4
        bench.clock.now += 60
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    bench.assert_idle()
    bench.tier.shutdown()


def test_a_read_only_root_is_said_at_the_start_and_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    files = FaultyFiles()
    files.fail("open", errno.EROFS, match="/.tmp-")
    bench = Bench(tmp_path, files=files)
    assert "cannot be written" in caplog.text
    assert bench.lookup(FOUR) == [HIT] * 4
    assert bench.load(FOUR).success
    assert not bench.store(keys_of("more", 1)).success


def test_a_root_that_is_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "root").write_text("not a directory")
    bench = Bench(tmp_path / "root")
    assert "cannot be written" in caplog.text
    assert not bench.store(FOUR).success
    assert bench.lookup(FOUR) == [MISS] * 4


def test_a_directory_dropped_under_a_running_engine_is_made_again(tmp_path: Path) -> None:
    bench = filled(tmp_path)
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    more = keys_of("more", 2)
    assert bench.store(more).success
    assert len(list(tmp_path.rglob("manifest.json"))) == 1
    assert bench.load(more).success


def test_victims_that_cannot_be_unlinked_keep_their_bytes(tmp_path: Path) -> None:
    bench = filled(tmp_path, capacity=4 * FRAME)
    bench.files.fail("unlink", errno.EIO)
    assert not bench.store(keys_of("more", 2)).success
    bench.files.rules.clear()
    assert bench.lookup(FOUR) == [HIT] * 4
    assert bench.stat("tier_bytes_used|tier=fs") == 4 * FRAME
    bench.assert_idle()


def test_a_scan_that_fails_is_made_again(tmp_path: Path) -> None:
    filled(tmp_path)
    files = FaultyFiles()
    files.fail("listdir", errno.EIO)
    bench = Bench(tmp_path, files=files, capacity=8 * FRAME)
    assert bench.lookup(FOUR) == [HIT] * 4, "each is looked for instead"
    assert not bench.store(keys_of("more", 1)).success
    files.rules.clear()
    bench.clock.now += 61
    bench.tier.on_schedule_end()
    bench.tier.on_schedule_end()
    assert bench.store(keys_of("more", 1)).success


def test_a_mistake_of_ours_ends_as_a_failed_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = filled(tmp_path)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(bench.tier._medium._io, "read", broken)
    monkeypatch.setattr(bench.tier._medium._io, "write", broken)
    assert bench.load(FOUR).successful_keys == ()
    assert bench.store(keys_of("more", 2)).successful_keys == ()
    assert bench.failures("store") == {"internal": 2}
    bench.assert_idle()


# Anything at all

ERRNOS = [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EROFS, errno.EINVAL, errno.ENOENT, errno.ESTALE]


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_one_result_for_each_job_and_no_wrong_byte_under_random_faults(data: st.DataObject) -> None:
    chance = random.Random(data.draw(st.integers(0, 1 << 32)))
    with TemporaryDirectory() as root:
        files = FaultyFiles()
        errnos = data.draw(st.lists(st.sampled_from(ERRNOS), min_size=1, max_size=4))
        broken = data.draw(st.sets(st.sampled_from([name for name in OPERATIONS if name != "close"]), max_size=4))

        def rule(target: object) -> None:
            if chance.random() < 0.3:
                number = chance.choice(errnos)
                raise OSError(number, os.strerror(number))

        for name in broken:
            files.rules[name] = rule
        lane = {name: HandLane() for name in ("read", "write", "lookup", "background")}
        capacity = data.draw(st.sampled_from([None, 3 * FRAME, 6 * FRAME]))
        bench = Bench(root, files=files, lanes=inline_lanes(**lane), num_rows=64, capacity=capacity)
        keys, submitted, results, next_row = keys_of("k", 10), {}, {}, 0

        def collect() -> None:
            for result in bench.tier.get_finished_jobs():
                assert result.job_id not in results, "two results"
                results[result.job_id] = result
                job_keys, rows, is_load = submitted[result.job_id]
                assert set(result.successful_keys) <= set(job_keys)
                for key, row in zip(job_keys, rows, strict=True):
                    if is_load and key in result.successful_keys:
                        assert bytes(bench.rows[row]) == content(key, ROW), "a wrong byte was served"

        for action in data.draw(st.lists(st.sampled_from("sslqprx"), max_size=30)):
            if action in "sl" and next_row + 4 <= 64:
                chosen = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=4, unique=True))
                rows = list(range(next_row, next_row + len(chosen)))
                next_row += len(chosen)
                for key, row in zip(chosen, rows, strict=True):
                    bench.rows[row][:] = content(key, ROW) if action == "s" else b"\xee" * ROW
                # Known before it is submitted: results may be there at once.
                submitted[bench._next_job + 1] = (chosen, rows, action == "l")
                bench.submit(chosen, rows, load=action == "l")
            elif action == "q":
                bench.tier.lookup(keys, REQ)
                bench.tier.touch(keys[:3], REQ)
                bench.tier.on_schedule_end()
            elif action == "p":
                pending = [one for one in lane.values() if one.jobs]
                if pending:
                    one = chance.choice(pending)
                    one.run(chance.randrange(len(one.jobs)))
            elif action == "r" and chance.random() < 0.2:
                bench.tier.reset()
            elif action == "x":
                bench.clock.now += 7
            collect()
            bench.tier.check()
            if (
                capacity is not None and errno.ENOENT not in errnos
            ):  # a filesystem that denies what it has can exceed it
                assert sum(path.stat().st_size for path in chunk_files(root)) <= capacity
        files.rules.clear()  # chaos is over: everything converges
        for one in lane.values():
            one.run_all()
        collect()
        assert results.keys() == submitted.keys()
        bench.clock.now += 100
        for _ in range(3):
            bench.tier.on_schedule_end()
            for one in lane.values():
                one.run_all()
        bench.assert_idle()
        fresh = keys_of("fresh", 1)
        bench.rows[0][:] = content(fresh[0], ROW)
        bench.submit(fresh, [0], load=False)
        lane["write"].run_all()
        assert bench.tier.get_finished_jobs()[0].success or capacity is not None
