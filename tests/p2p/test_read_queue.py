"""Rows are shared out among lanes and told of together, in whatever order they are added, taken and landed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload import OffloadKey
from vllm_tiered_offload.tiers.block_frame import Checksum, PayloadChecksum
from vllm_tiered_offload.tiers.p2p.instructions import Address, LandedRow, Source, Wanted
from vllm_tiered_offload.tiers.p2p.read_queue import LANES, READ_BYTES, ReadQueue, read_window

pytestmark = pytest.mark.fast

ROW_BYTES = READ_BYTES // 4
CHECKSUM = PayloadChecksum(Checksum.GMAC, ROW_BYTES, bytes(16))


def rows(first: int, count: int) -> list[Wanted]:
    return [
        Wanted(OffloadKey(b"%d" % part), part, Source(Address("a", 1), 1, 1, part, bytes(16), 9.0, part))
        for part in range(first, first + count)
    ]


def land(queue: ReadQueue, taken: list[Wanted]) -> list[int]:
    return [row.part_id[2] for row in queue.landed([LandedRow(wanted.part_id, CHECKSUM) for wanted in taken])]


def test_it_is_told_twice_of_what_was_wanted_at_once() -> None:
    """Made to fail by telling of each READ, and of all at the end."""
    queue = ReadQueue(ROW_BYTES)
    queue.add(rows(0, 16))
    told = [land(queue, queue.take()) for _ in range(9)]
    assert [len(some) for some in told if some] == [8, 8]
    assert queue.take() == []


def test_the_last_reads_are_small() -> None:
    """So that no lane reads on alone for long. Made to fail by READs of one size."""
    queue = ReadQueue(ROW_BYTES)
    queue.add(rows(0, 13))
    sizes = []
    while taken := queue.take():
        sizes.append(len(taken))
    assert sizes == [4, 4, 3, 1, 1]


@given(st.lists(st.sampled_from(["add", "take", "land first", "land last"])), st.integers(1, 40))
def test_each_row_is_told_of_once_and_none_is_kept_when_nothing_is_left_to_read(steps: list[str], count: int) -> None:
    """Made to fail by forgetting what had landed before more came."""
    queue = ReadQueue(ROW_BYTES)
    added, taken = 0, 0
    told: list[int] = []
    reading: list[list[Wanted]] = []
    for step in [*steps, *["take"] * count * len(steps), *["land first"] * count * len(steps)]:
        match step:
            case "add":
                queue.add(rows(added, count))
                added += count
            case "take":
                some = queue.take()
                taken += len(some)
                reading += [some] if some else []
            case _ if reading:
                told += land(queue, reading.pop(0 if step == "land first" else -1))
        if not reading and taken == added:
            assert sorted(told) == list(range(added))
    assert not reading
    assert taken == added


@pytest.mark.parametrize("row_bytes", [0, 1, 4096, 1 << 20, 8 << 20, 1 << 30])
def test_there_is_a_row_for_each_lane_whatever_their_size(row_bytes: int) -> None:
    assert read_window(row_bytes) >= 2 * LANES
    queue = ReadQueue(row_bytes)
    queue.add(rows(0, LANES))
    assert all(queue.take() for _ in range(LANES))
