"""The filesystem tier across processes: killed, side by side, and on filesystems that are really full or read-only."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fs_kit import FRAME, HIT, MISS, ROW, Bench, chunk_files, content, keys_of, temporaries

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.namespace import collect_private_generations
from vllm_tiered_offload.tiers.fs.owner import STALE_AGE, Owner, host_token

WRITER = Path(__file__).with_name("fs_writer.py")


def start(root: Path, name: str, count: int, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(WRITER), str(root), name, str(count), mode]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def await_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def old(path: Path, age: float) -> None:
    os.utime(path, (time.time() - age,) * 2)


def test_case_39_killed_between_write_and_rename(tmp_path: Path) -> None:
    """Own stale temporaries go at the restart; other people's files, whole or not, stay."""
    whole = keys_of("whole", 3)
    first = Bench(tmp_path, engine_id="first")
    first.store(whole)
    process = start(tmp_path, "victim", 2, "stop")
    await_ready(process)
    assert process.poll() is None
    assert temporaries(tmp_path), "a write is in flight"
    neighbour = Bench(tmp_path, engine_id="neighbour")
    assert temporaries(tmp_path), "a living process's temporary is left alone"
    process.kill()
    process.wait()
    assert Bench(tmp_path, engine_id="neighbour").lookup(keys_of("victim", 2)) == [MISS, MISS]
    directory = first.path(whole[0]).parent
    theirs = [
        directory / Owner("neighbour", "0" * 12, 1).temporary_name(),
        directory / Owner("engine", host_token(), os.getpid()).temporary_name(),
        directory / ".tmp-something else",
        directory / "README",
    ]
    for path in theirs:
        path.write_bytes(b"x")
        old(path, STALE_AGE * 10)
    ours = [
        directory / Owner("engine", "0" * 12, 1).temporary_name(),
        directory / Owner("whoever", host_token(), process.pid).temporary_name(),
    ]
    for path in ours:
        path.write_bytes(b"x")
    old(ours[0], STALE_AGE + 60)
    fresh = directory / Owner("engine", "0" * 12, 1).temporary_name()
    fresh.write_bytes(b"x")
    again = Bench(tmp_path, engine_id="engine")
    assert [path for path in ours if path.exists()] == []
    assert [path for path in [*theirs, fresh] if not path.exists()] == []
    assert again.lookup(whole) == [HIT] * 3
    neighbour.tier.shutdown()


def test_killed_at_any_moment_leaves_whole_files_and_nothing_else(tmp_path: Path) -> None:
    """Mutation: writing in place instead of renaming leaves short files."""
    chance, whole = random.Random(7), 0
    for kill in range(6):
        process = start(tmp_path, f"kill{kill}", 32, "busy")
        await_ready(process)
        assert process.stdout is not None
        for _ in range(kill):
            process.stdout.readline()
        time.sleep(chance.random() * 0.004)  # a batch was begun
        process.kill()
        process.wait()
        files = chunk_files(tmp_path)
        after = Bench(tmp_path, engine_id="engine", num_rows=max(1, len(files)))
        keys = [OffloadKey(bytes.fromhex(path.name)) for path in files]
        assert after.load(keys).success
        assert all(bytes(row) == content(key, ROW) for row, key in zip(after.rows, keys, strict=False))
        assert after.stat("tier_bytes_used|tier=fs") == len(files) * FRAME
        assert not temporaries(tmp_path)
        whole += len(files)
    assert whole


def test_the_private_generation_of_a_killed_engine_is_collected(tmp_path: Path) -> None:
    process = start(tmp_path, "victim", 2, "reset")
    await_ready(process)
    assert len(chunk_files(tmp_path)) == 2
    assert collect_private_generations(Files(), str(tmp_path), Owner.of("engine")) == 0, "it lives"
    process.kill()
    process.wait()
    assert collect_private_generations(Files(), str(tmp_path), Owner.of("whoever")) == 1
    assert len(list((tmp_path / "v1").iterdir())) == 1, "the shared directory stays"
    assert not chunk_files(tmp_path)


def test_two_engines_on_one_root_at_once(tmp_path: Path) -> None:
    """Both store, load and remove the same 32 keys; nobody ever reads a wrong byte or fails."""
    processes = [start(tmp_path, name, 32, "loop") for name in ("one", "two")]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
    for process in processes:
        process.communicate("go\n", timeout=60)
        assert process.returncode == 0
    assert not temporaries(tmp_path)
    third = Bench(tmp_path, num_rows=32)
    keys = keys_of("shared", 32)
    assert third.lookup(keys) == [HIT] * 32
    assert third.load(keys).success
    assert all(bytes(row) == content(key, ROW) for row, key in zip(third.rows, keys, strict=True))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of its own with room for about ten chunks."""
    target = tmp_path / "disk"
    target.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={10 * FRAME + 16 * ROW}", "tmpfs", target],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    yield target
    subprocess.run(["umount", "-l", target], check=True)


def test_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Chunks go to make room for others; what is there can be loaded all the time."""
    bench = Bench(small_disk, num_rows=32)
    keys, more = keys_of("a", 32), keys_of("b", 4)
    bench.fill(keys)
    stored = bench.store(keys)
    assert 5 <= len(stored.successful_keys) < 32
    assert not temporaries(small_disk)
    assert bench.failures("store").keys() == {"no_space"}
    assert len([record for record in caplog.records if "No space left" in record.message]) == 1
    bench.wipe()
    assert bench.load(stored.successful_keys).success
    assert all(bytes(row) == content(key, ROW) for row, key in zip(bench.rows, stored.successful_keys, strict=False))
    bench.fill(more)
    assert bench.store(more).success
    assert bench.stat("evictions_total|tier=fs") == 4
    bench.wipe()
    assert bench.load(more).success
    assert bench.stat("tier_bytes_used|tier=fs") == len(chunk_files(small_disk)) * FRAME
    bench.assert_idle()


def test_a_disk_that_is_mounted_read_only(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = keys_of("a", 4)
    Bench(small_disk).store(keys)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    bench = Bench(small_disk)
    assert len([record for record in caplog.records if "cannot be written: Read-only" in record.message]) == 1
    assert bench.lookup(keys) == [HIT] * 4
    assert bench.load(keys).success
    assert not bench.store(keys_of("b", 2)).success
    other = Bench(small_disk / "deeper" / "root")
    assert not other.store(keys).success
    other.assert_idle()


@pytest.mark.parametrize("engine_id", ["engine", "a-b-c", "../../etc", "x" * 300, "", "ü ", "a/b", "a_b"])
def test_any_engine_id_makes_a_name_that_is_understood(engine_id: str) -> None:
    owner = Owner.of(engine_id)
    name = owner.temporary_name()
    assert "/" not in name
    assert len(name) < 200
    assert Owner.of_temporary(name) == owner
    assert name != owner.temporary_name()


def test_ids_that_look_alike_stay_apart() -> None:
    assert len({Owner.of(engine_id).engine for engine_id in ("a/b", "a_b", "a b", "x" * 48, "x" * 49, "")}) == 6
