"""One secondary tier, its rows, and the rules that hold in every test.

The bench knows what every row must hold. A row in a load is the tier's until the job's result, then what was loaded is
read out and the row is sealed with bytes that occur nowhere else. `check_rows` compares all rows that are not in a
load, so it finds a neighbour that was written, a row that was touched after its result, and a store that changed what
it should read.

All of the scheduler thread's calls are made through `call`; drain, reset and shutdown come from another thread, as the
guard makes them.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
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
from vllm_tiered_offload.contract.managers import SecondaryTierManager
from vllm_tiered_offload.testing.conformance.caller import Caller, call_bounded
from vllm_tiered_offload.testing.conformance.material import content, keys_of, make_rows

R = TypeVar("R")

_PAUSE = 0.002  # between two polls


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. `patience`: for anything that must come. `call`: for a call on the scheduler thread. `shutdown`: for
    shutdown, whatever hangs. `settle`: how long the kit watches for what must not come."""

    patience: float = 10.0
    call: float = 0.25
    shutdown: float = 15.0
    settle: float = 0.15


@dataclass(slots=True)
class Ended:
    """A job's result, and for a load the bytes of its successful keys."""

    job: JobMetadata
    result: JobResult
    loaded: dict[OffloadKey, bytes] = field(default_factory=dict)

    @property
    def good(self) -> list[OffloadKey]:
        """The keys that came through, in the job's order."""
        return [key for key in self.job.keys if key in set(self.result.successful_keys)]


class SecondaryBench:
    """Drives one tier as the hierarchy does."""

    def __init__(
        self,
        tier: SecondaryTierManager,
        geometry: RegionGeometry,
        fingerprint: Fingerprint,
        limits: Limits = Limits(),
        *,
        refuse_io: bool = False,
        bind: bool = True,
    ) -> None:
        self.tier = tier
        self.geometry = geometry
        self.limits = limits
        self.call = Caller(refuse_io=refuse_io)
        self.rows = make_rows(geometry)
        self.open: dict[int, JobMetadata] = {}  # submitted, no result yet
        self.ended: dict[int, Ended] = {}  # every result that came
        self._fingerprint = fingerprint
        self._ids = count(1)
        self._seals = count()
        self._expected: dict[int, bytes] = {}  # row -> what it must hold; a row that a load may write has no entry
        for row in range(geometry.num_rows):
            self.seal(row)
        if bind:
            self.bind()

    # ---- rows --------------------------------------------------------------------------------------------------

    def write(self, row: int, data: bytes) -> None:
        """Put bytes into a row, and expect them to stay."""
        self.rows[row][:] = data
        self._expected[row] = data

    def seal(self, row: int) -> None:
        """Fill a row with bytes that occur nowhere else."""
        self.write(row, hashlib.shake_128(f"seal {next(self._seals)}".encode()).digest(self.geometry.row_bytes))

    def check_rows(self) -> None:
        """Every row that is not in a load holds what it must."""
        changed = [row for row, data in self._expected.items() if bytes(self.rows[row]) != data]
        assert not changed, (
            f"rows {changed} were written by the tier although no job of these rows was a load in flight"
        )

    # ---- the scheduler thread's calls --------------------------------------------------------------------------

    def bind(self) -> None:
        self.call("bind_region", self.tier.bind_region, self.rows, self.geometry, self._fingerprint)

    def begin(self, req_id: str = "req") -> ReqContext:
        """Announce a request."""
        req = ReqContext(req_id)
        answer = self.call("on_new_request", self.tier.on_new_request, req)
        assert isinstance(answer, RequestOffloadingContext), f"on_new_request answered {answer!r}"
        return req

    def finish(self, req: ReqContext) -> None:
        """No more submits for it."""
        self.call("on_request_finished", self.tier.on_request_finished, req)

    def lookup(self, keys: Sequence[OffloadKey], req: ReqContext) -> list[LookupResult]:
        """The tier's answers at this moment, one a key."""
        answers = self.call("lookup", self.tier.lookup, keys, req)
        assert isinstance(answers, list), f"lookup answered a {type(answers).__name__}, the contract says a list"
        assert len(answers) == len(keys), f"lookup of {len(keys)} keys gave {len(answers)} answers"
        strange = [answer for answer in answers if not isinstance(answer, LookupResult)]
        assert not strange, f"lookup answered {strange}"
        return answers

    def resolve(self, keys: Sequence[OffloadKey], req: ReqContext) -> list[LookupResult]:
        """The answers once each is HIT or MISS. Nothing is submitted, scheduling passes alone must do."""
        known = (LookupResult.HIT, LookupResult.MISS)
        deadline = time.monotonic() + self.limits.patience
        while True:
            answers = self.lookup(keys, req)
            if all(answer in known for answer in answers):
                return answers
            waiting = next(answer for answer in answers if answer not in known)
            assert time.monotonic() < deadline, f"a key is still {waiting.name} after {self.limits.patience:g} s"
            self.poll()
            time.sleep(_PAUSE)

    def submit(
        self, keys: Sequence[OffloadKey], rows: Sequence[int] | None = None, *, load: bool, req: ReqContext
    ) -> int:
        """Hand a job to the tier; `keys[i]` goes with `rows[i]`, by default row i. Returns the job's id."""
        chosen = tuple(range(len(keys)) if rows is None else rows)
        job = JobMetadata(next(self._ids), tuple(keys), chosen, load, req)
        self.open[job.job_id] = job
        if load:
            for row in chosen:
                del self._expected[row]
            self.call("submit_load", self.tier.submit_load, job)
        else:
            self.call("submit_store", self.tier.submit_store, job)
        return job.job_id

    def poll(self) -> None:
        """One scheduling pass: what has ended is taken in."""
        self.call("on_schedule_end", self.tier.on_schedule_end)
        for result in self.call("get_finished_jobs", lambda: list(self.tier.get_finished_jobs())):
            self._take(result)

    def _take(self, result: object) -> None:
        assert isinstance(result, JobResult), f"get_finished_jobs gave {result!r}"
        assert result.job_id not in self.ended, f"job {result.job_id} has a second result"
        assert result.job_id in self.open, f"a result of job {result.job_id}, which was never submitted"
        job = self.open.pop(result.job_id)
        foreign = [key.hex() for key in result.successful_keys if key not in set(job.keys)]
        assert not foreign, f"job {job.job_id} reports keys that it was not given: {foreign}"
        whole = set(result.successful_keys) == set(job.keys)
        assert result.success == whole, f"job {job.job_id} says success={result.success}, but its keys say {whole}"
        ended = self.ended[job.job_id] = Ended(job, result)
        if job.is_promotion:
            rows = dict(zip(job.keys, job.block_ids, strict=True))
            ended.loaded = {key: bytes(self.rows[rows[key]]) for key in ended.good}
            for row in job.block_ids:
                self.seal(row)

    # ---- waiting -----------------------------------------------------------------------------------------------

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Make scheduling passes until `done`."""
        deadline = time.monotonic() + self.limits.patience
        while not done():
            assert time.monotonic() < deadline, f"{what} within {self.limits.patience:g} s did not happen"
            self.poll()
            time.sleep(_PAUSE)

    def wait(self, *job_ids: int) -> list[Ended]:
        """These jobs' ends."""
        self.wait_until(lambda: not any(job_id in self.open for job_id in job_ids), f"the results of jobs {job_ids}")
        return [self.ended[job_id] for job_id in job_ids]

    def wait_all(self) -> list[Ended]:
        """The ends of all jobs in flight."""
        return self.wait(*self.open)

    def wait_for_rows(self, rows: Sequence[int]) -> None:
        """Until no job in flight has one of these rows."""
        self.wait(*[job_id for job_id, job in self.open.items() if set(job.block_ids) & set(rows)])

    def watch(self) -> None:
        """Make scheduling passes for a while in which nothing should happen."""
        until = time.monotonic() + self.limits.settle
        while time.monotonic() < until:
            self.poll()
            time.sleep(_PAUSE)

    # ---- whole moves -------------------------------------------------------------------------------------------

    def start_store(
        self, keys: Sequence[OffloadKey], req: ReqContext, *, rows: Sequence[int] | None = None, salt: str = ""
    ) -> int:
        """Fill rows with the keys' bytes and submit a store."""
        chosen = range(len(keys)) if rows is None else rows
        for key, row in zip(keys, chosen, strict=True):
            self.write(row, content(key, self.geometry.row_bytes, salt))
        return self.submit(keys, chosen, load=False, req=req)

    def put(self, keys: Sequence[OffloadKey], req: ReqContext, *, salt: str = "") -> None:
        """Store keys, a region full at a time. A healthy tier may say no for a while, for example while it opens."""
        size = self.geometry.num_rows
        for start in range(0, len(keys), size):
            missing = list(keys[start : start + size])
            deadline = time.monotonic() + self.limits.patience
            while missing:
                [ended] = self.wait(self.start_store(missing, req, salt=salt))
                good = set(ended.good)
                missing = [key for key in missing if key not in good]
                assert not missing or time.monotonic() < deadline, (
                    f"{len(missing)} keys could not be stored within {self.limits.patience:g} s"
                )
        for row in range(size):
            self.seal(row)

    def warm_up(self, req: ReqContext) -> None:
        """Until the tier takes stores: one may say no while it opens its medium."""
        self.put(keys_of("warm up", 1), req)

    def get(self, keys: Sequence[OffloadKey], req: ReqContext, rows: Sequence[int] | None = None) -> Ended:
        """Load keys; the end of that job."""
        [ended] = self.wait(self.submit(keys, rows, load=True, req=req))
        return ended

    def wrong(self, ended: Ended, salt: str = "") -> list[OffloadKey]:
        """Keys of a load that were called successful and have other bytes than were stored."""
        size = self.geometry.row_bytes
        return [key for key, data in ended.loaded.items() if data != content(key, size, salt)]

    # ---- what may block ----------------------------------------------------------------------------------------

    def drain(self, timeout: float, grace: float = 1.0) -> bool:
        """Whether the tier says that all jobs have ended; it must come back soon after `timeout`."""
        return call_bounded("drain", lambda: self.tier.drain(timeout), timeout + grace)

    def reset(self) -> None:
        call_bounded("reset", self.tier.reset, self.limits.patience)

    def shutdown(self) -> None:
        call_bounded("shutdown", self.tier.shutdown, self.limits.shutdown)

    def close(self) -> None:
        """The end of a test: the tier goes, and the rows are as they must be."""
        self.shutdown()
        self.check_rows()
