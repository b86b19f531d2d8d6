"""A secondary tier in memory whose jobs run when the test says so, and fail as it says.

It behaves like a real one where that is hard for the layers above: a job that was submitted before a reset still runs
late, still writes into its rows, and then ends as failed without leaving anything; a load that fails leaves rubbish in
its row; an old chunk may have gone although a lookup has just said that it is there.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import (
    JobMetadata,
    JobResult,
    LookupResult,
    ReqContext,
    RequestOffloadingContext,
)
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import ResidencyEvent, SecondaryTierManager

RUBBISH = b"\xd3\x0b" * 8  # what a broken read leaves behind


class TierFault(OSError):
    """The trouble that a test ordered."""


class MemoryTier(SecondaryTierManager):
    """Keeps copies of rows in a dictionary. `calls` has every submit-side call with its request, in order."""

    medium = "memory"

    def __init__(self, *, retries: int = 0) -> None:
        self.chunks: dict[OffloadKey, bytes] = {}
        self.waiting: deque[JobMetadata] = deque()  # submitted, not run
        self.calls: list[tuple[str, str]] = []
        self.bad_keys: set[OffloadKey] = set()  # reads and writes of these fail
        self.lost_keys: set[OffloadKey] = set()  # gone, but still answered HIT, until a load has found out
        self.raising: set[str] = set()  # methods that raise
        self.retries = retries  # how often a key is answered RETRY before it is known
        self.drains = False  # whether drain runs what waits
        self._asked: dict[OffloadKey, int] = {}
        self._results: list[JobResult] = []
        self._rows: Sequence[memoryview] | None = None
        self._first_job = 0  # position of the first submitted job after the last reset
        self._numbers: dict[int, int] = {}  # waiting job -> its position among all submitted
        self._submitted = 0

    @classmethod
    def from_settings(cls, raw: Mapping[str, Any], path: str, *, engine_id: str, events: bool = False) -> "MemoryTier":  # noqa: ARG003
        return cls(**raw)

    def _enter(self, method: str, req_context: ReqContext | None = None) -> None:
        self.calls.append((method, req_context.req_id if req_context is not None else ""))
        self._maybe_raise(method)

    def _maybe_raise(self, method: str) -> None:
        if method in self.raising:
            raise TierFault(f"{method} was told to fail")

    def bind_region(
        self,
        rows: Sequence[memoryview],
        geometry: RegionGeometry,  # noqa: ARG002
        fingerprint: Fingerprint,  # noqa: ARG002
    ) -> None:
        self._enter("bind_region")
        self._rows = rows

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._enter("on_new_request", req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._enter("on_request_finished", req_context)

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        self._enter("lookup", req_context)
        return [self._look_up(key) for key in keys]

    def _look_up(self, key: OffloadKey) -> LookupResult:
        asked = self._asked[key] = self._asked.get(key, 0) + 1
        if asked <= self.retries:
            return LookupResult.RETRY
        return LookupResult.HIT if key in self.chunks or key in self.lost_keys else LookupResult.MISS

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002
        self._maybe_raise("touch")

    # ---- jobs --------------------------------------------------------------------------------------------------

    def submit_store(self, job: JobMetadata) -> None:
        self._enter("submit_store", job.req_context)
        self._accept(job)

    def submit_load(self, job: JobMetadata) -> None:
        self._enter("submit_load", job.req_context)
        self._accept(job)

    def _accept(self, job: JobMetadata) -> None:
        self._numbers[job.job_id] = self._submitted
        self._submitted += 1
        self.waiting.append(job)

    def run_jobs(self, count: int | None = None, *, fail: bool = False) -> int:
        """Run waiting jobs, oldest first (all by default); with `fail` each ends without a key done."""
        ran = 0
        while self.waiting and (count is None or ran < count):
            self.run_job(self.waiting[0], fail=fail)
            ran += 1
        return ran

    def run_job(self, job: JobMetadata, *, fail: bool = False) -> None:
        """Run this waiting job now, whatever waits before it."""
        self.waiting.remove(job)
        outdated = self._numbers.pop(job.job_id) < self._first_job
        done = [
            key
            for key, row in zip(job.keys, job.block_ids, strict=True)
            if self._move(job, key, row, fail=fail or outdated)
        ]
        self._results.append(JobResult(job.job_id, len(done) == len(job.keys), tuple(done)))

    def _move(self, job: JobMetadata, key: OffloadKey, row: int, *, fail: bool) -> bool:
        view = self._rows[row] if self._rows is not None else memoryview(bytearray())
        fail = fail or key in self.bad_keys
        if not job.is_promotion:
            if not fail:
                self.chunks[key] = bytes(view)
                self.lost_keys.discard(key)
            return not fail
        chunk = self.chunks.get(key)
        if fail or chunk is None:
            view[:] = RUBBISH * (len(view) // len(RUBBISH))
            self.lost_keys.discard(key)
            return False
        view[:] = chunk
        return True

    def lose(self, key: OffloadKey) -> None:
        """The chunk goes behind the tier's back."""
        if self.chunks.pop(key, None) is not None:
            self.lost_keys.add(key)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._maybe_raise("get_finished_jobs")
        results, self._results = self._results, []
        return results

    def on_schedule_end(self) -> None:
        self._maybe_raise("on_schedule_end")

    def has_pending_work(self) -> bool:
        return bool(self.waiting)

    # ---- the whole tier ----------------------------------------------------------------------------------------

    def drain(self, timeout: float) -> bool:  # noqa: ARG002
        self._enter("drain")
        if self.drains:
            self.run_jobs()
        return not self.waiting

    def reset(self) -> None:
        """Jobs that wait now end as failed when they run, and leave nothing."""
        self._enter("reset")
        self.chunks.clear()
        self.lost_keys.clear()
        self._asked.clear()
        self._first_job = self._submitted

    def ask_anew(self) -> None:
        """Every key's answer is unknown again, for `retries` questions."""
        self._asked.clear()

    def take_events(self) -> list[ResidencyEvent]:
        self._maybe_raise("take_events")
        return []

    def get_stats(self) -> Mapping[str, int | float]:
        self._maybe_raise("get_stats")
        return {}
