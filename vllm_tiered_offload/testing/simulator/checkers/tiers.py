"""Checkers of the tiers behind the CPU tier: L3, D4 and D6 at their border, V2 and V4.

What a tier does is seen at its own border (`tier_watch`), so a guard or hierarchy that misjudges it is noticed.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_tiered_offload.contract.jobs import JobResult, LookupResult, PreparedStore, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import StoreOffer
from vllm_tiered_offload.testing.fakes.memory_tier import TierFault
from vllm_tiered_offload.testing.simulator.checkers.base import AckCounter, Checker, spy
from vllm_tiered_offload.testing.simulator.checkers.rows import rows_of
from vllm_tiered_offload.tiers.guard import Breaker

if TYPE_CHECKING:
    from vllm_tiered_offload.testing.simulator.engine import Simulation, Step
    from vllm_tiered_offload.testing.simulator.tier_watch import Flight

SUBMITS = ("submit_store", "submit_load")


class L3TierLifecycle(Checker):
    """At each tier behind, for every request: one beginning, one end, no submit outside, and no end too early.

    The end may be told only when no device store of the request is in flight, because its completion is a cascade, and
    is told with the last one. (A reset ends finished requests anyway, and an id that is used again ends its
    predecessor.)

    Does not check that a chunk which could be cascaded is (l4, l5), the order of the two ends at different tiers, nor
    that the end is told in time where a REQUEST_LEVEL tier is behind: it may be owed something.
    """

    name = "l3"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._open: Counter[tuple[str, str]] = Counter()  # (tier, request) -> beginnings minus ends
        # Device stores in flight at the manager, and whose they are.
        self._stores: dict[PreparedStore, list[str]] = {}
        self._ended: set[str] = set()  # requests that are over for the manager
        self._completes: list[str] = []  # whose store is completing
        manager = sim.manager
        if getattr(manager, "guards", ()):
            spy(manager, "prepare_stores", lambda *_args: None, self._prepared)
            spy(manager, "on_request_finished", lambda ctx: self._ended.add(ctx.req_id))
            spy(manager, "complete_store", self._completing, self._completed)
            spy(manager, "reset_cache", self._stores.clear)
            spy(manager, "on_new_request", self._began)

    def _prepared(self, prepared: PreparedStore, offers: Sequence[StoreOffer]) -> None:
        owners = [ctx.req_id for (_, ctx), taken in zip(offers, prepared.taken, strict=True) if taken]
        if owners:
            self._stores[prepared] = owners

    def _completing(self, prepared: PreparedStore, *_failed: Any) -> None:
        self._completes = self._stores.pop(prepared, [])

    def _completed(self, *_args: Any) -> None:
        for req_id in self._completes:
            waits = [tier for tier, other in +self._open if other == req_id]
            over = req_id in self._ended and not any(req_id in owners for owners in self._stores.values())
            if over and waits and not self.sim.config.request_level:
                raise self.broken(f"its last store completed after its end, and {waits} were not told", req_id)

    def _began(self, ctx: ReqContext) -> None:
        self._ended.discard(ctx.req_id)
        for owners in self._stores.values():
            owners[:] = [req_id for req_id in owners if req_id != ctx.req_id]

    def tier_called(self, tier: str, method: str, req_id: str) -> None:
        life = (tier, req_id)
        if method == "on_new_request":
            self._open[life] += 1
            if self._open[life] != 1:
                raise self.broken(f"{tier}: on_new_request twice without an end between", req_id)
        elif self._open[life] != 1:
            raise self.broken(f"{tier}: {method} outside of the request's life", req_id)
        elif method == "on_request_finished":
            del self._open[life]
            if any(req_id in owners for owners in self._stores.values()):
                raise self.broken(f"{tier} was told of the end while a device store was in flight", req_id)

    def converged(self) -> None:
        if +self._open:
            raise self.broken(f"never finished at a tier behind: {sorted(+self._open)}")


class D4TierRows(Checker):
    """A row that a tier behind still reads or writes is nobody else's to write, and one that it writes nobody's at all.

    Counted from the tier accepting the job to its own result, however late that is, whatever the guard says meanwhile.
    A promotion needs its rows alone; a cascade bears other readers (device loads, cascades to other tiers). Pending
    device jobs count from their message to their last acknowledgement, as in D4RowReuse.

    Does not check rows that a job of this step reserved and gave back before its message.
    """

    name = "d4"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._acks = AckCounter(sim.config.ranks)
        self._flights: dict[int, Flight] = {}
        self._new: list[Flight] = []  # not yet compared with device jobs: some of those are about to end
        self._writing: dict[int, set[int]] = {}  # pending device stores and their rows
        self._reading: dict[int, set[int]] = {}  # pending device loads

    def tier_submitted(self, flight: "Flight") -> None:
        for other in self._flights.values():
            shared = flight.rows & other.rows
            if shared and (flight.job.is_promotion or other.job.is_promotion):
                raise self.broken(
                    f"{flight.tier} job {flight.job.job_id} has rows {sorted(shared)} of {other.tier} job "
                    f"{other.job.job_id}, which has not ended",
                    flight.job.req_context.req_id,
                )
        self._flights[flight.job.job_id] = flight
        self._new.append(flight)

    def tier_ended(self, flight: "Flight", result: JobResult) -> None:  # noqa: ARG002
        self._flights.pop(flight.job.job_id, None)

    def scheduled(self, step: "Step") -> None:
        self._compare_new()
        for job in (*step.message.stores, *step.message.loads):
            store = job in step.message.stores
            for flight in self._flights.values():
                shared = rows_of(job) & flight.rows
                if shared and (store or flight.job.is_promotion):
                    raise self.broken(
                        f"{'store' if store else 'load'} job {job.job_id} uses rows {sorted(shared)}, which "
                        f"{flight.tier} job {flight.job.job_id} has not finished with",
                        job.req_id,
                    )
            (self._writing if store else self._reading)[job.job_id] = rows_of(job)

    def updated(self, step: "Step") -> None:
        for job_id, _ in self._acks.count(step):
            self._writing.pop(job_id, None)
            self._reading.pop(job_id, None)
        self._compare_new()

    def _compare_new(self) -> None:
        new, self._new = self._new, []
        for flight in new:
            others = self._writing | self._reading if flight.job.is_promotion else self._writing
            for job_id, rows in others.items():
                if rows & flight.rows:
                    raise self.broken(
                        f"{flight.tier} job {flight.job.job_id} has rows {sorted(rows & flight.rows)} of device job "
                        f"{job_id}, which has not ended",
                        flight.job.req_context.req_id,
                    )

    def converged(self) -> None:
        if self._flights:
            raise self.broken(f"tier jobs without a result: {sorted(self._flights)}")


class Askers:
    """Which life of a request asked for a promotion: its id may be in use again by the time that the job ends."""

    def __init__(self, sim: "Simulation") -> None:
        self._sim = sim
        self._requests: dict[int, Any] = {}  # promotion job -> vLLM's request, from its submission to its own end

    def note(self, flight: "Flight") -> None:
        """The promotion is submitted."""
        self._requests[flight.job.job_id] = self._sim.live.get(flight.job.req_context.req_id)

    def is_live(self, flight: "Flight") -> bool:
        """Whether this is a promotion, and who asked for it has not ended."""
        request = self._requests.get(flight.job.job_id)
        return request is not None and self._sim.live.get(request.request_id) is request

    def forget(self, flight: "Flight") -> None:
        """The job has ended."""
        self._requests.pop(flight.job.job_id, None)


class D6FailedBlocks(Checker):
    """What a tier could not hand back is a miss for that block alone, and nothing loops on it.

    A row whose last writer was a failed or late promotion must not be loaded. A request's key that failed once is not
    promoted for that request again.

    Does not check the checksum (the tiers' own tests do), nor keys that failed because the guard skipped the job.
    """

    name = "d6"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._asked_by = Askers(sim)
        self._bad_rows: set[int] = set()
        self._failed: dict[str, set[OffloadKey]] = {}  # live request -> keys whose promotion failed for it

    def tier_submitted(self, flight: "Flight") -> None:
        if not flight.job.is_promotion:
            return
        self._asked_by.note(flight)
        self._bad_rows |= flight.rows
        req_id = flight.job.req_context.req_id
        again = self._failed.get(req_id, set()).intersection(flight.job.keys)
        if again:
            raise self.broken(f"{flight.tier} job {flight.job.job_id} promotes {len(again)} failed keys again", req_id)

    def tier_late(self, flight: "Flight") -> None:
        self._note(flight, flight.job.keys)

    def tier_ended(self, flight: "Flight", result: JobResult) -> None:
        if flight.job.is_promotion and not flight.late:
            self._bad_rows -= flight.rows_of(result.successful_keys)
            self._note(flight, set(flight.job.keys).difference(result.successful_keys))
        self._asked_by.forget(flight)

    def _note(self, flight: "Flight", keys: Any) -> None:
        if self._asked_by.is_live(flight):
            self._failed.setdefault(flight.job.req_context.req_id, set()).update(keys)

    def scheduled(self, step: "Step") -> None:
        for job in step.message.loads:
            if job.job_id not in step.message.cancelled_loads and rows_of(job) & self._bad_rows:
                bad = sorted(rows_of(job) & self._bad_rows)
                raise self.broken(f"load job {job.job_id} reads rows {bad}, whose promotion failed", job.req_id)
        for job in step.message.stores:
            self._bad_rows -= rows_of(job)

    def added(self, request: Any) -> None:
        self._failed.pop(request.request_id, None)

    def ended(self, request: Any) -> None:
        self._failed.pop(request.request_id, None)

    def was_reset(self, ok: bool, active: set[str]) -> None:  # noqa: ARG002
        self._failed.clear()


class V2Promotions(Checker):
    """Promotions leave headroom, and what was promoted is there when its request comes for it.

    After each promotion is submitted the primary tier still has `promotion_headroom` of its rows for stores. A chunk
    that was promoted in time for a live request stays readable until the request is admitted or ends, a hold time
    passes, or a device load of it fails.

    Does not check that other requests which waited for the same chunk find it, nor that a full pool is a miss.
    """

    name = "v2"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._primary: Any = getattr(sim.manager, "primary", None)
        self._headroom = max(1, int(sim.config.cpu_chunks * sim.config.setting("promotion_headroom", 0.1)))
        self._hold = sim.config.setting("promotion_hold", 30.0)
        self._acks = AckCounter(sim.config.ranks)
        self._asked_by = Askers(sim)
        self._load_rows: dict[int, set[int]] = {}  # device loads in flight
        self._promised: dict[str, dict[OffloadKey, tuple[int, float]]] = {}  # request -> key -> (row, until)

    def tier_submitted(self, flight: "Flight") -> None:
        if flight.job.is_promotion:
            self._asked_by.note(flight)
        if flight.job.is_promotion and self._primary.num_unpinned_rows < self._headroom:
            raise self.broken(
                f"{flight.tier} job {flight.job.job_id} leaves {self._primary.num_unpinned_rows} rows for stores, "
                f"{self._headroom} wanted",
                flight.job.req_context.req_id,
            )

    def tier_ended(self, flight: "Flight", result: JobResult) -> None:
        waits = self._asked_by.is_live(flight)
        self._asked_by.forget(flight)
        if flight.late or not waits:
            return
        req_id = flight.job.req_context.req_id
        until = self.sim.clock() + self._hold
        rows = dict(zip(flight.job.keys, flight.job.block_ids, strict=True))
        self._promised.setdefault(req_id, {}).update({key: (rows[key], until) for key in result.successful_keys})

    def hook(self, name: str, args: tuple[Any, ...], result: Any) -> None:  # noqa: ARG002
        if name == "update_state_after_alloc":
            self._promised.pop(args[0].request_id, None)

    def added(self, request: Any) -> None:
        self._promised.pop(request.request_id, None)

    def ended(self, request: Any) -> None:
        self._promised.pop(request.request_id, None)

    def was_reset(self, ok: bool, active: set[str]) -> None:  # noqa: ARG002
        self._promised.clear()

    def updated(self, step: "Step") -> None:
        for job_id, error in self._acks.count(step):
            rows = self._load_rows.pop(job_id, set())
            if error is not None:
                for keys in self._promised.values():
                    for key in [key for key, (row, _) in keys.items() if row in rows]:
                        del keys[key]

    def scheduled(self, step: "Step") -> None:
        for job in step.message.loads:
            self._load_rows[job.job_id] = rows_of(job)
        now = self.sim.clock()
        for req_id, promised in self._promised.items():
            keys = [key for key, (_, until) in promised.items() if now < until]
            gone: Counter[LookupResult] = Counter(self._primary.lookup(keys, ReqContext(req_id)))
            if gone.keys() - {LookupResult.HIT}:
                raise self.broken(f"promoted chunks are gone before their request came: {dict(gone)}", req_id)


class V4Contained(Checker):
    """A tier's trouble stays behind its guard.

    No hook lets a tier's exception through. After `breaker_failures` exceptions in a row the breaker is not closed any
    more, and while it is open the tier gets no lookup, touch or job.

    Does not check metrics and log lines, nor that failed jobs open the breaker (exceptions do).
    """

    name = "v4"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._guards = {guard.name: guard for guard in getattr(sim.manager, "guards", ())}
        self._limit = sim.config.setting("breaker_failures", 5)
        self._in_a_row: Counter[str] = Counter()

    def hook_raised(self, name: str, error: Exception) -> None:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, TierFault):
                raise self.broken(f"{name} let a tier's exception through: {cause}")
            cause = cause.__cause__ or cause.__context__

    def tier_called(self, tier: str, method: str, req_id: str) -> None:
        asks = method in ("lookup", "touch", *SUBMITS)
        if asks and self._guards[tier].breaker is Breaker.OPEN:
            raise self.broken(f"{tier}.{method} was called while its breaker is open", req_id)

    def tier_raised(self, tier: str, method: str) -> None:  # noqa: ARG002
        self._in_a_row[tier] += 1

    def tier_ended(self, flight: "Flight", result: JobResult) -> None:
        if result.successful_keys and not flight.late:
            self._in_a_row[flight.tier] = 0

    def scheduled(self, step: "Step") -> None:  # noqa: ARG002
        for tier, count in self._in_a_row.items():
            if count >= self._limit and self._guards[tier].breaker is Breaker.CLOSED:
                raise self.broken(f"{tier} raised {count} times in a row and is still fully used")


class V6OwnPrefix(Checker):
    """No key of the call in progress is evicted: what a lookup answers as readable is so when it returns.

    (A promotion that the same lookup starts needs rows, and could take those of the prefix that it continues.)

    Does not check the order of evictions, which the CPU tier's own tests do.
    """

    name = "v6"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        if getattr(sim.manager, "guards", ()):
            spy(sim.manager, "lookup", lambda *_args: None, self._looked_up)

    def _looked_up(self, results: list[LookupResult], keys: list[OffloadKey], ctx: ReqContext) -> None:
        hits = [key for key, result in zip(keys, results, strict=True) if result is LookupResult.HIT]
        now = Counter(self.sim.manager.primary.lookup(hits, ctx))
        if now.keys() - {LookupResult.HIT}:
            raise self.broken(f"{len(hits)} chunks were answered as readable, and are {dict(now)}", ctx.req_id)
