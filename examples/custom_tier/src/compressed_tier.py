"""A secondary tier that keeps compressed chunks in memory: the example of docs/writing_a_tier.md.

- The scheduler thread owns the chunks and the list of open jobs. The worker thread gets all that it needs with a task
  and answers through a queue, which the scheduler thread empties in its own calls: no locks, and no call on the
  scheduler thread waits for zlib.
- A result is made when the worker has let go of the job's last row: after it nobody here touches those rows.
- No deadlines and no retries: the guard around every tier has both. What fails is reported as failed.
- `reset` begins a new epoch. What an older one still compresses ends as failed and leaves nothing.
"""

import queue
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import vllm_tiered_offload as vto
from pydantic import Field
from vllm_tiered_offload import Fingerprint, JobMetadata, JobResult, LookupResult, OffloadKey, ReqContext
from vllm_tiered_offload.settings import Block, ByteSize, validate_block


class CompressedTierSettings(Block):  # the tier's block in the configuration; `Block` refuses unknown keys
    capacity: ByteSize = Field(gt=0, description="Bytes of compressed chunks.")
    level: int = Field(default=1, ge=1, le=9, description="zlib's level.")


@dataclass(slots=True)
class _Task:  # one job on its way through the worker thread and back
    job: JobMetadata
    epoch: int
    chunks: dict[OffloadKey, bytes]  # of a load: what there was when it was submitted; of a store: what came of it
    good: list[OffloadKey] = field(default_factory=list)


class CompressedTier(vto.SecondaryTierManager):
    medium = "compressed"

    def __init__(self, settings: CompressedTierSettings) -> None:
        self.settings = settings
        self._chunks: dict[OffloadKey, bytes] = {}  # the oldest first
        self._used = 0  # bytes of all chunks; never more than the capacity
        self._open: set[int] = set()  # jobs without a result
        self._results: list[JobResult] = []  # results that nobody took yet
        self._epoch = 0  # counts resets
        self._rows: Sequence[memoryview] = ()
        self._closing = False
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()  # None ends the worker
        self._done: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="compressed-tier", daemon=True)

    @classmethod
    def from_settings(cls, raw: Mapping[str, Any], path: str, *, engine_id: str, events: bool = False) -> Self:
        return cls(validate_block(CompressedTierSettings, raw, path))

    def bind_region(self, rows: Sequence[memoryview], geometry: vto.RegionGeometry, fingerprint: Fingerprint) -> None:
        self._rows = rows  # the fingerprint is for tiers whose bytes outlive or leave the process
        self._worker.start()

    # The scheduler thread calls these; none of them waits.
    def on_new_request(self, req_context: ReqContext) -> vto.RequestOffloadingContext:
        return vto.RequestOffloadingContext()

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        self._absorb()
        return [LookupResult.HIT if key in self._chunks else LookupResult.MISS for key in keys]

    def submit_store(self, job: JobMetadata) -> None:
        self._submit(_Task(job, self._epoch, {}))

    def submit_load(self, job: JobMetadata) -> None:
        self._absorb()
        self._submit(_Task(job, self._epoch, {key: self._chunks[key] for key in job.keys if key in self._chunks}))

    def _submit(self, task: _Task) -> None:
        self._open.add(task.job.job_id)
        self._tasks.put(task)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._absorb()
        results, self._results = self._results, []
        return results

    def has_pending_work(self) -> bool:
        return bool(self._open or self._results)

    def _absorb(self, timeout: float = 0.0) -> None:
        """Take in what the worker has done, waiting up to `timeout` seconds for the first of it."""
        with suppress(queue.Empty):
            while True:
                self._end(self._done.get(timeout > 0, timeout or None))
                timeout = 0.0

    def _end(self, task: _Task) -> None:
        good = task.good if task.epoch == self._epoch else []
        for key in reversed(task.job.keys):  # the tail of a prefix leaves before its head
            if not task.job.is_promotion and key in good:
                self._drop(key)
                self._chunks[key] = task.chunks[key]
                self._used += len(task.chunks[key])
            elif task.job.is_promotion and key not in task.good and self._chunks.get(key) is task.chunks.get(key):
                self._drop(key)  # damaged: the next request must not fail on it again
        while self._used > self.settings.capacity:
            self._drop(next(iter(self._chunks)))
        self._open.discard(task.job.job_id)
        self._results.append(JobResult(task.job.job_id, len(good) == len(task.job.keys), tuple(good)))

    def _drop(self, key: OffloadKey) -> None:
        self._used -= len(self._chunks.pop(key, b""))

    def get_stats(self) -> Mapping[str, int | float]:
        return {"tier_bytes_used|tier=compressed": self._used, "tier_chunks|tier=compressed": len(self._chunks)}

    # Another thread calls these, while the scheduler thread waits.
    def drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        self._absorb()
        while self._open and (left := deadline - time.monotonic()) > 0:
            self._absorb(left)
        return not self._open

    def reset(self) -> None:
        self._epoch += 1
        self._chunks, self._used = {}, 0

    def shutdown(self) -> None:
        self._closing = True
        self._tasks.put(None)
        if self._worker.is_alive():
            self._worker.join(2.0)

    def _work(self) -> None:
        """The worker thread."""
        while (task := self._tasks.get()) is not None:
            for key, row in zip(task.job.keys, task.job.block_ids, strict=True):
                if self._closing:
                    break
                with suppress(KeyError, ValueError, zlib.error):  # absent, or damaged: this key fails alone
                    if task.job.is_promotion:
                        self._rows[row][:] = zlib.decompress(task.chunks[key])
                    else:
                        task.chunks[key] = zlib.compress(self._rows[row], self.settings.level)
                    task.good.append(key)
            self._done.put(task)
