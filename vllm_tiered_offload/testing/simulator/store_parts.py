"""What a step stores, request by request: one store job carries the chunks of many."""

from collections.abc import Iterator
from typing import Any

from vllm_tiered_offload.contract.messages import DeviceJob, GroupTransfer, StepMessage
from vllm_tiered_offload.scheduler.job_table import JobRecord


def stores_by_request(message: StepMessage, half: Any) -> list[DeviceJob]:
    """The message's store jobs, cut into one for each request under the same job id.

    `half`: the scheduler half that wrote the message. One of another make names the request in each job itself.
    """
    records: dict[int, JobRecord] = {record.job_id: record for record in getattr(half, "jobs_in_flight", ())}
    return [part for job in message.stores for part in _parts(job, records.get(job.job_id))]


def _parts(job: DeviceJob, record: JobRecord | None) -> list[DeviceJob]:
    if record is None or record.store is None:
        return [job]
    into = {row: part for transfer in job.transfers for row, part in _by_row(transfer)}
    rows = iter(record.store.block_ids)
    return [
        DeviceJob(job.job_id, state.req_id, _joined([into[next(rows)] for _ in keys]))
        for state, keys in zip(record.states, record.store.parts(), strict=True)
    ]


def _by_row(transfer: GroupTransfer) -> Iterator[tuple[int, GroupTransfer]]:
    """What goes into each row; several rows are filled from their start on, to the end."""
    per_row = len(transfer.device_block_ids) // len(transfer.rows)
    for index, row in enumerate(transfer.rows):
        blocks = transfer.device_block_ids[index * per_row : (index + 1) * per_row]
        yield row, GroupTransfer(transfer.group_idx, [row], blocks, transfer.first_sub_block)


def _joined(parts: list[GroupTransfer]) -> list[GroupTransfer]:
    """One transfer for the rows of a group that are filled from their start on."""
    joined: list[GroupTransfer] = []
    for part in parts:
        same = [one for one in joined if one.group_idx == part.group_idx and not one.first_sub_block]
        if part.first_sub_block or not same:
            joined.append(part)
        else:
            same[0].rows += part.rows
            same[0].device_block_ids += part.device_block_ids
    return joined
