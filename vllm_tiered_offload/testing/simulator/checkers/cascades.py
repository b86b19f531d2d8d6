"""Checkers of what the tiers behind get: every stored chunk (L4), and every chunk of a REQUEST_LEVEL request (L5)."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from vllm_tiered_offload.contract.jobs import JobResult, LookupResult, PreparedStore, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import StoreOffer
from vllm_tiered_offload.telemetry.metrics import metric_key
from vllm_tiered_offload.testing.simulator.checkers.base import Checker, spy

if TYPE_CHECKING:
    from vllm_tiered_offload.testing.simulator.engine import Simulation
    from vllm_tiered_offload.testing.simulator.tier_watch import Flight


class _Cascades:
    """What one call to the manager hands to one tier, beside what the manager counts as left out for want of rows.

    (The counter is read only where something is missing: asking for numbers is a call to the tier, which may raise.)
    """

    def __init__(self, sim: "Simulation", number: int) -> None:
        self._sim = sim
        self._guard = sim.manager.guards[number]
        self._tier = sim.tiers.tiers[number]
        self._skipped_key = metric_key("cascades_skipped_total", tier=self._guard.name)
        self.name = self._guard.name
        self.wants_every_block: bool = self._tier.request_level
        self._takes = False
        self.submitted: Counter[tuple[str, OffloadKey]] = Counter()  # (request, key) since `begin`

    def begin(self) -> None:
        """The call begins."""
        self._takes = self._tier.bound and self._guard.accepts_jobs
        self.submitted.clear()

    def note(self, flight: "Flight") -> None:
        """The tier accepted a job."""
        if flight.tier == self.name and not flight.job.is_promotion:
            self.submitted.update((flight.job.req_context.req_id, key) for key in flight.job.keys)

    def gave_up(self) -> None:
        """The tier raised: what it would have got is nobody's fault but its own."""
        self._takes = False

    def missing(self, owed: Collection[tuple[str, OffloadKey]]) -> int:
        """Once the call is over: how many of the owed chunks the tier did not get, if more than were ever skipped."""
        takes = self._takes and self._guard.accepts_jobs  # a half-open breaker lets one job pass
        missing = sum(not self.submitted[chunk] for chunk in owed) if takes else 0
        self._tier.left_out += missing
        if not missing or self._tier.left_out <= self._sim.manager.get_stats().get(self._skipped_key, 0):
            return 0
        return missing


class _CascadeChecker(Checker):
    """Watches what each tier behind is handed during a call."""

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._open: set[tuple[str, str]] = set()  # (tier, request) between its beginning and its end there
        guards = getattr(sim.manager, "guards", ())
        self._tiers = [_Cascades(sim, number) for number in range(len(guards))]

    def tier_called(self, tier: str, method: str, req_id: str) -> None:
        if method == "on_new_request":
            self._open.add((tier, req_id))
        elif method == "on_request_finished":
            self._open.discard((tier, req_id))

    def tier_raised(self, tier: str, method: str) -> None:  # noqa: ARG002
        for cascades in self._tiers:
            if cascades.name == tier:
                cascades.gave_up()

    def tier_submitted(self, flight: "Flight") -> None:
        for cascades in self._tiers:
            cascades.note(flight)


class L4CascadesFirst(_CascadeChecker):
    """A completed store is cascaded to every tier behind.

    Each chunk that was stored well is handed to each tier that takes jobs within the call that completes it, or counted
    as skipped.

    Does not check the order within the call: l3 sees a job after the end, and an end that is not told then.
    """

    name = "l4"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._stores: dict[PreparedStore, list[tuple[int, str]]] = {}  # in flight: (life, request) of each part
        self._lives: Counter[str] = Counter()  # how often the id was begun
        self._good: list[tuple[str, OffloadKey]] = []  # of the completion that is going on
        self._was_open: set[tuple[str, str]] = set()  # (tier, request) pairs that knew each other when it began
        if self._tiers:
            spy(sim.manager, "on_new_request", lambda ctx: self._lives.update([ctx.req_id]))
            spy(sim.manager, "prepare_stores", lambda *_args: None, self._prepared)
            spy(sim.manager, "complete_store", self._completing, self._completed)

    def _prepared(self, prepared: PreparedStore, offers: Sequence[StoreOffer]) -> None:
        owners = [ctx.req_id for (_, ctx), taken in zip(offers, prepared.taken, strict=True) if taken]
        if owners:
            self._stores[prepared] = [(self._lives[req_id], req_id) for req_id in owners]

    def _completing(self, prepared: PreparedStore, failed: Collection[OffloadKey] = ()) -> None:
        owners = self._stores.pop(prepared)
        self._good = [
            (req_id, key)
            for (life, req_id), keys in zip(owners, prepared.parts(), strict=True)
            for key in keys
            if life == self._lives[req_id] and key not in failed
        ]
        self._was_open = set(self._open)
        for cascades in self._tiers:
            cascades.begin()

    def _completed(self, *_args: Any) -> None:
        for cascades in self._tiers:
            owed = [(req_id, key) for req_id, key in self._good if (cascades.name, req_id) in self._was_open]
            missing = cascades.missing(owed)
            if missing:
                raise self.broken(f"{missing} of {len(owed)} stored chunks not given to {cascades.name}", owed[0][0])


class L5WholeRequests(_CascadeChecker):
    """A REQUEST_LEVEL tier gets every block of a request that is offered, wherever the block is.

    A chunk in the accepted part of an offer that needs no store is handed to each REQUEST_LEVEL tier in that call when
    it is readable, and when the write that is under way resolves where it is not; until then the tier is not told of
    the request's end. (A tier that raised when it was told of the request has not asked for it.)

    Does not check chunks whose store is the request's own (l4 does), nor offers that were never made.
    """

    name = "l5"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._tiers = [cascades for cascades in self._tiers if cascades.wants_every_block]
        self._whole: set[tuple[str, str]] = set()  # (tier, request) that it wants every block of
        self._last_begun: dict[str, str] = {}  # tier -> the request that it heard of last
        self._parked: dict[OffloadKey, set[str]] = {}  # chunk on its way -> requests it is owed to
        self._owed: list[tuple[str, OffloadKey]] = []  # of the completion that is going on
        if self._tiers:
            spy(sim.manager, "prepare_stores", self._offering, self._offered)
            spy(sim.manager, "complete_store", self._completing, self._completed)
            spy(sim.manager, "on_new_request", self._forget)
            spy(sim.manager, "reset_cache", self._parked.clear)

    def _forget(self, ctx: ReqContext) -> None:
        """The id is used again: its former life is owed nothing any more."""
        for req_ids in self._parked.values():
            req_ids.discard(ctx.req_id)

    def _offering(self, _offers: Any) -> None:
        for cascades in self._tiers:
            cascades.begin()

    def _offered(self, prepared: PreparedStore, offers: Sequence[StoreOffer]) -> None:
        stored = set(prepared.keys)
        readable = []
        for (keys, ctx), accepted in zip(offers, prepared.accepted, strict=True):
            present = [key for key in keys[:accepted] if key not in stored]
            for key, result in zip(present, self.sim.manager.primary.lookup(present, ctx), strict=True):
                if result is LookupResult.HIT:
                    readable.append((ctx.req_id, key))
                elif result is LookupResult.HIT_PENDING:
                    self._parked.setdefault(key, set()).add(ctx.req_id)
        self._check(readable)

    def _completing(self, prepared: PreparedStore, failed: Collection[OffloadKey] = ()) -> None:
        for cascades in self._tiers:
            cascades.begin()
        resolved = [(req_id, key) for key in prepared.keys for req_id in self._parked.pop(key, ())]
        self._owed = [(req_id, key) for req_id, key in resolved if key not in failed]

    def _completed(self, *_args: Any) -> None:
        self._check(self._owed)

    def _check(self, owed: list[tuple[str, OffloadKey]]) -> None:
        for cascades in self._tiers:
            wanted = [(req_id, key) for req_id, key in owed if (cascades.name, req_id) in self._whole]
            missing = cascades.missing(wanted)
            if missing:
                raise self.broken(f"{missing} of {len(wanted)} present chunks not given to {cascades.name}", owed[0][0])

    def tier_raised(self, tier: str, method: str) -> None:
        super().tier_raised(tier, method)
        if method == "on_new_request":
            self._whole.discard((tier, self._last_begun.get(tier, "")))

    def tier_called(self, tier: str, method: str, req_id: str) -> None:
        super().tier_called(tier, method, req_id)
        if method == "on_new_request" and any(cascades.name == tier for cascades in self._tiers):
            self._whole.add((tier, req_id))
            self._last_begun[tier] = req_id
        if method == "on_request_finished" and (tier, req_id) in self._whole:
            self._whole.discard((tier, req_id))
            owed = sum(req_id in req_ids for req_ids in self._parked.values())
            if owed:
                raise self.broken(f"{tier} was told of the end while {owed} chunks were parked for it", req_id)

    def tier_ended(self, flight: "Flight", result: JobResult) -> None:  # noqa: ARG002
        if flight.job.is_promotion:
            for key in flight.job.keys:
                self._parked.pop(key, None)

    def tier_late(self, flight: "Flight") -> None:
        if flight.job.is_promotion:
            for key in flight.job.keys:
                self._parked.pop(key, None)
