"""A writer killed at random moments; ci/crash_fs.sh does the same a hundred times."""

from pathlib import Path

from fs_crash import KILLS_A_RESET, ROW_BYTES, Tally, crash, look_at_the_remains, restart
from fs_kit import Bench, keys_of, make_rows

from vllm_tiered_offload.tiers.fs.owner import Owner, host_token

DEAD = Owner("engine", host_token(), 2**30)


def test_case_39_nothing_is_left_of_a_killed_writer(tmp_path: Path) -> None:
    """Mutations that fail here: writing in place (corrupt), not collecting temporaries or private generations
    (leftovers), counting a temporary as used (used bytes), unlinking victims after the write (capacity)."""
    tally = crash(tmp_path, 5, seed=1)
    assert tally.is_clean, tally
    assert (tally.kills, tally.corrupt, tally.leftovers) == (5, 0, 0)
    assert tally.chunks
    assert tally.kills > KILLS_A_RESET, "shared and private writers were among them"


def test_wrong_bytes_are_counted_before_and_after_a_restart(tmp_path: Path) -> None:
    """The counting itself can fail."""
    keys = keys_of("writer 0 0 ", 4)
    bench = Bench(tmp_path, rows=make_rows(4, ROW_BYTES))
    bench.store(keys)  # whole frames around bytes that are no key's
    flip(bench.path(keys[0]), 5000)
    tally = Tally()
    look_at_the_remains(tmp_path, tally)
    assert (tally.corrupt, tally.chunks) == (1, 4)
    restart(tmp_path, keys, tally)
    assert tally.corrupt == 1 + 3
    assert tally.other, "one that a lookup promised could not be loaded"
    assert not tally.is_clean


def test_leftovers_are_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.tier.reset()
    bench.store(keys_of("a", 1))
    (bench.path(keys_of("a", 1)[0]).parent / DEAD.temporary_name()).write_bytes(b"x")
    tally = Tally()
    restart(tmp_path, [], tally)
    assert tally.leftovers == 2
    assert str(tally) == "0 kills, 0 corrupt, 2 leftovers"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
