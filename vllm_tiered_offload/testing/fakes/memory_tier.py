"""A secondary tier in memory whose jobs run when the test says so, and fail as it says."""

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
from vllm_tiered_offload.contract.managers import SecondaryTierManager


class MemoryTier(SecondaryTierManager):
    """Keeps copies of rows in a dictionary. `calls` has every submit-side call with its request, in order."""

    medium = "memory"

    def __init__(self, *, retries: int = 0) -> None:
        self.chunks: dict[OffloadKey, bytes] = {}
        self.waiting: deque[JobMetadata] = deque()  # submitted, not run
        self.calls: list[tuple[str, str]] = []
        self.bad_keys: set[OffloadKey] = set()  # reads of these fail
        self.raising: set[str] = set()  # methods that raise
        self.retries = retries  # how often a key is answered RETRY before it is known
        self._asked: dict[OffloadKey, int] = {}
        self._results: list[JobResult] = []
        self._rows: Sequence[memoryview] | None = None

    @classmethod
    def from_settings(cls, raw: Mapping[str, Any], path: str, *, engine_id: str) -> "MemoryTier":  # noqa: ARG003
        return cls(**raw)

    def _enter(self, method: str, req_context: ReqContext | None = None) -> None:
        self.calls.append((method, req_context.req_id if req_context is not None else ""))
        if method in self.raising:
            raise OSError(f"{method} was told to fail")

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
        return LookupResult.HIT if key in self.chunks else LookupResult.MISS

    def submit_store(self, job: JobMetadata) -> None:
        self._enter("submit_store", job.req_context)
        self.waiting.append(job)

    def submit_load(self, job: JobMetadata) -> None:
        self._enter("submit_load", job.req_context)
        self.waiting.append(job)

    def run_jobs(self, count: int | None = None, *, fail: bool = False) -> int:
        """Run waiting jobs, oldest first (all by default); with `fail` each ends without a key done."""
        ran = 0
        while self.waiting and (count is None or ran < count):
            self._run(self.waiting.popleft(), fail)
            ran += 1
        return ran

    def _run(self, job: JobMetadata, fail: bool) -> None:
        done = [] if fail else [pair for pair in zip(job.keys, job.block_ids, strict=True) if self._move(job, *pair)]
        keys = tuple(key for key, _ in done)
        self._results.append(JobResult(job.job_id, len(keys) == len(job.keys), keys))

    def _move(self, job: JobMetadata, key: OffloadKey, row: int) -> bool:
        if key in self.bad_keys:
            return False
        view = self._rows[row] if self._rows is not None else memoryview(bytearray())
        if not job.is_promotion:
            self.chunks[key] = bytes(view)
            return True
        if key not in self.chunks:
            return False
        view[:] = self.chunks[key]
        return True

    def get_finished_jobs(self) -> Iterable[JobResult]:
        if "get_finished_jobs" in self.raising:
            raise OSError("get_finished_jobs was told to fail")
        results, self._results = self._results, []
        return results

    def has_pending_work(self) -> bool:
        return bool(self.waiting)

    def drain(self, timeout: float) -> bool:  # noqa: ARG002
        self._enter("drain")
        return not self.waiting

    def reset(self) -> None:
        self._enter("reset")
        self.chunks.clear()
        self._asked.clear()
