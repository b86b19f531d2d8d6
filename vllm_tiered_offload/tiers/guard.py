"""A guard around a secondary tier (V4): whatever the tier does, the layer above sees a tier that keeps its contract.

    submitted --result--> ended                          the tier's own word, checked
        |
        +--deadline--> overdue --late result--> released  a failed result at the deadline; the rows stay the tier's
                                                          until its late I/O really ends (D4)

Every job has exactly one result and exactly one release, and the release never comes before the result. A tier that
raises in any method, answers nonsense, or is late counts a failure. After `breaker_failures` failures in a row the
breaker opens: lookups miss and jobs fail at once, without a call to the tier. After `breaker_cooldown` seconds it is
half open: one probe job may pass; its success closes the breaker, its failure opens it again.

A tier that was told to forget and did not (yet) may have chunks from before the reset. It is off until it has (L6).

The scheduler thread is never held up here: the calls that may block (drain, reset, shutdown) run on a thread of the
guard's own and are waited for within a bound.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

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
from vllm_tiered_offload.contract.managers import ResidencyEvent, RowLeases, SecondaryTierManager
from vllm_tiered_offload.contract.seams import Clock, monotonic

logger = logging.getLogger(__name__)

GRACE_SECONDS = 0.5  # on top of the time that a blocking call was given itself

R = TypeVar("R")


class Breaker(Enum):
    """Whether the tier is asked at all."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """Times in seconds."""

    job_timeout: float = 30.0
    breaker_failures: int = 5
    breaker_cooldown: float = 10.0


@dataclass(slots=True)
class _Job:
    job: JobMetadata
    deadline: float
    is_probe: bool
    outdated: bool = False  # submitted before a reset: that it fails says nothing about the tier


class TierGuard:
    """Calls one tier for the hierarchy. Scheduler thread only."""

    def __init__(
        self, tier: SecondaryTierManager, name: str, limits: GuardLimits = GuardLimits(), clock: Clock = monotonic
    ) -> None:
        self.tier = tier
        self.name = name
        self._limits = limits
        self._clock = clock
        self._jobs: dict[int, _Job] = {}  # submitted, no result yet
        self._overdue: dict[int, JobMetadata] = {}  # result given at the deadline, not released; disjoint from _jobs
        self._results: list[JobResult] = []  # results that the tier had no part in, not collected
        self._released: list[int] = []  # jobs whose rows nobody touches any more, not collected
        self._failures_in_a_row = 0
        self._breaker = Breaker.CLOSED
        self._opened_at = 0.0
        self._probing = False  # half open and the one probe is on its way
        self._resets = 0  # how often the tier was told to forget
        self._resets_done = 0  # the last of these that it carried out; set by another thread
        self.counters: Counter[str] = Counter()  # failures by kind, since the start

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def breaker(self) -> Breaker:
        """The breaker's state now; an open one becomes half open by time alone."""
        if self._breaker is Breaker.OPEN and self._clock() - self._opened_at >= self._limits.breaker_cooldown:
            self._breaker = Breaker.HALF_OPEN
            self._probing = False
            logger.warning("tier %s: trying again (one job) after %g s", self.name, self._limits.breaker_cooldown)
        return self._breaker

    @property
    def is_off(self) -> bool:
        """Not asked: its breaker is open, or it has not forgotten what it was told to forget."""
        return self.breaker is Breaker.OPEN or self._resets_done != self._resets

    @property
    def num_unreleased(self) -> int:
        """Jobs that may still touch their rows."""
        return len(self._jobs) + len(self._overdue)

    def _failed(self, kind: str, error: object = None) -> None:
        self.counters[kind] += 1
        self._failures_in_a_row += 1
        half_open = self._breaker is Breaker.HALF_OPEN
        if self._breaker is Breaker.OPEN or not (half_open or self._failures_in_a_row >= self._limits.breaker_failures):
            if self._breaker is Breaker.CLOSED:
                logger.warning("tier %s: %s%s", self.name, kind, f": {error}" if error else "")
            return
        self._breaker = Breaker.OPEN
        self._opened_at = self._clock()
        logger.error(
            "tier %s: switched off for %g s after %d failures in a row (last: %s%s)",
            self.name,
            self._limits.breaker_cooldown,
            self._failures_in_a_row,
            kind,
            f": {error}" if error else "",
        )

    def _succeeded(self) -> None:
        self._failures_in_a_row = 0
        if self._breaker is not Breaker.CLOSED:
            self._breaker = Breaker.CLOSED
            logger.warning("tier %s: works again", self.name)

    # ---- requests and lookups ----------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """The tier's policy for the request; the default where it has none to give."""
        answer = self._call("on_new_request", self.tier.on_new_request, req_context)
        return answer if isinstance(answer, RequestOffloadingContext) else RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._call("on_request_finished", self.tier.on_request_finished, req_context)

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        """One result per key; all misses where the tier is off or the answer cannot be used."""
        if self.is_off:
            return [LookupResult.MISS] * len(keys)
        results = self._call("lookup", self.tier.lookup, keys, req_context)
        if isinstance(results, list) and len(results) == len(keys) and set(map(type, results)) <= {LookupResult}:
            return results
        if results is not None:
            self._failed("lookup_nonsense")
        return [LookupResult.MISS] * len(keys)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if not self.is_off:
            self._call("touch", self.tier.touch, keys, req_context)

    def note_promoted(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if not self.is_off:
            self._call("note_promoted", self.tier.note_promoted, keys, req_context)

    def on_schedule_end(self) -> None:
        if self.breaker is not Breaker.OPEN:
            self._call("on_schedule_end", self.tier.on_schedule_end)

    # ---- jobs --------------------------------------------------------------------------------------------------

    @property
    def accepts_jobs(self) -> bool:
        """Whether a job submitted now would reach the tier."""
        return not self.is_off and (self.breaker is Breaker.CLOSED or not self._probing)

    def submit(self, job: JobMetadata) -> None:
        """Hand a job to the tier. It has exactly one result and one release, whatever happens."""
        if not self.accepts_jobs:
            self.counters["job_skipped"] += 1
            self._end(JobResult(job.job_id, False, ()), release=True)
            return
        is_probe = self.breaker is Breaker.HALF_OPEN
        self._probing = self._probing or is_probe
        self._jobs[job.job_id] = _Job(job, self._clock() + self._limits.job_timeout, is_probe)
        submit = self.tier.submit_load if job.is_promotion else self.tier.submit_store
        try:
            submit(job)
        except Exception as error:  # a tier's trouble stays here, whatever it is
            del self._jobs[job.job_id]
            self._failed("submit_raised", error)
            self._end(JobResult(job.job_id, False, ()), release=True)

    def collect(self) -> tuple[list[JobResult], list[int]]:
        """Results and releases since the last call. A release comes with its result, or in a later call."""
        for result in self._call("get_finished_jobs", lambda: list(self.tier.get_finished_jobs())) or ():
            self._take(result)
        now = self._clock()
        for job_id in [job_id for job_id, entry in self._jobs.items() if entry.deadline <= now]:
            self._overdue[job_id] = self._jobs.pop(job_id).job
            self._failed("job_timeout")
            self._end(JobResult(job_id, False, ()), release=False)
        results, self._results = self._results, []
        released, self._released = self._released, []
        return results, released

    def _take(self, result: object) -> None:
        if not isinstance(result, JobResult):
            self._failed("result_nonsense")
            return
        if self._overdue.pop(result.job_id, None) is not None:
            self._released.append(result.job_id)
            return
        entry = self._jobs.pop(result.job_id, None)
        if entry is None:
            self._failed("result_unknown")
            return
        if entry.is_probe:
            self._probing = False
        kept = entry.job.keys
        if result.successful_keys != kept:
            good = set(result.successful_keys)
            kept = tuple(key for key in kept if key in good)
        whole = result.success and len(kept) == len(entry.job.keys)
        # A part that came through shows that the tier works; single bad blocks are counted by the tier itself.
        if whole or kept:
            self._succeeded()
        elif not entry.job.is_promotion and set(entry.job.keys) == set(result.skipped_keys):
            pass  # nothing was tried, so nothing is known; a probe is asked for again
        elif not entry.outdated and (entry.job.is_promotion or entry.is_probe):
            self._failed("job_failed")
        elif not entry.outdated:
            # A medium that is full or read-only takes nothing, and what it has can still be loaded.
            self.counters["store_failed"] += 1
        self._end(JobResult(result.job_id, whole, kept), release=True)

    def _end(self, result: JobResult, *, release: bool) -> None:
        self._results.append(result)
        if release:
            self._released.append(result.job_id)

    # ---- the whole tier ----------------------------------------------------------------------------------------

    def bind_region(self, rows: Sequence[memoryview], geometry: RegionGeometry, fingerprint: Fingerprint) -> None:
        self._call("bind_region", self.tier.bind_region, rows, geometry, fingerprint)

    def bind_leases(self, leases: RowLeases) -> None:
        self._call("bind_leases", self.tier.bind_leases, leases)

    def take_events(self) -> list[ResidencyEvent]:
        return self._call("take_events", self.tier.take_events) or []

    def get_stats(self) -> Mapping[str, int | float]:
        return self._call("get_stats", self.tier.get_stats) or {}

    def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the tier's jobs; whether it says that all have ended."""
        return self._call_bounded("drain", lambda: self.tier.drain(timeout), timeout + GRACE_SECONDS) is True

    def reset(self, timeout: float) -> None:
        """Forget every key, within `timeout` seconds or in the background; until it is done the tier is off."""
        for entry in self._jobs.values():
            entry.outdated = True
        self._resets += 1
        number = self._resets

        def forget() -> None:
            self.tier.reset()
            self._resets_done = max(self._resets_done, number)

        self._call_bounded("reset", forget, timeout)
        if self._resets_done != self._resets:
            logger.error("tier %s: off until it has carried out the reset, or the next one", self.name)

    def shutdown(self, timeout: float) -> None:
        """Stop the tier; give up on it after `timeout` seconds."""
        self._call_bounded("shutdown", self.tier.shutdown, timeout)

    def _call(self, what: str, call: Callable[..., R], *args: object) -> R | None:
        """The tier's answer, or None when it raised."""
        try:
            return call(*args)
        except Exception as error:
            self._failed(f"{what}_raised", error)
            return None

    def _call_bounded(self, what: str, call: Callable[[], R], timeout: float) -> R | None:
        """As `_call`, on a thread that is left behind when it takes too long."""
        answer: list[R | None] = []
        thread = threading.Thread(
            target=lambda: answer.append(self._call(what, call)), name=f"tier-{what}", daemon=True
        )
        thread.start()
        thread.join(timeout)
        if thread.is_alive():
            self._failed(f"{what}_timeout")
        return answer[0] if answer else None
