"""The index: bytes add up, the oldest goes first, and never more than the capacity is promised."""

import tracemalloc

import pytest
from fs_kit import Clock, keys_of
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.fs import index as index_module
from vllm_tiered_offload.tiers.fs.index import ExpiringKeys, KeyIndex, Reservation

pytestmark = pytest.mark.fast


def write(index: KeyIndex, key, size: int = 1) -> Reservation | None:
    reservation = index.reserve(key, size)
    if reservation is not None:
        index.settle(reservation, written=True)
    return reservation


def test_the_least_recently_used_leaves_and_tails_before_heads() -> None:
    index, (a, b, c, d, e, f) = KeyIndex(4), keys_of("k", 6)
    for key in (a, b, c, d):
        write(index, key)
    index.touch([a, b])  # one prefix: b is its tail
    order = []
    for key in (e, f, *keys_of("more", 2)):
        order += [victim for victim, _ in write(index, key).victims]
    assert order == [c, d, b, a]
    index.check()


def test_what_is_read_stays_and_is_a_candidate_again_later() -> None:
    index, (a, b, c, d) = KeyIndex(2), keys_of("k", 4)
    write(index, a)
    write(index, b)
    index.begin_read(a)
    assert [victim for victim, _ in write(index, c).victims] == [b]
    index.begin_read(c)
    assert index.reserve(d, 1) is None, "everything is being read"
    index.end_read(a)
    index.end_read(c)
    assert [victim for victim, _ in write(index, d).victims] == [a]
    index.check()


def test_victims_count_until_they_are_really_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A victim larger than the need leaves a surplus that nobody may use before the unlink."""
    index, (big, small, other) = KeyIndex(3), keys_of("k", 3)
    index.add(big, 3)
    reservation = index.reserve(small, 1)
    assert reservation.victims == [(big, 3)]
    assert index.used == 3
    assert index.reserve(other, 1) is None
    index.settle(reservation, written=True)
    assert index.used == 1


def test_victims_that_stayed_are_back() -> None:
    index, (a, b) = KeyIndex(1), keys_of("k", 2)
    write(index, a)
    index.settle(index.reserve(b, 1), written=False, kept=[a])
    assert list(index.present) == [a]
    assert index.evictions == 0
    index.check()


def test_a_thousand_pinned_keys_do_not_hide_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_CANDIDATES", 4)
    keys = keys_of("k", 12)
    index = KeyIndex(10)
    for key in keys[:10]:
        write(index, key)
    for key in keys[:9]:
        index.begin_read(key)
    assert [victim for victim, _ in write(index, keys[10]).victims] == [keys[9]]


@given(st.lists(st.tuples(st.sampled_from("awtrefg"), st.integers(0, 11), st.integers(1, 3)), max_size=80))
@settings(deadline=None)
def test_bytes_add_up_whatever_happens(steps) -> None:
    keys, index = keys_of("k", 12), KeyIndex(8)
    disk: dict[bytes, int] = {}  # what the files really are
    open_writes: list[Reservation] = []
    reads: list[bytes] = []
    for action, number, size in steps:
        key = keys[number]
        if action == "w" and key not in index.present and key not in index.leaving:
            if all(write.key != key for write in open_writes) and (made := index.reserve(key, size)):
                open_writes.append(made)
        elif action == "a" and open_writes:
            done = open_writes.pop(number % len(open_writes))
            for victim, _ in done.victims:
                disk.pop(victim)
            disk[done.key] = done.size
            assert sum(disk.values()) <= 8, "the capacity was exceeded"
            index.settle(done, written=True)
        elif action == "f" and open_writes:
            done = open_writes.pop(number % len(open_writes))
            index.settle(done, written=False, kept=[victim for victim, _ in done.victims])
        elif action == "t":
            index.touch([key])
        elif action == "r":
            index.begin_read(key)
            reads.append(key)
        elif action == "e" and reads:
            index.end_read(reads.pop())
        elif action == "g" and index.remove(key):
            disk.pop(key)
        index.check()
        assert index.used <= 8


def test_a_key_takes_little_memory() -> None:
    number, index = 50_000, KeyIndex(1 << 50)
    tracemalloc.start()
    try:
        for i in range(number):
            index.add(OffloadKey(i.to_bytes(36, "big")), 1 << 20)
        assert tracemalloc.get_traced_memory()[0] / number < 200
    finally:
        tracemalloc.stop()


def test_expiring_keys_end_in_time() -> None:
    clock = Clock()
    keys, (a, b) = ExpiringKeys(5, clock), keys_of("k", 2)
    keys.add([a])
    clock.now += 3
    keys.add([b])
    keys.add([a])
    clock.now += 4
    keys.purge()
    assert len(keys) == 2
    clock.now += 1
    keys.purge()
    assert not len(keys)
