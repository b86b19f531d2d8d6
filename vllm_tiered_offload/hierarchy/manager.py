"""The manager that the scheduler half talks to: one primary tier, and any number of tiers behind it.

It keeps the submission contract (DESIGN §5) towards the tiers: what the layer above may do is decided by the table in
`contract.lifecycle`, before anything is allocated; each tier hears of each request's begin and end exactly once.

    on_new_request ---> TRACKED --on_request_finished--> SIGNALLED --last completion--> forgotten
                           |                                 |
                    prepare_*, complete_*             complete_* only

The primary tier hears of the end at once. The tiers behind it hear of it when the request's last device store has been
completed and cascaded and no offer of it is parked (L3, L4), because a cascade is a submit:

    lookup            primary; what it misses is asked of the tiers behind; what one of them has is promoted
    prepare_store     what is present already is cascaded to REQUEST_LEVEL tiers, what is being written is parked (L5)
    complete_store    cascade to every tier behind, then count down, then finalise if the request is over
    collect           results of cascades and promotions are taken in at the first call of a scheduling pass

With "tolerant" a request that breaks the contract loses its offload, and nothing else happens: every later lookup of it
misses, every later prepare_* is empty, completions and its end are still passed on, so that nothing leaks.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import (
    LookupResult,
    OffloadPolicy,
    PreparedLoad,
    PreparedStore,
    ReqContext,
    RequestOffloadingContext,
)
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.lifecycle import Event, InvalidTransition, Phase, RequestLifecycle
from vllm_tiered_offload.contract.managers import OffloadingManager, PrimaryTier, ResidencyEvent, StoreOffer
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.hierarchy.parked import ParkedOffers
from vllm_tiered_offload.hierarchy.promotions import Holds, plan_promotion, runs_of
from vllm_tiered_offload.hierarchy.region_access import RegionAccess
from vllm_tiered_offload.hierarchy.tier_jobs import JobEnd, TierJob, TierJobs
from vllm_tiered_offload.telemetry.metrics import metric_key
from vllm_tiered_offload.tiers.guard import Breaker, TierGuard

logger = logging.getLogger(__name__)

# An Enum's member costs more to look up than most of what is done with it here.
_SUBMIT, _COMPLETE = Event.SUBMIT, Event.COMPLETE
_HIT, _MISS = LookupResult.HIT, LookupResult.MISS

# How many requests are remembered after their end, for error texts, and how many unknown ones have had their warning.
_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class HierarchyLimits:
    """Shares are of the region's rows, times in seconds."""

    promotion_headroom: float = 0.1  # rows that promotions leave to the stores of running requests (V2)
    promotion_hold: float = 30.0  # how long a promoted row waits for the request that asked for it
    promotion_bytes: int = 16 << 20  # of one promotion job: each job that ends is progress that a request sees
    cascade_share: float = 0.5  # rows that cascades may hold; beyond it chunks are not cascaded
    drain_timeout: float = 5.0  # per tier, at a reset or shutdown

    def promotion_rows(self, row_bytes: int) -> int:
        """Rows of one promotion job: enough for the threads of a tier, and few enough to end soon."""
        return max(4, min(256, self.promotion_bytes // row_bytes))


@dataclass(slots=True, eq=False)
class _Request:
    """One request between on_new_request and its last completion."""

    ctx: ReqContext
    lifecycle: RequestLifecycle
    context: RequestOffloadingContext = field(default_factory=RequestOffloadingContext)
    stores_in_flight: int = 0  # prepared and not completed (L4)
    loads_in_flight: int = 0
    guards: tuple[TierGuard, ...] = ()  # the tiers behind that may have to do with its chunks
    takers: tuple[TierGuard, ...] = ()  # the tiers behind that want every block of this request (REQUEST_LEVEL)
    promoted: dict[OffloadKey, str] = field(default_factory=dict)  # key -> medium, of keys promoted for this request
    unreadable: set[OffloadKey] = field(default_factory=set)  # promoted for it in vain: not tried again (D6)
    # Broke the contract under "tolerant": no more offload for it, and no more warnings about it.
    refused: bool = False
    finalised: bool = False  # the tiers behind the primary one have heard of its end

    @property
    def is_over(self) -> bool:
        """Signalled, and nothing in flight."""
        return self.lifecycle.phase is Phase.SIGNALLED and not self.stores_in_flight and not self.loads_in_flight


class TieringOffloadingManager(OffloadingManager):
    """One primary tier and guarded tiers behind it, nearest first.

    `strict` raises InvalidTransition where the contract is broken; otherwise the request's offload is skipped, with one
    warning for the request and a count in `lifecycle_violations_total`.
    """

    def __init__(
        self,
        primary: PrimaryTier,
        guards: Sequence[TierGuard] = (),
        *,
        strict: bool = False,
        limits: HierarchyLimits = HierarchyLimits(),
        clock: Clock = monotonic,
        region_access: RegionAccess | None = None,
    ) -> None:
        self.primary = primary
        self.guards = tuple(guards)
        self._strict = strict
        self._limits = limits
        self._promotion_rows = limits.promotion_rows(1)  # until the region is bound nothing is promoted
        self._clock = clock
        self._region_access = region_access or RegionAccess()
        self._announcement: RegionAnnouncement | None = None
        self._tiers_ready = False  # the tiers behind know the region
        self._reset_when_ready = False  # there was a reset before that
        self._jobs = TierJobs(self.guards)
        self._parked = ParkedOffers()  # by id() of a _Request in _parking
        self._parking: dict[int, _Request] = {}  # requests with a parked offer
        self._holds = Holds(primary, limits.promotion_hold)
        self._collected = False  # in this scheduling pass
        # Requests by id, from on_new_request until they are over. An id that is used again takes the place of its
        # predecessor, which then lives on in `_in_flight` alone.
        self._requests: dict[str, _Request] = {}
        # Handles prepared and not completed, with their requests. In-flight counts are those of this map.
        self._in_flight: dict[PreparedLoad | PreparedStore, Sequence[_Request]] = {}
        # The stories of the last few requests that are over, and "never announced" of ids that were warned about:
        # at most _REMEMBERED of them, oldest first. Diagnostics only.
        self._over: OrderedDict[str, _Request] = OrderedDict()
        self._counters: Counter[str] = Counter()
        self._violations = 0

    @property
    def tracked(self) -> list[str]:
        """Ids of requests that are not over; empty at the end. An id that was used again may occur twice."""
        requests = {id(request): request for request in self._requests.values()}
        requests |= {id(request): request for owners in self._in_flight.values() for request in owners}
        return [request.lifecycle.req_id for request in requests.values()]

    def leftovers(self) -> dict[str, int]:
        own = {
            "tracked": len(self.tracked),
            "tier_jobs": len(self._jobs),
            "holds": len(self._holds),
            "parked": len(self._parked) + len(self._parking),
        }
        return own | {f"primary.{name}": size for name, size in self.primary.leftovers().items()}

    # ---- the region --------------------------------------------------------------------------------------------

    def bind_region(self, geometry: RegionGeometry) -> None:
        self._promotion_rows = self._limits.promotion_rows(geometry.row_bytes)
        self.primary.bind_region(geometry)

    def open_region(self, announcement: RegionAnnouncement) -> None:
        if self.guards and self._announcement is None:
            self._announcement = announcement
            self._region_access.start(announcement)

    @property
    def _ready(self) -> tuple[TierGuard, ...]:
        """The tiers behind, once they know the region."""
        return self.guards if self._tiers_ready else ()

    def _make_tiers_ready(self) -> None:
        """Hand the region to the tiers once the other thread has opened it."""
        region = self._region_access.take()
        if region is None or self._announcement is None or self._announcement.fingerprint is None:
            return
        rows = region.rows()
        for guard in self.guards:
            guard.bind_region(rows, region.geometry, self._announcement.fingerprint)
            guard.bind_leases(self.primary)
            if self._reset_when_ready:
                guard.reset(self._limits.drain_timeout)
        self._tiers_ready = True

    # ---- begin and end of a request ----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        req_id = req_context.req_id
        known = self._requests.get(req_id)
        if known is not None and known.lifecycle.phase is not Phase.SIGNALLED:
            self._break_contract(known, "on_new_request", _SUBMIT)
            return known.context
        if known is not None:
            self._finalise(known)  # its stores are still in flight; they are not cascaded under the new request's id
        request = self._requests[req_id] = _Request(req_context, RequestLifecycle(req_id))
        policies = [self.primary.on_new_request(req_context).policy]
        policies += [guard.on_new_request(req_context).policy for guard in self.guards]
        every_block = OffloadPolicy.REQUEST_LEVEL
        request.guards = () if req_context.memory_only else self.guards
        request.takers = tuple(
            guard for guard, policy in zip(request.guards, policies[1:], strict=False) if policy is every_block
        )
        request.context = RequestOffloadingContext(every_block if every_block in policies else policies[0])
        return request.context

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._find(req_context.req_id)
        if not request.lifecycle.allows(Event.FINISH):
            self._break_contract(request, "on_request_finished", Event.FINISH)
            return
        request.lifecycle.advance(Event.FINISH)
        self._holds.release(req_context.req_id)
        self.primary.on_request_finished(req_context)
        request.lifecycle.advance(Event.SIGNAL)
        self._settle(request)

    def _settle(self, request: _Request) -> None:
        """After a completion or the end: finalise what has no more stores to cascade, forget what is over (L3)."""
        waits = request.stores_in_flight or self._parked.has(id(request))
        if request.lifecycle.phase is Phase.SIGNALLED and not waits:
            self._finalise(request)
        if request.is_over and request.finalised:
            req_id = request.lifecycle.req_id
            if self._requests.get(req_id) is request:
                del self._requests[req_id]
            self._remember(request)

    def _finalise(self, request: _Request) -> None:
        """The one place that tells the tiers behind of a request's end: exactly once, after their last submit."""
        if request.finalised:
            return
        request.finalised = True
        for guard in self.guards:
            guard.on_request_finished(request.ctx)

    # ---- lookup and promotion ----------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        request = self._admitted(req_context, "lookup")
        if request is None:
            return [_MISS] * len(keys)
        if self.guards:
            self._collect_once()
        results, found = self._ask_everyone(keys, request)
        if found:
            self._promote(keys, results, found, request)
        return results

    def probe(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        request = self._admitted(req_context, "probe")
        if request is None:
            return [_MISS] * len(keys)
        if self.guards:
            self._collect_once()
        results, found = self._ask_everyone(keys, request)
        for index in found:
            results[index] = _HIT
        return results

    def _ask_everyone(
        self, keys: Sequence[OffloadKey], request: _Request
    ) -> tuple[list[LookupResult], dict[int, TierGuard]]:
        """The primary tier's answers, RETRY and HIT_PENDING of the tiers behind, and where they have what it misses."""
        results = self.primary.lookup(keys, request.ctx)
        if not request.guards or _MISS not in results:
            return results, {}
        return results, self._look_behind(keys, results, request)

    def _look_behind(
        self, keys: Sequence[OffloadKey], results: list[LookupResult], request: _Request
    ) -> dict[int, TierGuard]:
        """Ask the tiers behind for what the primary one misses: where it is. Changes `results` where it is not."""
        unreadable = request.unreadable
        asked = [index for index, result in enumerate(results) if result is _MISS and keys[index] not in unreadable]
        if not self._tiers_ready:
            hopeless = self._announcement is None or self._region_access.failed
            for index in () if hopeless else asked:
                results[index] = LookupResult.RETRY
            return {}
        found: dict[int, TierGuard] = {}
        for guard in request.guards:
            asked = self._ask(guard, keys, asked, results, found, request)
        return found

    def _ask(
        self,
        guard: TierGuard,
        keys: Sequence[OffloadKey],
        asked: list[int],
        results: list[LookupResult],
        found: dict[int, TierGuard],
        request: _Request,
    ) -> list[int]:
        """One tier's answers; returns the indices that it does not have."""
        missing: list[int] = []
        if not asked:
            return missing
        answers = guard.lookup([keys[index] for index in asked], request.ctx)
        hits = answers.count(_HIT)
        if hits == len(asked):
            found.update(dict.fromkeys(asked, guard))
        else:
            for index, answer in zip(asked, answers, strict=True):
                if answer is _HIT:
                    found[index] = guard
                elif answer is _MISS:
                    missing.append(index)
                else:
                    results[index] = answer
        for answer, count in ((_HIT, hits), (_MISS, len(missing))):
            if count:
                self._counters[metric_key("block_lookups_total", tier=guard.name, result=answer.value)] += count
        return missing

    def _promote(
        self, keys: Sequence[OffloadKey], results: list[LookupResult], found: dict[int, TierGuard], request: _Request
    ) -> None:
        """Start bringing back the prefix that is found, as far as there is room; changes `results`."""
        usable = found
        if not all(guard.accepts_jobs for guard in set(found.values())):
            usable = {index: guard for index, guard in found.items() if guard.accepts_jobs}
        headroom = max(1, int(self.primary.num_rows * self._limits.promotion_headroom))
        promote = plan_promotion(results, usable, max(0, self.primary.num_unpinned_rows - headroom))
        hits: list[OffloadKey] = []
        if promote and _HIT in results:
            # Offered along, and accepted as present: nothing of the prefix that goes on may be evicted for it (V6).
            hits = [key for key, result in zip(keys, results, strict=True) if result is _HIT]
        for guard, indices in runs_of(promote, usable, self._promotion_rows):
            run = [keys[index] for index in indices]
            prepared = self.primary.prepare_store([*hits, *run], request.ctx)
            accepted = prepared.num_accepted - len(hits)
            if prepared.keys:
                self._jobs.submit_promotion(guard, prepared, request.ctx)
                self._counters[metric_key("promoted_chunks_total", tier=guard.name)] += len(prepared.keys)
            for index in indices[:accepted]:
                results[index] = LookupResult.HIT_PENDING
            request.promoted.update(dict.fromkeys(run[:accepted], guard.tier.medium))
            if accepted < len(run):
                break

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """The request was admitted: what it waited for is pinned by its load now, or not wanted any more."""
        request = self._admitted(req_context, "touch")
        if request is None:
            return
        self.primary.touch(keys, req_context)
        self._holds.release(req_context.req_id)
        for guard in self._ready if request.guards else ():
            guard.touch(keys, req_context)

    def hit_media(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[str]:
        request = self._requests.get(req_context.req_id)
        promoted = request.promoted if request is not None else {}
        return [promoted.get(key, self.primary.medium) for key in keys]

    # ---- loads and stores --------------------------------------------------------------------------------------

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PreparedLoad:
        request = self._admitted(req_context, "prepare_load")
        if request is None:
            return PreparedLoad((), ())
        prepared = self.primary.prepare_load(keys, req_context)
        if prepared.keys:
            request.lifecycle.advance(_SUBMIT)
            request.loads_in_flight += 1
            self._in_flight[prepared] = (request,)
        return prepared

    def complete_load(self, prepared: PreparedLoad, failed_keys: Collection[OffloadKey] = ()) -> None:
        owners = self._complete(prepared)
        self.primary.complete_load(prepared, failed_keys)
        for request in owners:
            request.loads_in_flight -= 1
            self._settle(request)

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> PreparedStore:
        asking = [self._admitted(ctx, "prepare_stores") for _, ctx in offers]
        admitted = [request for request in asking if request is not None]
        if len(admitted) < len(asking):
            return self._prepare_admitted(offers, asking)
        if self.guards:
            self._collect_once()
            offers = self._without_promoting(offers)
        prepared = self.primary.prepare_stores(offers)
        owners = [request for request, taken in zip(admitted, prepared.taken, strict=True) if taken]
        for request in owners:
            request.lifecycle.advance(_SUBMIT)
            request.stores_in_flight += 1
        if owners:
            self._in_flight[prepared] = owners
        if self.guards:
            self._offer_all_present(offers, admitted, prepared)
        return prepared

    def _prepare_admitted(self, offers: Sequence[StoreOffer], asking: Sequence[_Request | None]) -> PreparedStore:
        """As if the offers that may not submit had been declined."""
        prepared = self.prepare_stores([offer for offer, request in zip(offers, asking, strict=True) if request])
        accepted, taken = iter(prepared.accepted), iter(prepared.taken)
        prepared.accepted = [next(accepted) if request else 0 for request in asking]
        prepared.taken = [next(taken) if request else 0 for request in asking]
        return prepared

    def _without_promoting(self, offers: Sequence[StoreOffer]) -> Sequence[StoreOffer]:
        """A promotion may fail yet: its keys are offered again, or they would be missing in the middle (V3)."""
        promoting = self._jobs.promoting()
        if not promoting:
            return offers
        return [
            (keys[: next((i for i, key in enumerate(keys) if key in promoting), len(keys))], ctx)
            for keys, ctx in offers
        ]

    def _offer_all_present(
        self, offers: Sequence[StoreOffer], asking: Sequence[_Request], prepared: PreparedStore
    ) -> None:
        """Requests that some tier behind wants whole offer it what needs no store, too (L5)."""
        stored_now: set[OffloadKey] | None = None
        parts = zip(offers, asking, prepared.accepted, prepared.taken, strict=True)
        for (keys, _), request, accepted, taken in parts:
            if request.takers and taken < accepted:
                stored_now = set(prepared.keys) if stored_now is None else stored_now
                self._offer_present([key for key in keys[:accepted] if key not in stored_now], request)

    def _offer_present(self, keys: Sequence[OffloadKey], request: _Request) -> None:
        """Chunks of a REQUEST_LEVEL request that need no store: cascade what is readable, park what is on its way."""
        readable = []
        for key, result in zip(keys, self.primary.lookup(keys, request.ctx), strict=True):
            if result is LookupResult.HIT:
                readable.append(key)
            elif result is LookupResult.HIT_PENDING:
                self._parked.park(key, id(request))
                self._parking[id(request)] = request
        self._cascade(readable, request, request.takers)

    def _unpark(self, keys: Sequence[OffloadKey], failed: Collection[OffloadKey]) -> None:
        """The write of `keys` into the primary tier ended: parked offers become cascades, or nothing."""
        for identity, resolved in self._parked.resolve(keys).items():
            request = self._parking[identity]
            self._cascade([key for key in resolved if key not in failed], request, request.takers)
            if not self._parked.has(identity):
                del self._parking[identity]
                self._settle(request)

    def complete_store(self, prepared: PreparedStore, failed_keys: Collection[OffloadKey] = ()) -> None:
        """Count down, cascade first, then finalise (L4)."""
        owners = self._complete(prepared)
        self.primary.complete_store(prepared, failed_keys)
        for request in owners:
            request.stores_in_flight -= 1
        if self.guards:
            for request, keys in zip(owners, prepared.parts(), strict=False):
                self._cascade([key for key in keys if key not in failed_keys], request, request.guards)
        if self._parking:
            self._unpark(prepared.keys, failed_keys)
        for request in owners:
            if request.lifecycle.phase is Phase.SIGNALLED:
                self._settle(request)

    def _cascade(self, keys: Sequence[OffloadKey], request: _Request, takers: Sequence[TierGuard]) -> None:
        """Hand readable chunks to those of `takers` that take jobs; nothing after the request's end (L3)."""
        if not keys or request.finalised or not self._tiers_ready:
            return
        for guard in takers:
            if not guard.accepts_jobs:
                continue
            room = int(self.primary.num_rows * self._limits.cascade_share) - self._jobs.leased_rows()
            lease = self.primary.lease(keys[: max(0, room)])
            if len(lease.keys) < len(keys):
                skipped = metric_key("cascades_skipped_total", tier=guard.name)
                self._counters[skipped] += len(keys) - len(lease.keys)
            if lease.keys:
                self._jobs.submit_cascade(guard, lease, request.ctx)

    # ---- results of the tiers behind ---------------------------------------------------------------------------

    def _collect_once(self) -> None:
        """Take in what has ended, at the first call of a scheduling pass."""
        if not self._collected:
            self._collected = True
            self._collect()

    def _collect(self) -> None:
        if not self.guards:
            return
        if not self._tiers_ready:
            self._make_tiers_ready()
        now = self._clock()
        ends, late = self._jobs.collect()
        for end in ends:
            if end.entry.prepared is not None:
                self._promotion_ended(end, now)
            elif end.is_released:
                self._release_rows(end.entry)
        for entry in late:
            self._release_rows(entry)
        self._holds.release_expired(now)

    def _promotion_ended(self, end: JobEnd, now: float) -> None:
        prepared = end.entry.prepared
        assert prepared is not None
        kept, failed = list(end.result.successful_keys), list[OffloadKey]()
        if not end.result.success:
            good = set(kept)
            failed = [key for key in prepared.keys if key not in good]
        request = self._requests.get(end.entry.job.req_context.req_id)
        if request is not None:
            request.unreadable.update(failed)
        if not end.is_released:
            end.entry.abandoned = True
            self.primary.abandon(prepared)
            self._unpark(prepared.keys, prepared.keys)
            return
        self.primary.complete_store(prepared, failed)
        self._unpark(prepared.keys, failed)
        for guard in self.guards if kept else ():
            if guard is not end.entry.guard:
                guard.note_promoted(kept, end.entry.job.req_context)
        if kept and request is not None and request.lifecycle.phase is Phase.TRACKED:
            self._holds.add(request.lifecycle.req_id, kept, now)

    def _release_rows(self, entry: TierJob) -> None:
        """Nobody touches the job's rows any more."""
        if entry.lease is not None:
            self.primary.release(entry.lease)
        elif entry.prepared is not None:
            self.primary.complete_store(entry.prepared, entry.prepared.keys)

    # ---- the whole hierarchy -----------------------------------------------------------------------------------

    def on_schedule_end(self) -> None:
        self._collect()
        self._collected = False
        self.primary.on_schedule_end()
        for guard in self._ready:
            guard.on_schedule_end()

    def has_pending_work(self) -> bool:
        """Being asked is vLLM's only tick while idle: what has ended is taken in here, so nothing is left to poll."""
        self._collect()
        return self.primary.has_pending_work()

    def reset_cache(self) -> None:
        """Rows in flight stay taken until their job ends; the primary tier tells their generations apart (L6)."""
        self._holds.release_all()
        self._parked.clear()
        self._parking.clear()
        self.primary.reset_cache()
        for request in list(self._requests.values()):
            request.promoted.clear()
            request.unreadable.clear()
            if request.lifecycle.phase is Phase.SIGNALLED:
                self._finalise(request)
                self._settle(request)
        self._reset_when_ready = not self._tiers_ready
        for guard in self._ready:
            guard.drain(self._limits.drain_timeout)
            guard.reset(self._limits.drain_timeout)
        self._collect()

    def take_events(self) -> list[ResidencyEvent]:
        events = self.primary.take_events()
        for guard in self._ready:
            events += guard.take_events()
        return events

    def get_stats(self) -> Mapping[str, int | float]:
        """Every tier's, and the manager's own."""
        stats = {**self.primary.get_stats(), **self._counters, "lifecycle_violations_total": self._violations}
        for guard in self.guards:
            if self._tiers_ready:
                stats.update(_under_name(guard))
            stats[metric_key("tier_off", tier=guard.name)] = int(guard.is_off or guard.breaker is not Breaker.CLOSED)
            stats[metric_key("tier_jobs_in_flight", tier=guard.name)] = guard.num_unreleased
            for kind, count in guard.counters.items():
                stats[metric_key("tier_faults_total", tier=guard.name, kind=kind)] = count
        return stats

    def shutdown(self) -> None:
        for guard in self.guards:
            guard.shutdown(self._limits.drain_timeout)
        self.primary.shutdown()
        self._region_access.close()

    # ---- contract keeping --------------------------------------------------------------------------------------

    def _admitted(self, req_context: ReqContext, call: str) -> _Request | None:
        """The request, if it may ask and submit now. Runs before anything is allocated (L7)."""
        request = self._requests.get(req_context.req_id)
        if request is not None and request.lifecycle.allows(_SUBMIT):
            return None if request.refused else request
        self._break_contract(request or self._find(req_context.req_id), call, _SUBMIT)
        return None

    def _complete(self, prepared: PreparedLoad | PreparedStore) -> Sequence[_Request]:
        """Whose handle this is; nobody's if it is empty or foreign, which is the primary tier's to judge."""
        owners = self._in_flight.pop(prepared, ())
        for request in owners:
            request.lifecycle.advance(_COMPLETE)
        return owners

    def _find(self, req_id: str) -> _Request:
        """The request by that id, be it over, or a stand-in for one that was never announced."""
        request = self._requests.get(req_id) or self._over.get(req_id)
        if request is None:
            request = _Request(ReqContext(req_id), RequestLifecycle(req_id, Phase.SIGNALLED, ["never announced"]))
            self._remember(request)
        return request

    def _remember(self, request: _Request) -> None:
        over = self._over
        over[request.lifecycle.req_id] = request
        over.move_to_end(request.lifecycle.req_id)
        while len(over) > _REMEMBERED:
            over.popitem(last=False)

    def _break_contract(self, request: _Request, call: str, event: Event) -> None:
        """Raise (strict), or refuse the rest of the request and say so once."""
        life = request.lifecycle
        error = InvalidTransition(life.req_id, life.phase, event, [*life.history, f"<{call}>"])
        if self._strict:
            raise error
        self._violations += 1
        if not request.refused:
            request.refused = True
            logger.warning("KV offload is skipped for one request: %s", error)


def _under_name(guard: TierGuard) -> Mapping[str, int | float]:
    """The tier's numbers under the guard's name: two tiers of one kind call themselves alike."""
    stats = guard.get_stats()
    if guard.name == guard.tier.medium:
        return stats
    return {key.replace(f"|tier={guard.tier.medium}", f"|tier={guard.name}"): value for key, value in stats.items()}
