"""The index: bytes add up, the oldest goes first, and never more than the capacity is promised."""

import tracemalloc

import pytest
from fs_kit import Clock, keys_of
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.cpu.policies.arc import ArcPolicy
from vllm_tiered_offload.tiers.cpu.policies.lru import LruPolicy
from vllm_tiered_offload.tiers.expiring_keys import ExpiringKeys
from vllm_tiered_offload.tiers.fs.faults import Fault
from vllm_tiered_offload.tiers.fs.index import KeyIndex, Write

UNIT = 4097  # bytes of a file


def new_index(units: int | None, policy: type = LruPolicy) -> KeyIndex:
    capacity = None if units is None else units * UNIT
    return KeyIndex(capacity, UNIT, policy(units or 1000))


def new_write(key: OffloadKey, units: int = 1) -> Write:
    return Write(key, memoryview(b""), units * UNIT, [])


def reserve(index: KeyIndex, *keys: OffloadKey, units: int = 1, req: str = "r") -> list[Write]:
    """The writes of one job that there is room for."""
    writes = [new_write(key, units) for key in keys]
    return writes[: index.reserve(writes, keys, req)]


def store(index: KeyIndex, *keys: OffloadKey, req: str = "r") -> list[OffloadKey]:
    """The victims of a job that goes well; there must be room for all of it."""
    writes = reserve(index, *keys, req=req)
    assert len(writes) == len(keys)
    index.settle(writes)
    return victims_of(writes)


def victims_of(writes: list[Write]) -> list[OffloadKey]:
    return [victim for write in writes for victim, _ in write.victims]


def test_the_oldest_request_goes_first_and_its_tail_before_its_head() -> None:
    """However its writes end. Mutation: telling the policy of a key when its write ends, which is in any order."""
    index, (a, b, c, d, e, f) = new_index(4), keys_of("k", 6)
    first, second = reserve(index, a, b, req="1"), reserve(index, c, d, req="2")
    for write in (second[1], first[1], first[0], second[0]):
        index.settle([write])
    index.touch([a], "3")
    order = []
    for key in (e, f, *keys_of("more", 2)):
        order += store(index, key, req="4")
    assert order == [b, d, c, a]
    index.check()


def test_a_job_never_evicts_its_own_prefix() -> None:
    index, (a, b, c, d) = new_index(3), keys_of("k", 4)
    store(index, a, b, req="1")
    store(index, c, req="2")
    assert victims_of(reserve(index, a, b, d, req="3")) == [c]


def test_what_is_read_stays_and_is_a_candidate_again_later() -> None:
    index, (a, b, c, d) = new_index(2), keys_of("k", 4)
    store(index, a, req="1")
    store(index, b, req="2")
    index.begin_reads([a])
    assert store(index, c, req="3") == [b]
    index.begin_reads([c])
    assert reserve(index, d) == [], "everything is being read"
    index.end_reads([a, c])
    assert store(index, d) == [a]
    index.check()


def test_of_several_files_as_many_as_fit_each_with_victims_of_its_own() -> None:
    index, (a, b, *more) = new_index(4), keys_of("k", 6)
    store(index, a, req="1")
    store(index, b, req="2")
    index.begin_reads([b])
    writes = reserve(index, *more, req="3")
    assert [[victim for victim, _ in write.victims] for write in writes] == [[], [], [a]]
    assert index.used == 4 * UNIT
    writes[2].fault, writes[2].kept = Fault.IO, [a]
    index.settle(writes)
    index.check()
    assert index.used == 4 * UNIT
    assert index.evictions == 0


def test_victims_count_until_they_are_really_gone() -> None:
    """A victim larger than the need leaves a surplus that nobody may use before the unlink."""
    index, (big, small, other) = new_index(3), keys_of("k", 3)
    index.add([(big, 3 * UNIT)])
    writes = reserve(index, small)
    assert writes[0].victims == [(big, 3 * UNIT)]
    assert index.used == 3 * UNIT
    assert reserve(index, other) == []
    index.settle(writes)
    assert index.used == UNIT
    store(index, other)
    index.check()


def test_a_bound_that_came_down_is_kept_by_evicting() -> None:
    index, keys = new_index(10), keys_of("k", 6)
    for number, key in enumerate(keys):
        store(index, key, req=str(number))
    index.begin_reads(keys[:1])
    index.capacity = 2 * UNIT
    victims = index.trim()
    assert [key for key, _ in victims] == keys[1:5]
    assert index.used == 6 * UNIT, "until they are gone"
    assert not index.trim()
    index.end_trim(victims, kept=keys[1:2])
    assert index.used == 3 * UNIT
    assert index.evictions == 3
    index.check()


def test_a_scan_knows_things_as_they_were() -> None:
    """Mutation: without what has changed, a scan brings back what was evicted and takes away what was stored."""
    index, (old, read, gone, new, evicted, found) = new_index(9), keys_of("k", 6)
    store(index, old, read, gone, evicted)
    index.begin_scan()
    assert sorted(index.snapshot()) == sorted([old, read, gone, evicted])
    index.remove([evicted])
    index.remove([read])
    store(index, new)
    assert index.take_scanned([(evicted, UNIT), (read, UNIT), (found, 2 * UNIT)], [gone, new]) == [gone]
    index.end_scan()
    assert index.present == {old, new, found}
    assert index.used == 4 * UNIT
    index.check()


@pytest.mark.parametrize("policy", [LruPolicy, ArcPolicy])
@given(st.data())
@settings(deadline=None)
def test_bytes_add_up_whatever_happens(policy: type, data: st.DataObject) -> None:
    keys, index = keys_of("k", 12), new_index(8, policy)
    disk: dict[bytes, int] = {}  # what the files really are
    writes: list[Write] = []
    trims: list = []
    reads: list[OffloadKey] = []
    steps = st.lists(st.tuples(st.sampled_from("wwafstregxcq"), st.integers(0, 11), st.integers(1, 3)), max_size=80)
    for action, number, units in data.draw(steps):
        key, req = keys[number], str(number % 3)
        if action == "w":
            free = [one for one in keys[number : number + units] if one not in index.present]
            free = [one for one in free if one not in index.writing and one not in index.leaving]
            writes += reserve(index, *free, units=units, req=req)
        elif action in "af" and writes:
            write = writes.pop(number % len(writes))
            if action == "a":
                for victim, _ in write.victims:
                    disk.pop(victim)
                disk[write.key] = write.size
                assert sum(disk.values()) <= 8 * UNIT, "the capacity was exceeded"
            else:
                write.fault, write.kept = Fault.IO, [victim for victim, _ in write.victims]
            index.settle([write])
        elif action == "s":
            index.end_request(req)
        elif action == "t":
            index.touch([key], req)
        elif action == "r":
            index.begin_reads([key])
            reads.append(key)
        elif action == "e" and reads:
            index.end_reads([reads.pop()])
        elif action == "g" and index.remove([key]):
            disk.pop(key)
        elif action == "x" and index.used + units * UNIT <= 8 * UNIT and key not in disk:
            index.add([(key, units * UNIT)], req)
            disk.update({key: units * UNIT} if key in index.present else {})
        elif action == "c":
            index.ceiling = None if units == 3 else units * 2 * UNIT
            trims.append(index.trim())
        elif action == "q" and trims:
            victims = trims.pop()
            kept = [victim for victim, _ in victims[:1]]
            for victim, _ in victims[1:]:
                disk.pop(victim)
            index.end_trim(victims, kept)
        index.check()
        assert index.used <= 8 * UNIT


@pytest.mark.parametrize("a_request", [64, 256])
def test_a_key_takes_little_memory(a_request: int) -> None:
    number, index = 51_200, new_index(1 << 30)
    tracemalloc.start()
    try:
        for begin in range(0, number, a_request):
            index.add([(OffloadKey(i.to_bytes(36, "big")), UNIT) for i in range(begin, begin + a_request)])
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
