"""Copy plans: pure, bounded, nothing twice; mid-chunk starts are byte exact (case 23)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.contract.messages import DeviceJob, GroupTransfer
from vllm_tiered_offload.worker.copy_engines.base import Direction
from vllm_tiered_offload.worker.copy_engines.host_copy import HostGroupCopier
from vllm_tiered_offload.worker.copy_plan import PlanBounds, plan_job, plan_transfer
from vllm_tiered_offload.worker.layout import build_group_layout

BOUNDS = PlanBounds(blocks_per_chunk=4, num_rows=10, num_blocks={0: 100, 1: 50})


@given(chunk=st.integers(1, 6), count=st.integers(1, 30), data=st.data())
def test_positions_follow_the_rows(chunk: int, count: int, data: st.DataObject) -> None:
    """Block i pairs with position first_sub_block + i of the rows laid end to end."""
    first = data.draw(st.integers(0, chunk - 1))
    rows = data.draw(st.permutations(range(40)))[: -(-(first + count) // chunk)]
    blocks = data.draw(st.permutations(range(60)))[:count]
    plan = plan_transfer(GroupTransfer(0, list(rows), list(blocks), first), PlanBounds(chunk, 40, {0: 60}))
    sequence = [(row, sub) for row in rows for sub in range(chunk)]
    assert list(zip(plan.rows, plan.sub_blocks, strict=True)) == sequence[first : first + count]
    assert plan.device_blocks.tolist() == list(blocks)


REFUSED = {
    "unknown group": (GroupTransfer(7, [0], [1]), "KV group 7"),
    "row outside": (GroupTransfer(0, [10], [1]), "row 10 is outside 0..9"),
    "row negative": (GroupTransfer(0, [-1], [1]), "row -1"),
    "block outside": (GroupTransfer(0, [0], [100]), "device block 100"),
    "block outside of its group": (GroupTransfer(1, [0], [50]), "device block 50"),
    "row twice": (GroupTransfer(0, [3, 3], [1, 2, 3, 4, 5]), "row 3 occurs"),
    "block twice": (GroupTransfer(0, [3], [1, 2, 1]), "device block 1 occurs"),
    "too few rows": (GroupTransfer(0, [3], [1, 2, 3, 4, 5]), "do not match"),
    "too many rows": (GroupTransfer(0, [3, 4], [1, 2, 3, 4]), "do not match"),
    "rows without blocks": (GroupTransfer(0, [3], []), "do not match"),
    "offset spills over": (GroupTransfer(0, [3], [1, 2], 3), "do not match"),
    "offset outside": (GroupTransfer(0, [3, 4], [1, 2], 4), "first sub block 4"),
    "offset negative": (GroupTransfer(0, [3], [1, 2], -1), "first sub block -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """A plan is checked completely before a byte moves: an index outside would be another tensor's memory."""
    transfer, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        plan_transfer(transfer, BOUNDS)
    with pytest.raises(ValueError, match="job 5: "):
        plan_job(DeviceJob(5, "r", [transfer]), BOUNDS)


def test_nothing_twice_across_groups() -> None:
    """vLLM's groups share one block pool and one region."""
    one, same_block, same_row = GroupTransfer(0, [1], [7]), GroupTransfer(1, [2], [7]), GroupTransfer(1, [1], [8])
    with pytest.raises(ValueError, match="device block 7"):
        plan_job(DeviceJob(1, "r", [one, same_block]), BOUNDS)
    with pytest.raises(ValueError, match="row 1"):
        plan_job(DeviceJob(1, "r", [one, same_row]), BOUNDS)
    assert len(plan_job(DeviceJob(1, "r", [one, GroupTransfer(1, [2], [8]), GroupTransfer(1, [], [])]), BOUNDS)) == 2


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_load_from_the_middle_of_a_chunk(offset: int) -> None:
    """Case 23: chunk = 4 device blocks, 3 chunks stored, the device still has the first `4 + offset` blocks.

    An off-by-one in first_sub_block, or starting at the chunk's head, makes this fail.
    """
    kv = torch.arange(40 * 8, dtype=torch.int32).view(40, 8)
    layout = build_group_layout(0, {"x": kv}, 40, 16)
    slots = np.full((10, 4 * 32), 0xEE, np.uint8)
    copier = HostGroupCopier(layout, slots, 4)
    bounds = PlanBounds(4, 10, {0: 40})
    stored = list(range(5, 17))
    store = plan_transfer(GroupTransfer(0, [8, 2, 5], stored), bounds)
    copier.copy(Direction.STORE, store, 0, store.num_blocks)
    before = kv.clone()
    missing = stored[4 + offset :]
    targets = list(range(39, 39 - len(missing), -1))
    load = plan_transfer(GroupTransfer(0, [2, 5], targets, offset), bounds)
    copier.copy(Direction.LOAD, load, 0, load.num_blocks)
    expected = before.clone()
    expected[targets] = before[missing]
    assert torch.equal(kv, expected)
