"""`fs verify`: every kind of damage is found, named by file, and tells in the exit code."""

import errno
import os
import threading
from pathlib import Path

import pytest
from cli_kit import Command
from fs_kit import FRAME, Bench, FaultyFiles, chunk_files, fingerprint, keys_of

from vllm_tiered_offload.cli import fs as commands
from vllm_tiered_offload.tiers.block_frame import HEADER_BYTES

KEYS = keys_of("a", 6)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.fill(KEYS)
    assert bench.store(KEYS).success
    return bench


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_all_is_well(tmp_path: Path, bench: Bench, fs: Command) -> None:
    outcome = fs("verify", tmp_path)
    assert outcome.code == 0
    assert "6 chunks (48 KiB) read: 0 bad" in outcome.out
    found = fs("verify", tmp_path, "--json").json
    assert (found["chunks"], found["bytes"], found["bad"], found["unchecked"]) == (6, 6 * FRAME, [], [])


@pytest.mark.parametrize("position", [0, 8, 40, 70, 90, HEADER_BYTES - 1, HEADER_BYTES, FRAME - 1])
def test_a_flipped_bit_is_found_and_the_file_named(tmp_path: Path, bench: Bench, fs: Command, position: int) -> None:
    """Mutation: reading the header alone misses the last two."""
    flip(bench.path(KEYS[3]), position)
    before = {path: path.read_bytes() for path in chunk_files(tmp_path)}
    outcome = fs("verify", tmp_path)
    assert outcome.code == 1
    lines = outcome.out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(str(bench.path(KEYS[3])))
    assert {path: path.read_bytes() for path in chunk_files(tmp_path)} == before, "nothing is changed"


def test_every_kind_of_damage_has_its_word(tmp_path: Path, bench: Bench, fs: Command) -> None:
    paths = [bench.path(key) for key in KEYS]
    other = Bench(tmp_path, model=fingerprint(model="other"))
    other.store(KEYS[:1])
    paths[0].write_bytes(other.path(KEYS[0]).read_bytes())
    paths[1].write_bytes(paths[2].read_bytes())
    os.truncate(paths[2], FRAME - 1)
    with paths[3].open("ab") as file:
        file.write(b"x")
    paths[4].write_bytes(b"")
    flip(paths[5], FRAME - 7)
    outcome = fs("verify", tmp_path, "--json")
    assert outcome.code == 1
    kinds = {file["path"]: file["kind"] for file in outcome.json["bad"]}
    words = ["foreign", "foreign", "short", "foreign", "short", "corrupt"]
    assert kinds == {str(path): word for path, word in zip(paths, words, strict=True)}
    assert outcome.json["chunks"] == 7


def test_a_bad_manifest_is_bad_and_a_missing_one_is_not(tmp_path: Path, bench: Bench, fs: Command) -> None:
    manifest = Path(bench.tier.namespace_path) / "manifest.json"
    text = manifest.read_text()
    other = Bench(tmp_path / "other", model=fingerprint(model="other"))
    other.store(KEYS)
    for bad in ["", "{", "[]", text[:-10], (Path(other.tier.namespace_path) / "manifest.json").read_text()]:
        manifest.write_text(bad)
        outcome = fs("verify", tmp_path)
        assert outcome.code == 1
        assert outcome.out.startswith(f"{manifest}: foreign: ")
    manifest.unlink()
    assert fs("verify", tmp_path).code == 0


def test_what_cannot_be_read_is_not_called_bad(
    tmp_path: Path, bench: Bench, fs: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FaultyFiles()
    files.fail("open", errno.EIO, match=KEYS[1].hex())
    monkeypatch.setattr(commands, "Files", lambda: files)
    outcome = fs("verify", tmp_path, "--json")
    assert outcome.code == 3
    assert outcome.json["bad"] == []
    assert [file["path"] for file in outcome.json["unchecked"]] == [str(bench.path(KEYS[1]))]
    flip(bench.path(KEYS[2]), 5000)
    assert fs("verify", tmp_path).code == 1, "what is bad comes first"


def test_engines_may_store_and_evict_meanwhile(tmp_path: Path, fs: Command) -> None:
    """No half file is ever seen: neither bad nor unchecked, whatever happens to be there."""
    stop, started = threading.Event(), threading.Event()

    def churn() -> None:
        bench = Bench(tmp_path, real_lanes=True, capacity=8 * FRAME)
        for round_ in range(10_000):
            bench.tier.on_schedule_end()
            keys = keys_of(f"round {round_}", 8)
            bench.fill(keys)
            if bench.store(keys).success:
                started.set()
            if stop.is_set():
                break
        bench.tier.shutdown()

    thread = threading.Thread(target=churn)
    thread.start()
    assert started.wait(20)
    try:
        outcomes = [fs("verify", tmp_path, "--json") for _ in range(20)]
    finally:
        stop.set()
        thread.join()
    assert {outcome.code for outcome in outcomes} == {0}
    assert sum(outcome.json["chunks"] for outcome in outcomes)


def test_what_is_evicted_before_its_turn_does_not_count(
    tmp_path: Path, bench: Bench, fs: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FaultyFiles()
    files.fail("open", errno.ENOENT, match=KEYS[1].hex())
    monkeypatch.setattr(commands, "Files", lambda: files)
    outcome = fs("verify", tmp_path, "--json")
    assert outcome.code == 0
    assert (outcome.json["chunks"], outcome.json["bytes"]) == (5, 5 * FRAME)
