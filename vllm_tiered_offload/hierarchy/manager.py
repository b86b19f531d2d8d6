"""The manager that the scheduler half talks to.

It keeps the submission contract (DESIGN §5) towards the tiers: what the layer above may do is decided by the table in
`contract.lifecycle`, before anything is allocated; the tiers hear of each request's begin and end exactly once.

    on_new_request ---> TRACKED --on_request_finished--> SIGNALLED --last completion--> forgotten
                           |                                 |
                    prepare_*, complete_*             complete_* only

With "tolerant" a request that breaks the contract loses its offload, and nothing else happens: every later lookup of it
misses, every later prepare_* is empty, completions and its end are still passed on, so that nothing leaks.
"""

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import (
    LookupResult,
    PreparedLoad,
    PreparedStore,
    ReqContext,
    RequestOffloadingContext,
)
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.lifecycle import Event, InvalidTransition, Phase, RequestLifecycle
from vllm_tiered_offload.contract.managers import (
    OffloadingManager,
    PrimaryTier,
    ResidencyEvent,
    SecondaryTierManager,
)
from vllm_tiered_offload.settings import SettingsError

logger = logging.getLogger(__name__)

# How many requests are remembered after their end, for error texts, and how many unknown ones have had their warning.
_REMEMBERED = 64


@dataclass(slots=True, eq=False)
class _Request:
    """One request between on_new_request and its last completion."""

    lifecycle: RequestLifecycle
    context: RequestOffloadingContext = field(default_factory=RequestOffloadingContext)
    stores_in_flight: int = 0  # prepared and not completed (L4)
    loads_in_flight: int = 0
    # Broke the contract under "tolerant": no more offload for it, and no more warnings about it.
    refused: bool = False

    @property
    def is_over(self) -> bool:
        """Signalled, and nothing in flight."""
        return self.lifecycle.phase is Phase.SIGNALLED and not self.stores_in_flight and not self.loads_in_flight


class TieringOffloadingManager(OffloadingManager):
    """One primary tier and, later, secondary tiers behind it.

    `strict` raises InvalidTransition where the contract is broken; otherwise the request's offload is skipped, with one
    warning for the request and a count in `lifecycle_violations_total`. Raises SettingsError for secondary tiers.
    """

    def __init__(
        self, primary: PrimaryTier, secondaries: Sequence[SecondaryTierManager] = (), *, strict: bool = False
    ) -> None:
        if secondaries:
            media = ", ".join(tier.medium for tier in secondaries)
            raise SettingsError([f"tiers: secondary tiers are not available yet (got {media})"])
        self.primary = primary
        self._secondaries: tuple[SecondaryTierManager, ...] = tuple(secondaries)
        self._strict = strict
        # Requests by id, from on_new_request until they are over. An id that is used again takes the place of its
        # predecessor, which then lives on in `_in_flight` alone.
        self._requests: dict[str, _Request] = {}
        # Handles prepared and not completed, by identity, with their request. In-flight counts are those of this map.
        self._in_flight: dict[int, tuple[PreparedLoad | PreparedStore, _Request]] = {}
        # The stories of the last few requests that are over, and "never announced" of ids that were warned about:
        # at most _REMEMBERED of them, oldest first. Diagnostics only.
        self._over: OrderedDict[str, _Request] = OrderedDict()
        self._violations = 0

    @property
    def tracked(self) -> list[str]:
        """Ids of requests that are not over; empty at the end. An id that was used again may occur twice."""
        requests = {id(request): request for request in self._requests.values()}
        requests |= {id(request): request for _, request in self._in_flight.values()}
        return [request.lifecycle.req_id for request in requests.values()]

    def bind_region(self, geometry: RegionGeometry) -> None:
        self.primary.bind_region(geometry)

    # Begin and end of a request

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        req_id = req_context.req_id
        known = self._requests.get(req_id)
        if known is not None and known.lifecycle.phase is not Phase.SIGNALLED:
            self._break_contract(known, "on_new_request", Event.SUBMIT)
            return known.context
        request = self._requests[req_id] = _Request(RequestLifecycle(req_id))
        request.context = self.primary.on_new_request(req_context)
        return request.context

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._find(req_context.req_id)
        if not request.lifecycle.allows(Event.FINISH):
            self._break_contract(request, "on_request_finished", Event.FINISH)
            return
        request.lifecycle.advance(Event.FINISH)
        self.primary.on_request_finished(req_context)
        request.lifecycle.advance(Event.SIGNAL)
        self._forget_if_over(request)

    # Lookup

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        if not self._may_submit(req_context, "lookup"):
            return [LookupResult.MISS] * len(keys)
        return self.primary.lookup(keys, req_context)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if self._may_submit(req_context, "touch"):
            self.primary.touch(keys, req_context)

    # Loads and stores

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PreparedLoad:
        if not self._may_submit(req_context, "prepare_load"):
            return PreparedLoad((), ())
        prepared = self.primary.prepare_load(keys, req_context)
        if prepared.keys:
            request = self._submit(prepared, req_context)
            request.loads_in_flight += 1
        return prepared

    def complete_load(self, prepared: PreparedLoad, failed_keys: Collection[OffloadKey] = ()) -> None:
        request = self._complete(prepared)
        self.primary.complete_load(prepared, failed_keys)
        if request is not None:
            request.loads_in_flight -= 1
            self._forget_if_over(request)

    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PreparedStore:
        if not self._may_submit(req_context, "prepare_store"):
            return PreparedStore((), (), 0)
        prepared = self.primary.prepare_store(keys, req_context)
        if prepared.keys:
            request = self._submit(prepared, req_context)
            request.stores_in_flight += 1
        return prepared

    def complete_store(self, prepared: PreparedStore, success: bool) -> None:
        request = self._complete(prepared)
        self.primary.complete_store(prepared, success)
        if request is not None:
            request.stores_in_flight -= 1
            self._forget_if_over(request)

    # The whole hierarchy

    def on_schedule_end(self) -> None:
        self.primary.on_schedule_end()

    def has_pending_work(self) -> bool:
        return self.primary.has_pending_work()

    def reset_cache(self) -> None:
        """Handles in flight stay known until they come back; the primary tier tells their generations apart."""
        self.primary.reset_cache()

    def take_events(self) -> list[ResidencyEvent]:
        return self.primary.take_events()

    def get_stats(self) -> Mapping[str, int | float]:
        """The primary tier's, and the manager's own counters."""
        return {**self.primary.get_stats(), "lifecycle_violations_total": self._violations}

    def shutdown(self) -> None:
        self.primary.shutdown()

    # Contract keeping

    def _may_submit(self, req_context: ReqContext, call: str) -> bool:
        """Whether the request may ask and submit now. Runs before anything is allocated (L7)."""
        request = self._requests.get(req_context.req_id)
        if request is not None and request.lifecycle.allows(Event.SUBMIT):
            return not request.refused
        self._break_contract(request or self._find(req_context.req_id), call, Event.SUBMIT)
        return False

    def _submit(self, prepared: PreparedLoad | PreparedStore, req_context: ReqContext) -> _Request:
        request = self._requests[req_context.req_id]
        request.lifecycle.advance(Event.SUBMIT)
        self._in_flight[id(prepared)] = (prepared, request)
        return request

    def _complete(self, prepared: PreparedLoad | PreparedStore) -> _Request | None:
        """Whose handle this is; None for an empty or foreign one, which is the primary tier's to judge."""
        _, request = self._in_flight.pop(id(prepared), (None, None))
        if request is not None:
            request.lifecycle.advance(Event.COMPLETE)
        return request

    def _forget_if_over(self, request: _Request) -> None:
        if not request.is_over:
            return
        req_id = request.lifecycle.req_id
        if self._requests.get(req_id) is request:
            del self._requests[req_id]
        self._remember(request)

    def _find(self, req_id: str) -> _Request:
        """The request by that id, be it over, or a stand-in for one that was never announced."""
        request = self._requests.get(req_id) or self._over.get(req_id)
        if request is None:
            request = _Request(RequestLifecycle(req_id, Phase.SIGNALLED, ["never announced"]))
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
