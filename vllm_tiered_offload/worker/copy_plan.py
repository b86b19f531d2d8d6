"""From a job's message to index arrays. Pure: no tensor, no region.

The rows of a transfer, each `blocks_per_chunk` blocks long, are one sequence of blocks; device block i of the transfer
pairs with position `first_sub_block + i` of that sequence. A plan spells this out as three vectors of one length.
"""

from dataclasses import dataclass

import numpy as np

from vllm_tiered_offload.contract.messages import DeviceJob, GroupTransfer


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Block pairs of one KV group: device block `device_blocks[i]` <-> block `sub_blocks[i]` of row `rows[i]`.

    int64 vectors of one length, in prefix order.
    """

    group_idx: int
    rows: np.ndarray
    sub_blocks: np.ndarray
    device_blocks: np.ndarray

    @property
    def num_blocks(self) -> int:
        """Device blocks to copy."""
        return len(self.device_blocks)

    def part(self, start: int, stop: int) -> "CopyPlan":
        """Entries `start` to `stop`."""
        return CopyPlan(
            self.group_idx, self.rows[start:stop], self.sub_blocks[start:stop], self.device_blocks[start:stop]
        )


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """What a plan may address: `num_rows` region rows, and `num_blocks[g]` device blocks in KV group g."""

    blocks_per_chunk: int
    num_rows: int
    num_blocks: dict[int, int]


def plan_transfer(transfer: GroupTransfer, bounds: PlanBounds) -> CopyPlan:
    """The index vectors of one transfer. Raises ValueError when it addresses what does not exist, or anything twice."""
    limit = bounds.num_blocks.get(transfer.group_idx)
    if limit is None:
        raise ValueError(f"KV group {transfer.group_idx} is not offloaded by this worker")
    count, first, chunk = len(transfer.device_block_ids), transfer.first_sub_block, bounds.blocks_per_chunk
    if first < 0 or (first >= chunk and transfer.rows):
        raise ValueError(f"first sub block {first} is outside the first chunk of {chunk} blocks")
    if -(-(first + count) // chunk) != len(transfer.rows):
        raise ValueError(
            f"{len(transfer.rows)} rows of {chunk} blocks do not match {count} device blocks from sub block {first} on"
        )
    rows = np.array(transfer.rows, np.int64)
    device_blocks = np.array(transfer.device_block_ids, np.int64)
    _refuse_outside("row", rows, bounds.num_rows)
    _refuse_outside("device block", device_blocks, limit)
    _refuse_twice("row", rows)
    _refuse_twice("device block", device_blocks)
    position = np.arange(first, first + count, dtype=np.int64)
    return CopyPlan(transfer.group_idx, rows[position // chunk], position % chunk, device_blocks)


def plan_job(job: DeviceJob, bounds: PlanBounds) -> tuple[CopyPlan, ...]:
    """Plans of all transfers of a job, empty ones left out. Raises ValueError; the text names the job.

    Rows and physical device blocks must be distinct over the whole job: vLLM's groups share one block pool and one
    region, so an id that shows up in two transfers would be copied twice.
    """
    try:
        plans = tuple(plan_transfer(transfer, bounds) for transfer in job.transfers)
        if len(plans) > 1:
            _refuse_twice("row", np.concatenate([transfer.rows for transfer in job.transfers]))
            _refuse_twice("device block", np.concatenate([plan.device_blocks for plan in plans]))
    except ValueError as error:
        raise ValueError(f"job {job.job_id}: {error}") from None
    return tuple(plan for plan in plans if plan.num_blocks)


def _refuse_outside(what: str, ids: np.ndarray, limit: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= limit):
        wrong = ids[(ids < 0) | (ids >= limit)][0]
        raise ValueError(f"{what} {wrong} is outside 0..{limit - 1}")


def _refuse_twice(what: str, ids: np.ndarray) -> None:
    ordered = np.sort(ids)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if again.size:
        raise ValueError(f"{what} {int(again[0])} occurs more than once")
