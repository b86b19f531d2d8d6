"""Checkers of the submission contract (L1, L2), of loads (D7), of waiting (V1) and of the end state (V5)."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_tiered_offload.contract.jobs import LookupResult, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey, split_offload_key
from vllm_tiered_offload.contract.managers import StoreOffer
from vllm_tiered_offload.testing.simulator.checkers.base import AckCounter, Checker, spy

if TYPE_CHECKING:
    from vllm_tiered_offload.testing.simulator.engine import Simulation, Step


class L1Lifecycle(Checker):
    """At the manager, for every request: on_new_request first, on_request_finished exactly once, no submit after it.

    Spies on the scheduler half's manager, if the connector has one.

    Does not check the layers below the manager, nor completions.
    """

    name = "l1"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._known: Counter[str] = Counter()  # on_new_request minus on_request_finished, by request
        self._seen: set[str] = set()
        manager = sim.manager
        if manager is not None:
            self._spy(manager, "on_new_request", self._began)
            self._spy(manager, "on_request_finished", self._finished)
            self._spy(manager, "prepare_load", self._submitted)
            spy(manager, "prepare_stores", self._offered)
        self._watching = manager is not None

    def _spy(self, manager: Any, name: str, told: Callable[[str, str], None]) -> None:
        method = getattr(manager, name)

        def spied(*args: Any) -> Any:
            told(name, args[-1].req_id)
            return method(*args)

        setattr(manager, name, spied)

    def _began(self, _name: str, req_id: str) -> None:
        self._known[req_id] += 1
        self._seen.add(req_id)
        if self._known[req_id] != 1:
            raise self.broken("on_new_request twice without a finish between", req_id)

    def _finished(self, _name: str, req_id: str) -> None:
        self._known[req_id] -= 1
        if self._known[req_id] != 0:
            raise self.broken("on_request_finished without a request", req_id)
        del self._known[req_id]

    def _offered(self, offers: Sequence[StoreOffer]) -> None:
        for _, ctx in offers:
            self._submitted("prepare_stores", ctx.req_id)

    def _submitted(self, name: str, req_id: str) -> None:
        if self._known[req_id] != 1:
            raise self.broken(f"{name} outside of the request's life", req_id)

    def ended(self, request: Any) -> None:
        if self._watching and request.request_id not in self._seen:
            raise self.broken("the manager never heard of this request", request.request_id)
        self._seen.discard(request.request_id)

    def converged(self) -> None:
        if +self._known:
            raise self.broken(f"never finished at the manager: {sorted(+self._known)}")


class L2FinalStores(Checker):
    """All final stores of a finished request are in the message of the step that reports it finished, none later.

    Does not check that there are any (the byte and hit checks of the tests do), nor their pins (D2).
    """

    name = "l2"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._over: set[str] = set()  # reported as finished in an earlier step

    def added(self, request: Any) -> None:
        self._over.discard(request.request_id)

    def scheduled(self, step: "Step") -> None:
        for job in (*step.stores, *step.message.loads):
            if job.req_id in self._over:
                raise self.broken(f"job {job.job_id} after the step that reported the request finished", job.req_id)
        self._over |= step.output.finished_req_ids - set(self.sim.live)


class D7OneReceive(Checker):
    """Each load ends in exactly one finished receive per rank, and in a failed one where it failed.

    A receive needs a load in flight on that rank; a load that was acknowledged with an error on any rank must reach
    vLLM as failed, and none may be acknowledged without its receive.

    Does not check that a load which reports success has moved its bytes (the runner does, when the request runs).
    """

    name = "d7"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._acks = AckCounter(sim.config.ranks)
        self._loading: list[dict[str, int]] = [{} for _ in range(sim.config.ranks)]  # per rank: request -> job
        self._failed: set[str] = set()  # requests whose load in flight was reported as failed by some rank
        self._requests: dict[int, str] = {}  # job -> request, until its last acknowledgement

    def received(self, step: "Step") -> None:
        for job in step.message.loads:
            self._requests[job.job_id] = job.req_id
            for loading in self._loading:
                if job.req_id in loading:
                    raise self.broken("a second load while the first is in flight", job.req_id)
                loading[job.req_id] = job.job_id

    def reported(self, step: "Step") -> None:
        for loading, output in zip(self._loading, step.rank_outputs, strict=True):
            self._failed |= (output.failed_recving or set()) & loading.keys()
        for rank, output in enumerate(step.rank_outputs):
            for req_id in output.finished_recving or ():
                job_id = self._loading[rank].pop(req_id, None)
                if job_id is None and not self.sim.world.has_received(req_id, rank):
                    raise self.broken(f"rank {rank} finished a receive that was not in flight", req_id)
        for job_id, error in self._acks.count(step):
            req_id = self._requests.pop(job_id, None)
            if req_id is not None:
                self._load_ended(job_id, req_id, error)

    def _load_ended(self, job_id: int, req_id: str, error: str | None) -> None:
        if error is not None and req_id not in self._failed:
            raise self.broken(f"load job {job_id} failed ({error}) and was reported as good", req_id)
        if any(loading.get(req_id) == job_id for loading in self._loading):
            raise self.broken(f"load job {job_id} was acknowledged without a finished receive on every rank", req_id)
        self._failed.discard(req_id)

    def converged(self) -> None:
        if any(self._loading):
            raise self.broken(f"loads that never ended: {self._loading}")


class V1BoundedWaiting(Checker):
    """Nobody waits without bound for an answer to "what do you have?".

    RETRY is answered for `retry_timeout` from a request's first lookup at most, HIT_PENDING for `pending_timeout` from
    the last time that more of the prefix was readable, a load of the same prefix by another request likewise, and for
    the region `region_timeout` from the first question.
    A connector whose lookups cannot be seen has `LIMIT` simulated seconds, and so has a model with any but one group of
    full attention, where one question takes many lookups, each of what a hit at another place would need.

    Does not check who caused the wait, nor waits that vLLM does not ask about (a full pool).
    """

    name = "v1"
    LIMIT = 5.0

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._retry = sim.config.setting("retry_timeout", 1.0)
        self._pending = sim.config.setting("pending_timeout", 1.0)
        self._region = sim.config.setting("region_timeout", 10.0)
        self._since: dict[str, float] = {}  # when a request was first told to ask again, since its last answer
        self._first: dict[str, float] = {}  # its first lookup
        self._progress: dict[str, tuple[int, float]] = {}  # end of what is readable, when it came to be there
        self._stopped_by: dict[str, LookupResult] = {}  # what ended the prefix of its last lookup
        self._region_asked: float | None = None
        self._sees_lookups = hasattr(sim.manager, "lookup") and sim.config.has_one_full_group
        if self._sees_lookups:
            spy(sim.manager, "lookup", lambda *_args: None, self._looked_up)
            spy(sim.manager, "probe", lambda *_args: None, self._probed)

    def _looked_up(self, results: list[LookupResult], keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """A lookup may be of a part of the prompt: what counts is where in it the readable prefix ends."""
        now = self.sim.clock()
        self._first.setdefault(ctx.req_id, now)
        hits = next((i for i, result in enumerate(results) if result is not LookupResult.HIT), len(results))
        end = hits + (self._chunk(ctx.req_id, keys[0]) if keys else 0)
        if end > self._progress.get(ctx.req_id, (-1, 0.0))[0]:
            self._progress[ctx.req_id] = (end, now)
        self._stopped_by[ctx.req_id] = results[hits] if hits < len(results) else LookupResult.HIT

    def _probed(self, results: list[LookupResult], keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        if results[0] is not LookupResult.HIT:  # else a lookup follows
            self._looked_up(results, keys, ctx)

    def _chunk(self, req_id: str, key: OffloadKey) -> int:
        """Which chunk of the request has this key."""
        hashes = list(self.sim.live[req_id].block_hashes)
        return hashes.index(split_offload_key(key)[0]) // self.sim.config.blocks_per_chunk

    def hook(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name != "get_num_new_matched_tokens":
            return
        req_id = args[0].request_id
        if result[0] is not None:
            for known in (self._since, self._progress, self._stopped_by):
                known.pop(req_id, None)
            return
        reason = self._stopped_by.get(req_id)
        since = self._since.setdefault(req_id, self.sim.clock())
        self._check(req_id, reason, since)

    def _check(self, req_id: str, reason: LookupResult | None, since: float) -> None:
        limit = self.LIMIT
        if reason is LookupResult.RETRY:
            limit, since = self._retry, self._first[req_id]
        elif reason is not None:  # HIT_PENDING, or what is readable is being loaded for another request (case 29)
            limit, since = self._pending, self._progress[req_id][1]
        elif self._sees_lookups and self.sim.config.neighbour is None:
            if self._region_asked is None:
                self._region_asked = self.sim.clock()
            limit, since = self._region, self._region_asked
        if self.sim.clock() - since > limit:
            raise self.broken(f"asked again for more than {limit} s ({reason})", req_id)

    def added(self, request: Any) -> None:
        self._forget(request.request_id)

    def ended(self, request: Any) -> None:
        self._forget(request.request_id)

    def _forget(self, req_id: str) -> None:
        for known in (self._since, self._first, self._progress, self._stopped_by):
            known.pop(req_id, None)


class V5NothingLeft(Checker):
    """Once the workload stopped and faults are off, nothing is pending and nothing is left.

    No push work, no block in use, no request held by vLLM, no copy or tier job waiting, every map of the scheduler half
    and of the layers below empty, no row pinned or orphaned.
    (That the engine gets there at all within a bounded number of steps is `Simulation.run_until_idle`.)

    Does not check the worker half's maps, nor what the tiers behind keep for themselves.
    """

    name = "v5"

    def converged(self) -> None:
        sim = self.sim
        connector = sim.scheduler.connector
        in_use = sim.config.num_blocks - 1 - sim.pool.get_num_free_blocks()
        left = {
            "push work": connector is not None and connector.has_pending_push_work(),
            "device blocks in use": in_use,
            "requests": len(sim.scheduler.requests),
            "waiting copies": len(sim.copies),
            "waiting tier jobs": len(sim.tiers),
            **sim.leftover_state(),
        }
        left = {name: size for name, size in left.items() if size}
        if left:
            raise self.broken(f"left over: {left}")
