"""The memory tier as the suite drives it, and tiers that are broken on purpose, one mistake each."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from vllm_tiered_offload import (
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    SecondaryTierManager,
)
from vllm_tiered_offload.testing.conformance import Faults
from vllm_tiered_offload.testing.fakes.memory_tier import MemoryTier


class SelfDrivingMemoryTier(MemoryTier):
    """Runs what waits in each scheduling pass, and after a drain or a shutdown; the fake alone waits for its test."""

    @classmethod
    def from_settings(
        cls, raw: Mapping[str, Any], path: str, *, engine_id: str, events: bool = False
    ) -> "SelfDrivingMemoryTier":
        unknown = raw.keys() - {"retries"}
        if unknown:
            raise ValueError(f"{path}.{min(unknown)}: unknown key")
        tier = cls(**raw)
        tier.drains = True
        return tier

    def on_schedule_end(self) -> None:
        super().on_schedule_end()
        self.run_jobs()

    def shutdown(self) -> None:
        self.run_jobs()
        super().shutdown()


class _Everything(set[OffloadKey]):
    """Contains every key."""

    def __contains__(self, key: object) -> bool:
        return True


class MemoryFaults(Faults):
    def lose(self, tier: SecondaryTierManager, key: OffloadKey) -> None:
        assert isinstance(tier, SelfDrivingMemoryTier)
        tier.lose(key)

    @contextmanager
    def broken(self, tier: SecondaryTierManager) -> Iterator[None]:
        assert isinstance(tier, SelfDrivingMemoryTier)
        tier.bad_keys = _Everything()
        yield
        tier.bad_keys = set()


class Broken(SelfDrivingMemoryTier):
    """Base of the broken ones: `results` is what the healthy tier would say."""

    def results(self) -> list[JobResult]:
        return list(super().get_finished_jobs())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return self.results()


class DoubleResult(Broken):
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [result for result in self.results() for _ in range(2)]


class LateDoubleResult(Broken):
    """The second one comes a while later, as of a job that was retried."""

    again: JobResult | None = None
    due = 0.0

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = self.results()
        if self.again is not None and time.monotonic() > self.due:
            results.append(self.again)
            self.again = None
        elif self.again is None and results:
            self.again, self.due = results[-1], time.monotonic() + 0.03
        return results


class LostResult(Broken):
    """Every third job never ends."""

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [result for result in self.results() if result.job_id % 3]


class ForeignKey(Broken):
    def get_finished_jobs(self) -> Iterable[JobResult]:
        extra = OffloadKey(b"nobody asked for this")
        return [JobResult(r.job_id, r.success, (*r.successful_keys, extra)) for r in self.results()]


class WritesNeighbour(SelfDrivingMemoryTier):
    """An offset that is one row too far, for the last byte."""

    def _move(self, job: JobMetadata, key: OffloadKey, row: int, *, fail: bool) -> bool:
        good = super()._move(job, key, row, fail=fail)
        if job.is_promotion and row + 1 < len(self._rows or ()):
            (self._rows or ())[row + 1][0] ^= 0xFF
        return good


class WritesWhenItStores(SelfDrivingMemoryTier):
    """Encrypts in place, say."""

    def _move(self, job: JobMetadata, key: OffloadKey, row: int, *, fail: bool) -> bool:
        good = super()._move(job, key, row, fail=fail)
        if not job.is_promotion:
            (self._rows or ())[row][0] ^= 0xFF
        return good


class TouchesRowLater(SelfDrivingMemoryTier):
    """The result is sent before the copy has really ended."""

    def _move(self, job: JobMetadata, key: OffloadKey, row: int, *, fail: bool) -> bool:
        good = super()._move(job, key, row, fail=fail)
        if job.is_promotion and good:
            threading.Timer(0.02, self._rewrite, (row, self.chunks[key])).start()
        return good

    def _rewrite(self, row: int, chunk: bytes) -> None:
        (self._rows or ())[row][:] = chunk


class ReadsRowLater(SelfDrivingMemoryTier):
    """Keeps a view of the row instead of its bytes."""

    def _move(self, job: JobMetadata, key: OffloadKey, row: int, *, fail: bool) -> bool:
        good = super()._move(job, key, row, fail=fail)
        if good and not job.is_promotion:
            self.chunks[key] = (self._rows or ())[row]  # type: ignore[assignment]
        return good


class ShortAnswer(SelfDrivingMemoryTier):
    """Stops at the first miss, as if a prefix were all that matters."""

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        answers = super().lookup(keys, req_context)
        misses = [index for index, answer in enumerate(answers) if answer is LookupResult.MISS]
        return answers[: misses[0] + 1] if misses else answers


class NeverSure(SelfDrivingMemoryTier):
    def _look_up(self, key: OffloadKey) -> LookupResult:
        return LookupResult.HIT if key in self.chunks else LookupResult.RETRY


class Blocks(SelfDrivingMemoryTier):
    def submit_load(self, job: JobMetadata) -> None:
        threading.Event().wait(0.3)
        super().submit_load(job)


class OpensFile(SelfDrivingMemoryTier):
    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        with open("/dev/null", "rb"):
            return super().lookup(keys, req_context)


class AllOrNothing(Broken):
    """One absent key costs the whole batch."""

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [r if r.success else JobResult(r.job_id, False, ()) for r in self.results()]


class OptimisticLoads(SelfDrivingMemoryTier):
    """Says that everything came."""

    def _move(self, job: JobMetadata, key: OffloadKey, row: int, *, fail: bool) -> bool:
        super()._move(job, key, row, fail=fail)
        return True


class SwapsRows(SelfDrivingMemoryTier):
    """Sorts what it loads."""

    def submit_load(self, job: JobMetadata) -> None:
        rows = tuple(sorted(job.block_ids))
        super().submit_load(JobMetadata(job.job_id, job.keys, rows, True, job.req_context))


class IgnoresGroup(SelfDrivingMemoryTier):
    """Drops the last four bytes of a key."""

    def _move(self, job: JobMetadata, key: OffloadKey, row: int, *, fail: bool) -> bool:
        return super()._move(job, OffloadKey(key[:-4]), row, fail=fail)

    def _look_up(self, key: OffloadKey) -> LookupResult:
        return super()._look_up(OffloadKey(key[:-4]))


class ForgetsOnlyTheIndex(SelfDrivingMemoryTier):
    """A reset that a load does not feel."""

    kept: Mapping[OffloadKey, bytes] = {}

    def reset(self) -> None:
        self.kept = dict(self.chunks)
        super().reset()

    def _move(self, job: JobMetadata, key: OffloadKey, row: int, *, fail: bool) -> bool:
        if job.is_promotion and key in self.kept:
            self.chunks.setdefault(key, self.kept[key])
        return super()._move(job, key, row, fail=fail)


class ResetDoesNotReachJobs(SelfDrivingMemoryTier):
    """A store in flight at a reset leaves its chunk after it."""

    def reset(self) -> None:
        super().reset()
        self._first_job = 0


class ResetLosesJobs(SelfDrivingMemoryTier):
    def reset(self) -> None:
        super().reset()
        self.waiting = deque()


class EndsWithItsRequest(SelfDrivingMemoryTier):
    """Drops the jobs of a request when it finishes."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.waiting = deque(job for job in self.waiting if job.req_context != req_context)


class DrainHangs(SelfDrivingMemoryTier):
    def drain(self, timeout: float) -> bool:
        threading.Event().wait(timeout + 5)
        return True


class DrainLies(SelfDrivingMemoryTier):
    def drain(self, timeout: float) -> bool:
        return True

    def on_schedule_end(self) -> None:
        self.run_jobs(1)


class SecondShutdownRaises(SelfDrivingMemoryTier):
    gone = False

    def shutdown(self) -> None:
        if self.gone:
            raise RuntimeError("shut down already")
        self.gone = True
        super().shutdown()


class NeedsRegionFirst(SelfDrivingMemoryTier):
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        assert self._rows is not None
        return super().on_new_request(req_context)


class NestedStats(SelfDrivingMemoryTier):
    def get_stats(self) -> Mapping[str, int | float]:
        return {"memory_chunks": {"now": len(self.chunks)}}  # type: ignore[dict-item]


class OneStore(SelfDrivingMemoryTier):
    """All instances of the process share a class attribute, whatever the fingerprint."""

    shared: ClassVar[dict[OffloadKey, bytes]] = {}

    def __init__(self, *, retries: int = 0) -> None:
        super().__init__(retries=retries)
        self.chunks = self.shared


class LoopsOnLostChunks(SelfDrivingMemoryTier):
    """Says HIT again after a load has found nothing."""

    def _move(self, job: JobMetadata, key: OffloadKey, row: int, *, fail: bool) -> bool:
        lost = set(self.lost_keys)
        good = super()._move(job, key, row, fail=fail)
        self.lost_keys |= lost
        return good


class RaisesInTrouble(Broken):
    """Lets the medium's error out, and the results are gone with it."""

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = self.results()
        if any(not result.success for result in results):
            raise OSError("input/output error")
        return results


BROKEN: dict[type[SecondaryTierManager], str] = {
    DoubleResult: "test_each_job_has_one_result",
    LateDoubleResult: "test_each_job_has_one_result",
    LostResult: "test_each_job_has_one_result",
    ForeignKey: "test_each_job_has_one_result",
    WritesNeighbour: "test_neighbour_rows_stay",
    WritesWhenItStores: "test_store_only_reads_its_rows",
    TouchesRowLater: "test_no_row_is_touched_after_its_result",
    ReadsRowLater: "test_stored_rows_may_be_overwritten_after_the_result",
    ShortAnswer: "test_stored_key_becomes_a_hit",
    NeverSure: "test_unknown_key_becomes_a_miss",
    Blocks: "test_no_call_holds_up_the_calling_thread",
    OpensFile: "test_no_file_and_no_socket_on_the_calling_thread",
    AllOrNothing: "test_absent_key_fails_alone",
    OptimisticLoads: "test_absent_key_is_never_called_loaded",
    SwapsRows: "test_bytes_come_back",
    IgnoresGroup: "test_groups_are_told_apart",
    ForgetsOnlyTheIndex: "test_reset_forgets",
    ResetDoesNotReachJobs: "test_jobs_in_flight_at_a_reset_end_once",
    ResetLosesJobs: "test_jobs_in_flight_at_a_reset_end_once",
    EndsWithItsRequest: "test_results_come_after_the_request_finished",
    DrainHangs: "test_drain_ends_with_the_jobs",
    DrainLies: "test_drain_ends_with_the_jobs",
    SecondShutdownRaises: "test_shutdown_twice",
    NeedsRegionFirst: "test_requests_and_polls_may_come_before_the_region",
    NestedStats: "test_stats_are_flat_numbers",
    LoopsOnLostChunks: "test_lost_chunk_fails_alone",
    RaisesInTrouble: "test_broken_store_leaves_no_hit",
    OneStore: "test_other_fingerprint_is_another_namespace",
}
"""Each broken tier, and the test of the suite that finds it."""
