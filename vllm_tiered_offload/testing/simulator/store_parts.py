"""What a step stores, request by request: one store job carries the chunks of many."""

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
    (transfer,) = job.transfers
    blocks_per_row = len(transfer.device_block_ids) // len(transfer.rows)
    parts, begin = [], 0
    for state, keys in zip(record.states, record.store.parts(), strict=True):
        end = begin + len(keys)
        blocks = transfer.device_block_ids[begin * blocks_per_row : end * blocks_per_row]
        moved = GroupTransfer(transfer.group_idx, transfer.rows[begin:end], blocks)
        parts.append(DeviceJob(job.job_id, state.req_id, [moved]))
        begin = end
    return parts
