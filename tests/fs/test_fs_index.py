"""The index: bytes add up, the oldest goes first, and never more than the capacity is promised."""

import tracemalloc

import pytest
from fs_kit import Clock, keys_of
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.fs import index as index_module
from vllm_tiered_offload.tiers.fs.index import ExpiringKeys, KeyIndex, Victims


def write(index: KeyIndex, key, size: int = 1) -> list[OffloadKey]:
    """The victims of a write that goes well; there must be room for it."""
    [victims] = index.reserve([size])
    index.settle(key, size, victims, written=True)
    return [victim for victim, _ in victims]


def test_the_least_recently_used_leaves_and_tails_before_heads() -> None:
    index, (a, b, c, d, e, f) = KeyIndex(4), keys_of("k", 6)
    for key in (a, b, c, d):
        write(index, key)
    index.touch([a, b])  # one prefix: b is its tail
    order = []
    for key in (e, f, *keys_of("more", 2)):
        order += write(index, key)
    assert order == [c, d, b, a]
    index.check()


def test_what_is_read_stays_and_is_a_candidate_again_later() -> None:
    index, (a, b, c, d) = KeyIndex(2), keys_of("k", 4)
    write(index, a)
    write(index, b)
    index.begin_reads([a])
    assert write(index, c) == [b]
    index.begin_reads([c])
    assert index.reserve([1]) == [], "everything is being read"
    index.end_reads([a, c])
    assert write(index, d) == [a]
    index.check()


def test_victims_count_until_they_are_really_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A victim larger than the need leaves a surplus that nobody may use before the unlink."""
    index, (big, small, other) = KeyIndex(3), keys_of("k", 3)
    index.add(big, 3)
    [victims] = index.reserve([1])
    assert victims == [(big, 3)]
    assert index.used == 3
    assert index.reserve([1]) == []
    index.settle(small, 1, victims, written=True)
    assert index.used == 1
    write(index, other)
    index.check()


def test_of_several_files_as_many_as_fit_each_with_victims_of_its_own() -> None:
    index, (a, b, c) = KeyIndex(4), keys_of("k", 3)
    index.add(a, 1)
    index.add(b, 1)
    index.begin_reads([b])
    assert list(map(list, index.reserve([1, 1, 1, 1]))) == [[], [], [(a, 1)]]
    assert index.used == 4
    for key in keys_of("new", 2):
        index.settle(key, 1, (), written=True)
    index.settle(c, 1, [(a, 1)], written=False)
    index.check()
    assert index.used == 3


def test_victims_that_stayed_are_back() -> None:
    index, (a, b) = KeyIndex(1), keys_of("k", 2)
    write(index, a)
    [victims] = index.reserve([1])
    index.settle(b, 1, victims, written=False, kept=[a])
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
        index.begin_reads([key])
    assert write(index, keys[10]) == [keys[9]]


@given(st.lists(st.tuples(st.sampled_from("awtrefg"), st.integers(0, 11), st.integers(1, 3)), max_size=80))
@settings(deadline=None)
def test_bytes_add_up_whatever_happens(steps) -> None:
    keys, index = keys_of("k", 12), KeyIndex(8)
    disk: dict[bytes, int] = {}  # what the files really are
    open_writes: list[tuple[OffloadKey, int, Victims]] = []
    reads: list[bytes] = []
    for action, number, size in steps:
        key = keys[number]
        if action == "w" and key not in index.present and key not in index.leaving:
            if all(other != key for other, _, _ in open_writes):
                open_writes += [(key, size, victims) for victims in index.reserve([size])]
        elif action == "a" and open_writes:
            written, its_size, victims = open_writes.pop(number % len(open_writes))
            for victim, _ in victims:
                disk.pop(victim)
            disk[written] = its_size
            assert sum(disk.values()) <= 8, "the capacity was exceeded"
            index.settle(written, its_size, victims, written=True)
        elif action == "f" and open_writes:
            failed, its_size, victims = open_writes.pop(number % len(open_writes))
            index.settle(failed, its_size, victims, written=False, kept=[victim for victim, _ in victims])
        elif action == "t":
            index.touch([key])
        elif action == "r":
            index.begin_reads([key])
            reads.append(key)
        elif action == "e" and reads:
            index.end_reads([reads.pop()])
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
