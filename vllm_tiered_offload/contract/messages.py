"""What travels between the scheduler half and the worker half. Plain data: pickled by vLLM between processes.

A device job moves chunks between device blocks and region rows, and may span KV groups. Each job that a
worker was told of is acknowledged by every rank exactly once (`WorkerReport.acks`), success or failure.
"""

from dataclasses import dataclass, field

from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry


@dataclass(slots=True)
class GroupTransfer:
    """The part of a job that belongs to one KV group.

    The rows, each `blocks_per_chunk` blocks long, are seen as one sequence of blocks in prefix order; device block
    `device_block_ids[i]` pairs with position `first_sub_block + i` of it. A load that starts in the middle of a chunk
    has `first_sub_block > 0`. The last row may be covered in part.
    """

    group_idx: int
    rows: list[int]
    device_block_ids: list[int]
    first_sub_block: int = 0


@dataclass(slots=True)
class DeviceJob:
    """One store or load, as the worker half sees it.

    A load is one request's, `req_id`. A store carries what one step completed, of any number of requests: it has none.
    """

    job_id: int
    req_id: str
    transfers: list[GroupTransfer]


@dataclass(slots=True)
class StepMessage:
    """Scheduler half -> worker half, once a step."""

    loads: list[DeviceJob] = field(default_factory=list)
    stores: list[DeviceJob] = field(default_factory=list)
    # Loads whose bytes are no longer wanted (a reset came in between): the worker lets them end and then reports
    # each as a failed receive.
    cancelled_loads: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RegionAnnouncement:
    """How another process of this engine opens the host region: /proc/<pid>/fd/<fd>, checked against the inode."""

    pid: int
    fd: int
    inode: int
    geometry: RegionGeometry
    fingerprint: Fingerprint | None = None  # of the bytes in the rows (D5)


@dataclass(slots=True)
class JobAck:
    """Which ranks have ended a job, and the first failure text if any rank failed.

    Ranks are named and not counted, since a report may come twice: vLLM 0.33 replays a failed worker's last output.
    """

    ranks: int = 1  # a bit for each: 1 << rank
    error: str | None = None


@dataclass(slots=True)
class WorkerReport:
    """Worker half -> scheduler half, once a step; reports of the ranks of one step are merged.

    Never falsy: vLLM drops a falsy worker output and with it the tick.
    """

    acks: dict[int, JobAck] = field(default_factory=dict)
    region: RegionAnnouncement | None = None
    broken: str | None = None  # why some rank's copy engine takes no more jobs, for good

    def __bool__(self) -> bool:
        return True

    def merge(self, other: "WorkerReport") -> "WorkerReport":
        """Fold another rank's report of the same step into this one and return it."""
        for job_id, ack in other.acks.items():
            mine = self.acks.get(job_id)
            if mine is None:
                self.acks[job_id] = JobAck(ack.ranks, ack.error)
            else:
                mine.ranks |= ack.ranks
                mine.error = mine.error or ack.error
        self.region = self.region or other.region
        self.broken = self.broken or other.broken
        return self
