"""`OffloadingConnectorScheduler`: the scheduler half of the connector, without vLLM.

Order of calls in one engine step (see docs/architecture.md):

    get_num_new_matched_tokens   a waiting request's prefix is looked up; rows answered as hits are pinned
    update_state_after_alloc     vLLM took the hit: the pinned rows become a load job; or it did not
    build_connector_meta         unclaimed rows are released, finished requests get their final stores and are
                                 signalled, chunks completed by this step are offered; all of it goes to the workers
    update_connector_output      acknowledgements end jobs
    request_finished             (any time between) the last unstored blocks are pinned before vLLM frees them

Rules that hold throughout:

 * Nothing here blocks or does I/O; every question is answered from memory.
 * A device block that a store reads stays pinned from planning to acknowledgement (D2), so nothing depends on when
   vLLM frees or reuses blocks.
 * Every job ends exactly once (job_table), and whatever it holds is given back then, not earlier.
 * Trouble with one request's offloading costs that request its offloading and nothing else (L7, `_contained`).
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_tiered_offload.contract.jobs import LookupResult, PreparedLoad, PreparedStore, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.lifecycle import Event, InvalidTransition, RequestLifecycle
from vllm_tiered_offload.contract.managers import OffloadingManager
from vllm_tiered_offload.contract.messages import (
    DeviceJob,
    GroupTransfer,
    RegionAnnouncement,
    StepMessage,
    WorkerReport,
)
from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.scheduler.adapters import Keep, what_to_keep
from vllm_tiered_offload.scheduler.block_pins import BlockPins
from vllm_tiered_offload.scheduler.job_table import JobRecord, JobTable
from vllm_tiered_offload.scheduler.load_planner import plan_load, tokens_by_medium
from vllm_tiered_offload.scheduler.lookup_planner import (
    ChunkRange,
    Prefix,
    loadable_tokens,
    lookup_range,
    readable_prefix,
)
from vllm_tiered_offload.scheduler.request_state import ChunkKeys, Offer, RequestState, Reservation
from vllm_tiered_offload.scheduler.scheduler_stats import SchedulerStats
from vllm_tiered_offload.scheduler.store_planner import (
    blocks_of_keys,
    chunks_within_pins,
    offload_limit,
    storable_chunks,
    written_at_finish,
)
from vllm_tiered_offload.scheduler.views import (
    BlockPoolView,
    BlockTables,
    BlockView,
    GroupShape,
    RequestView,
    ResolveBlockTables,
    StepView,
)
from vllm_tiered_offload.settings import Settings, parse_request_params
from vllm_tiered_offload.telemetry.events import Announcement, EventLedger
from vllm_tiered_offload.telemetry.stats import OffloadStats

logger = logging.getLogger(__name__)

# An Enum's member costs more to look up than most of what is done with it here.
_SUBMIT, _COMPLETE = Event.SUBMIT, Event.COMPLETE
_HIT, _HIT_PENDING = LookupResult.HIT, LookupResult.HIT_PENDING
_MISS, _RETRY = LookupResult.MISS, LookupResult.RETRY

NOTHING: tuple[int, bool] = (0, False)
ASK_AGAIN: tuple[None, bool] = (None, False)


@dataclass(frozen=True, slots=True)
class Role:
    """What this engine may do with the cache (vLLM's kv_role)."""

    stores: bool = True
    loads: bool = True


_NO_ROLE = Role(stores=False, loads=False)


class OffloadingConnectorScheduler:
    """Plans stores and loads, and keeps the books of both.

    `shape` is the one KV group that is offloaded; `resolve_blocks` gives a request's live block tables. With `events`
    somebody has to take them after every step.
    """

    def __init__(
        self,
        settings: Settings,
        manager: OffloadingManager,
        shape: GroupShape,
        *,
        role: Role = Role(),
        clock: Clock = monotonic,
        events: EventLedger | None = None,
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._shape = shape
        self._per_chunk = shape.blocks_per_chunk
        self._chunk_tokens, self._hash_tokens = shape.chunk_tokens, shape.hash_tokens
        self._tokens_ahead = shape.tokens_ahead
        self._role = role
        self._clock = clock
        self._strict = settings.lifecycle == "strict"
        self._max_offers = settings.max_store_offers
        self._resolve_blocks: ResolveBlockTables | None = None

        self._requests: dict[str, RequestState] = {}  # tracked or finishing, by request id
        self._finishing: dict[str, RequestState] = {}  # finished by vLLM, not yet signalled; also in _requests
        self._reserving: dict[str, RequestState] = {}  # requests with an unclaimed reservation of this pass
        self._jobs = JobTable()
        self._pins = BlockPins(settings.max_pinned_device_share)
        self._message = StepMessage()  # what the next build_connector_meta sends

        self._region_bound = False
        self._region_asked: float | None = None  # when a lookup first had to wait for the region
        self._device_cache_suspect = False  # vLLM's own reset failed: device hits may be older than the last reset
        self._stats = SchedulerStats(manager, self._pins)
        self._events = events

    # ---- start -------------------------------------------------------------------------------------------------

    def bind_device(self, pool: BlockPoolView, resolve_blocks: ResolveBlockTables) -> None:
        """vLLM's block pool and block tables exist."""
        self._pins.bind(pool)
        self._resolve_blocks = resolve_blocks

    def bind_region(self, announcement: RegionAnnouncement) -> None:
        """The workers have made the host region. Later announcements of the same region change nothing."""
        if self._region_bound:
            return
        self._region_bound = True
        self._jobs.num_ranks = announcement.geometry.num_ranks
        self._manager.bind_region(announcement.geometry)
        self._manager.open_region(announcement)

    # ---- requests ----------------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView, skip: bool = False) -> None:
        """A request arrives, not to be offloaded if `skip`. One of its id that is still finishing is finalised (L1)."""
        previous = self._requests.get(request.request_id)
        if previous is not None:
            self._end_abruptly(previous)
        params = parse_request_params(request.kv_transfer_params)
        for problem in params.problems:
            logger.warning("request %s: %s", request.request_id, problem)
        keep = what_to_keep(request.lora_request, self._settings.lora)
        ctx = ReqContext(request.request_id, request.kv_transfer_params, memory_only=keep is Keep.IN_MEMORY)
        policy = self._manager.on_new_request(ctx).policy
        self._requests[ctx.req_id] = RequestState(
            request=request,
            ctx=ctx,
            params=params,
            policy=policy,
            keys=self._keys_of(request),
            store_limit=offload_limit(
                self._settings.offload_prompt_only, request.num_prompt_tokens, params.max_offload_tokens
            ),
            lifecycle=RequestLifecycle(ctx.req_id),
            skipped=skip or keep is Keep.NOWHERE,
        )

    def _keys_of(self, request: RequestView) -> tuple[ChunkKeys, ...]:
        return (ChunkKeys(request, 0, self._shape),)

    def request_finished(self, request: RequestView, aborted: bool) -> None:
        """vLLM finished a request and frees its blocks next: pin what its final store will read (L2)."""
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request or not state.lifecycle.allows(Event.FINISH):
            return
        state.lifecycle.advance(Event.FINISH)
        self._finishing[state.req_id] = state
        self._release_reservation(state)
        with self._contained(state):
            written = written_at_finish(request.num_computed_tokens, request.num_tokens, state.written_tokens, aborted)
            self._pin_final_chunks(state, written)

    def _end_abruptly(self, state: RequestState) -> None:
        """The id of a finishing request is used again before the step that would have reported it."""
        if state.lifecycle.allows(Event.FINISH):
            state.lifecycle.advance(Event.FINISH)
            self._finishing[state.req_id] = state
        self._release_reservation(state)
        self._finalise(state)

    # ---- lookup and load ---------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's question for a request that (re)starts. Hits stay pinned until this pass's build_connector_meta."""
        state = self._requests.get(request.request_id)
        if state is None:
            return NOTHING
        self._release_reservation(state)
        state.restart(num_computed_tokens)
        if num_computed_tokens and self._device_cache_suspect:
            state.stale = True
        answer = self._answer(state, num_computed_tokens)
        if answer is not ASK_AGAIN:
            state.wait.answered()
        return answer

    def _answer(self, state: RequestState, num_computed_tokens: int) -> tuple[int | None, bool]:
        if state.request.skip_reading_prefix_cache or state.skipped or state.load_failed or not self._role.loads:
            return NOTHING
        if not self._region_bound:
            return ASK_AGAIN if self._waiting_for_region() else NOTHING
        try:
            return self._look_up(state, num_computed_tokens)
        except Exception as error:
            self._skip(state, error)
            return NOTHING

    def _waiting_for_region(self) -> bool:
        now = self._clock()
        if self._region_asked is None:
            self._region_asked = now
        return now - self._region_asked < self._settings.region_timeout

    def _look_up(self, state: RequestState, num_computed_tokens: int) -> tuple[int | None, bool]:
        chunk_tokens = self._shape.chunk_tokens
        chunks = lookup_range(state.request.num_tokens, num_computed_tokens, chunk_tokens, state.params.max_load_tokens)
        if chunks.empty:
            return NOTHING
        self._stats.count("lookup_tokens_total", state.request.num_tokens - num_computed_tokens)
        prefix = self._readable(state, chunks)
        keys = state.keys[0].slice(chunks.first, chunks.first + prefix.hits)
        # Somebody else is loading this very prefix: soon it is a device hit, and one load serves everybody.
        shared = bool(keys) and prefix.stop is not _RETRY and self._jobs.is_loading(keys[0])
        reason = _HIT_PENDING if shared else prefix.stop
        limits = self._settings.retry_timeout, self._settings.pending_timeout
        if state.wait.should_wait(chunks.first + prefix.hits, reason, self._clock(), *limits):
            return ASK_AGAIN
        tokens = loadable_tokens(chunks, prefix.hits, num_computed_tokens, chunk_tokens, self._settings.min_load_tokens)
        if not tokens:
            return NOTHING
        state.lifecycle.advance(_SUBMIT)
        prepared = self._manager.prepare_load(keys, state.ctx)
        state.reservation = Reservation(prepared, num_computed_tokens, chunks.first)
        self._reserving[state.req_id] = state
        tokens = loadable_tokens(
            chunks, len(prepared.keys), num_computed_tokens, chunk_tokens, self._settings.min_load_tokens
        )
        if not tokens:
            self._release_reservation(state)
            return NOTHING
        return tokens, True

    def _readable(self, state: RequestState, chunks: ChunkRange) -> Prefix:
        """How far the prefix is readable now. A request that was told to ask again goes on where it was stopped."""
        wait = state.wait
        begin = wait.resume_at(chunks)
        first = chunks.first + begin
        head = state.keys[0].slice(first, min(first + 1, chunks.end))
        if not head:
            return wait.note(chunks, Prefix(begin, None), all_known=True)
        (answer,) = self._manager.probe(head, state.ctx)
        if answer is _MISS or answer is _RETRY:
            return wait.note(chunks, Prefix(begin, answer), all_known=answer is _MISS)
        if answer is _HIT_PENDING and wait.waits_for_one(chunks):
            return wait.stop
        keys = state.keys[0].slice(first, chunks.end)
        results = self._manager.lookup(keys, state.ctx)
        if self._events is not None:
            self._note_found(self._events, state, first, keys, results)
        return wait.note(chunks, readable_prefix(results, begin), all_known=_RETRY not in results)

    @staticmethod
    def _note_found(
        events: EventLedger,
        state: RequestState,
        first: int,
        keys: Sequence[OffloadKey],
        results: Sequence[LookupResult],
    ) -> None:
        """This request knows the tokens of chunks that some tier brought back; for the request's life."""
        found = [
            (first + index, key)
            for index, (key, result) in enumerate(zip(keys, results, strict=True))
            if (result is _HIT or result is _HIT_PENDING) and key not in events
        ]
        events.hold(state.request, found)
        state.noted_keys += [key for _, key in found]

    def _release_reservation(self, state: RequestState) -> None:
        """Rows answered as hits that no load took."""
        reservation, state.reservation = state.reservation, None
        if reservation is None:
            return
        self._reserving.pop(state.req_id, None)
        if reservation.prepared.keys:
            self._manager.complete_load(reservation.prepared)
        state.lifecycle.advance(_COMPLETE)

    def update_state_after_alloc(self, request: RequestView, tables: BlockTables, num_external_tokens: int) -> None:
        """vLLM allocated device blocks. With `num_external_tokens` > 0 it waits for our load of that many tokens."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if num_external_tokens:
            loading = False
            with self._contained(state):
                loading = self._start_load(state, tables, num_external_tokens)
            if not loading:
                self._fail_load(state)
        if request.num_computed_tokens == 0:  # else: the second call, after the load, or a resumed session
            self._admit(state, num_external_tokens)

    def _admit(self, state: RequestState, num_external_tokens: int) -> None:
        """The request starts with a prefix hit: it offers what comes after, and uses what came before (V6)."""
        prefix_chunks = (state.local_tokens + num_external_tokens) // self._shape.chunk_tokens
        state.admitted(prefix_chunks)
        self._manager.touch(state.keys[0].slice(0, prefix_chunks), state.ctx)

    def _start_load(self, state: RequestState, tables: BlockTables, num_external_tokens: int) -> bool:
        """Turn the reservation into a load job; False if it does not cover what vLLM waits for."""
        reservation = state.reservation
        if reservation is None:
            return False
        start = reservation.num_computed_tokens
        transfer = plan_load(self._shape, reservation, tables[0], num_external_tokens)
        if transfer is None:
            return False
        state.reservation = None
        self._reserving.pop(state.req_id, None)
        record = self._jobs.add_load(state, reservation.prepared, self._deadline())
        media = self._manager.hit_media(reservation.prepared.keys, state.ctx)
        state.loaded_from = tokens_by_medium(self._shape, reservation, media, num_external_tokens)
        self._stats.count("loaded_tokens_total", num_external_tokens)
        self._message.loads.append(DeviceJob(record.job_id, state.req_id, [transfer]))
        logger.debug("request %s loads %d tokens from token %d", state.req_id, num_external_tokens, start)
        return True

    def loaded_from(self, req_id: str) -> Mapping[str, int]:
        """Tokens of the request's last load by the medium that they came from. Changes nothing."""
        state = self._requests.get(req_id)
        return state.loaded_from if state is not None else {}

    def _fail_load(self, state: RequestState) -> None:
        """vLLM waits for a load that cannot be made: the workers report it as a failed receive, and it recomputes."""
        logger.warning("request %s: no rows for the promised load; it is recomputed", state.req_id)
        self._release_reservation(state)
        state.lifecycle.advance(_SUBMIT)
        record = self._jobs.add_load(state, PreparedLoad((), ()), self._deadline())
        self._message.loads.append(DeviceJob(record.job_id, state.req_id, []))
        self._message.cancelled_loads.append(record.job_id)

    # ---- store -------------------------------------------------------------------------------------------------

    @property
    def _takes_stores(self) -> bool:
        return self._role.stores and self._region_bound

    def _may_store(self, state: RequestState) -> bool:
        return not (state.stale or state.skipped) and state.declines < self._max_offers

    def _due(self, state: RequestState, written_tokens: int) -> int:
        """The end of the chunks that are full once `written_tokens` slots are written; 0 where none of them is news."""
        chunk_tokens = self._chunk_tokens
        hashed = self._hashed_tokens(state)
        end = storable_chunks(written_tokens, hashed, chunk_tokens, state.store_limit)
        full = written_tokens - written_tokens % chunk_tokens
        # Until the next chunk is full there is nothing to look at, unless hashes of this one are still to come.
        if hashed >= full:
            state.quiet_until = full + chunk_tokens
        return end if end > state.offered_chunks and self._may_store(state) else 0

    def _hashed_tokens(self, state: RequestState) -> int:
        """The last token at which a chunk that has its key can end."""
        return len(state.request.block_hashes) * self._hash_tokens - self._tokens_ahead

    def _plan_offers(self, due: Sequence[tuple[RequestState, int]]) -> list[Offer]:
        """The chunks of each request up to where they are due, as far as device blocks may be pinned; maybe none."""
        offers, room = [], self._pins.room
        for state, end in due:
            try:
                offer = self._cut_offer(state, end, room)
            except Exception as error:
                self._skip(state, error)
                continue
            room -= len(offer.blocks)
            offers.append(offer)
        return offers

    def _cut_offer(self, state: RequestState, end: int, room: int) -> Offer:
        """Chunks up to `end`, or as many leading ones as may be pinned and hold nothing but real blocks."""
        assert self._resolve_blocks is not None
        first, per_chunk = state.next_chunk, self._per_chunk
        wanted = (end - first) * per_chunk
        if wanted > room:
            wanted = chunks_within_pins(end - first, per_chunk, room) * per_chunk
        begin = first * per_chunk
        blocks = self._resolve_blocks(state.ctx.req_id)[0][begin : begin + wanted]
        real = len(blocks)
        for index, block in enumerate(blocks):
            if block.is_null:
                real = index
                break
        if real < wanted:
            blocks = blocks[: real - real % per_chunk]
        return Offer(state, first, end, state.keys[0].anew(first, first + len(blocks) // per_chunk), blocks)

    def _note_accepted(self, offer: Offer, num_accepted: int) -> None:
        """`num_accepted` leading keys of an offer need no further one."""
        state = offer.state
        state.next_chunk = offer.chunk_after(num_accepted)
        state.offered_chunks = offer.end
        if state.next_chunk == offer.end:
            state.declines = 0
        elif num_accepted < len(offer.keys):
            state.declines += 1
            self._declined("tier_full")
        else:
            # Pins held the rest back, no tier declined it. It is due in the next step: a window moves on meanwhile.
            state.offered_chunks, state.quiet_until = state.next_chunk, 0
            self._declined("device_pins")

    def _declined(self, reason: str) -> None:
        self._stats.count("declined_stores_total", reason=reason)

    def _store(self, offers: Sequence[Offer]) -> None:
        """Offer the chunks of a step to the manager; what it takes becomes one job."""
        prepared = self._manager.prepare_stores([(offer.keys, offer.state.ctx) for offer in offers])
        states: list[RequestState] = []
        chosen: list[tuple[Offer, Sequence[OffloadKey]]] = []
        end = 0
        for offer, accepted, taken in zip(offers, prepared.accepted, prepared.taken, strict=True):
            state = offer.state
            self._note_accepted(offer, accepted)
            if not taken:
                continue
            end += taken
            states.append(state)
            state.lifecycle.advance(_SUBMIT)
            keys = offer.keys if taken == len(offer.keys) else prepared.keys[end - taken : end]
            chosen.append((offer, keys))
            if self._events is not None:
                self._hold_events(self._events, offer, keys)
        if not states:
            return
        blocks, transfers = self._plan_copies(chosen, prepared.block_ids)
        self._pins.pin(blocks)
        record = self._jobs.add_store(states, prepared, blocks, self._deadline())
        self._message.stores.append(DeviceJob(record.job_id, "", transfers))

    def _plan_copies(
        self, chosen: Sequence[tuple[Offer, Sequence[OffloadKey]]], rows: Sequence[int]
    ) -> tuple[list[BlockView], list[GroupTransfer]]:
        """The device blocks of what the manager took of each offer, and their way into `rows`."""
        blocks: list[BlockView] = []
        for offer, keys in chosen:
            whole = len(keys) == len(offer.keys)
            blocks += offer.blocks if whole else blocks_of_keys(keys, offer.keys, offer.blocks, self._per_chunk)
        return blocks, [GroupTransfer(0, list(rows), [block.block_id for block in blocks])]

    @staticmethod
    def _hold_events(events: EventLedger, offer: Offer, keys: Collection[OffloadKey]) -> None:
        """This request knows the tokens of the chunks that it stores; until the store has ended."""
        stored = set(keys)
        events.hold(offer.state.request, [pair for pair in offer.numbered_keys() if pair[1] in stored])

    def _pin_final_chunks(self, state: RequestState, written_tokens: int) -> None:
        hashed = self._hashed_tokens(state)
        end = storable_chunks(written_tokens, hashed, self._shape.chunk_tokens, state.store_limit)
        if end <= state.next_chunk or not (self._takes_stores and self._may_store(state)):
            return
        offer = self._cut_offer(state, end, self._pins.room)
        if offer.keys:
            self._pins.pin(offer.blocks)
            state.final = offer
        else:
            self._declined("device_pins")

    def _drop_final(self, state: RequestState) -> None:
        final, state.final = state.final, None
        if final is not None:
            self._pins.unpin(final.blocks)

    def _store_contained(self, offers: Sequence[Offer]) -> None:
        """What raises here is the manager's fault, not one request's: all of them go on without offloading."""
        offers = [offer for offer in offers if offer.state.lifecycle.allows(_SUBMIT) or self._refuse(offer.state)]
        try:
            self._store(offers)
        except Exception as error:
            for offer in offers:
                self._skip(offer.state, error)

    def _refuse(self, state: RequestState) -> bool:
        """The contract does not allow a submit; found out before anything is allocated (L7)."""
        life = state.lifecycle
        self._skip(state, InvalidTransition(life.req_id, life.phase, _SUBMIT, life.history))
        return False

    def _finalise(self, state: RequestState) -> None:
        """Build the final store job of a finished request, then signal the manager: nothing more is submitted."""
        if state.final is not None:
            self._store_contained([state.final])
        self._signal(state)

    def _signal(self, state: RequestState) -> None:
        """The one place that forwards a finish (L1): exactly once, after the last submit."""
        self._drop_final(state)
        self._finishing.pop(state.req_id, None)
        if self._requests.get(state.req_id) is state:
            del self._requests[state.req_id]
        if self._events is not None:
            self._events.release(state.noted_keys)
        state.lifecycle.advance(Event.SIGNAL)
        self._manager.on_request_finished(state.ctx)

    # ---- step --------------------------------------------------------------------------------------------------

    def build_connector_meta(self, step: StepView) -> StepMessage:
        """Everything that the workers have to do in this step."""
        requests = self._requests
        for state in list(self._reserving.values()):
            self._release_reservation(state)
        for req_id in step.preempted_req_ids:
            if req_id in requests:
                requests[req_id].written_tokens = 0
                requests[req_id].load_failed = False
        over = [self._finishing[req_id] for req_id in step.finished_req_ids if req_id in self._finishing]
        self._store_all(over, step.num_scheduled_tokens)
        for state in over:
            self._signal(state)
        self._manager.on_schedule_end()
        message, self._message = self._message, StepMessage()
        return message

    def _store_all(self, over: Sequence[RequestState], num_scheduled_tokens: Mapping[str, int]) -> None:
        """Store what this step completes: last chunks of requests that are over, and full ones of the others."""
        offers = [state.final for state in over if state.final is not None]
        due: list[tuple[RequestState, int]] = []
        requests, takes_stores = self._requests, self._takes_stores
        for req_id, num_tokens in num_scheduled_tokens.items():
            state = requests.get(req_id)
            if state is None:
                continue
            written = state.written_tokens = state.request.num_computed_tokens + num_tokens
            if written < state.quiet_until or not takes_stores:
                continue
            end = self._due(state, written)
            if end:
                due.append((state, end))
        for offer in self._plan_offers(due) if due else ():
            if offer.keys:
                offers.append(offer)
            else:
                self._note_accepted(offer, 0)
        if offers:
            self._store_contained(offers)

    def update_connector_output(
        self,
        report: WorkerReport | None,
        invalid_block_ids: Collection[int] = (),
        failed_req_ids: Collection[str] = (),
    ) -> None:
        """What the workers did.

        `invalid_block_ids`: device blocks that another connector failed to fill. `failed_req_ids`: requests whose
        load failed, ours or another connector's. They are recomputed, without another load: vLLM 0.32 goes on
        counting such a request among the prefills that other loads must leave room for, itself included, and in a
        small pool it would wait for itself for ever.
        """
        if invalid_block_ids:
            self._distrust_blocks(invalid_block_ids)
        for req_id in failed_req_ids:
            if req_id in self._requests:
                self._requests[req_id].load_failed = True
        if report is None:
            return
        if report.region is not None:
            self.bind_region(report.region)
        if report.broken is not None:
            self._give_up(report.broken)
        for record in self._jobs.acknowledge(report.acks):
            self._end_job(record)

    def _give_up(self, reason: str) -> None:
        """Copies will never work again in some worker: what is in flight ends, nothing new is begun."""
        if self._role != _NO_ROLE:
            self._role = _NO_ROLE
            self._stats.set("copy_engine_broken", 1)
            logger.error("nothing is loaded or stored any more until the engine is restarted: %s", reason)

    def _end_job(self, record: JobRecord) -> None:
        """Give back all that the job held."""
        failed = record.error is not None and not record.cancelled
        if record.store is not None:
            self._end_store(record, record.store)
        elif record.load is not None and record.load.keys:
            self._manager.complete_load(record.load, record.load.keys if failed else ())
        for state in record.states:
            state.lifecycle.advance(_COMPLETE)
        if failed:
            kind = f"load of request {record.states[0].req_id}" if record.load is not None else "store"
            logger.warning("job %d, a %s, failed: %s", record.job_id, kind, record.error)

    def _end_store(self, record: JobRecord, prepared: PreparedStore) -> None:
        self._pins.unpin(record.pinned)
        self._manager.complete_store(prepared, prepared.keys if record.error is not None else record.distrusted)
        if self._events is not None:
            self._events.release(prepared.keys)

    def _distrust_blocks(self, invalid_block_ids: Collection[int]) -> None:
        """Requests over these blocks computed on garbage: what they store in flight must not count (D1)."""
        assert self._resolve_blocks is not None
        for state in self._requests.values():
            tables = self._resolve_blocks(state.req_id) if state.lifecycle.allows(Event.FINISH) else ()
            if any(block.block_id in invalid_block_ids for table in tables for block in table):
                valid = state.request.num_computed_tokens
                state.written_tokens = min(state.written_tokens, valid)
                state.next_chunk = min(state.next_chunk, valid // self._shape.chunk_tokens)
                state.offered_chunks = min(state.offered_chunks, state.next_chunk)
                state.quiet_until = 0
                self._distrust_stores(state)

    def _distrust_stores(self, state: RequestState) -> None:
        """What this request stores attended to device blocks that another connector failed to load."""
        for record in self._jobs:
            if record.store is not None:
                for owner, keys in zip(record.states, record.store.parts(), strict=True):
                    if owner is state:
                        record.distrusted.update(keys)

    # ---- liveness, reset, shutdown -----------------------------------------------------------------------------

    def _deadline(self) -> float:
        return self._clock() + self._settings.job_timeout

    def has_pending_work(self) -> bool:
        """Whether an otherwise idle engine must go on stepping for us. Bounded by each job's deadline (V5)."""
        message = self._message
        return (
            bool(self._finishing or message.stores or message.loads or message.cancelled_loads)
            or self._jobs.any_within_deadline(self._clock())
            or self._manager.has_pending_work()
        )

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for our stores would free device memory, so that vLLM need not preempt (D2)."""
        return self._pins.hold_back_memory() and self._jobs.any_within_deadline(self._clock())

    def reset_cache(self) -> None:
        """Forget everything stored (L6). Device pins stay until the workers acknowledge."""
        # First of all: pins of final stores, which end below, were in the way of vLLM's own reset.
        self._device_cache_suspect = self._pins.bound and not self._pins.pool_is_empty()
        for state in list(self._reserving.values()):
            self._release_reservation(state)
        for state in list(self._finishing.values()):
            self._signal(state)
        for state in self._requests.values():
            state.stale = state.stale or state.request.num_computed_tokens > 0
        for record in self._jobs:
            if record.load is not None and not record.cancelled:
                record.cancelled = True
                self._message.cancelled_loads.append(record.job_id)
        self._manager.reset_cache()

    def shutdown(self) -> None:
        """The engine stops. Idempotent."""
        self._manager.shutdown()

    # ---- trouble and numbers -----------------------------------------------------------------------------------

    @contextmanager
    def _contained(self, state: RequestState) -> Iterator[None]:
        """Whatever goes wrong inside costs this request its offloading, not the engine (L7)."""
        try:
            yield
        except Exception as error:
            self._skip(state, error)

    def _skip(self, state: RequestState, error: Exception) -> None:
        """Raises `error` when strict."""
        if self._strict:
            raise error
        state.skipped = True
        self._stats.count("lifecycle_violations_total")
        logger.warning(
            "request %s is not offloaded any more: %s (set lifecycle to 'strict' to stop at the first one)",
            state.req_id,
            error,
            exc_info=True,
        )

    def take_stats(self) -> OffloadStats | None:
        """What was counted since the last call and the gauges that changed, or None where there is nothing to say."""
        return self._stats.take()

    def take_events(self) -> list[Announcement]:
        """Residency changes since the last call, with what consumers need to know of each chunk."""
        return self._events.announce(self._manager.take_events()) if self._events is not None else []

    @property
    def num_pinned_blocks(self) -> int:
        """Device blocks that stores in flight or final stores hold."""
        return self._pins.num_blocks

    @property
    def jobs_in_flight(self) -> Iterable[JobRecord]:
        """Device jobs that not every rank has acknowledged. For checks."""
        return self._jobs

    @property
    def manager(self) -> OffloadingManager:
        """The layer below. For checks."""
        return self._manager

    def debug_state(self) -> dict[str, int]:
        """Sizes of everything that must be empty once all requests ended and all jobs were acknowledged."""
        return {
            "requests": len(self._requests),
            "finishing": len(self._finishing),
            "reserving": len(self._reserving),
            "jobs": len(self._jobs),
            "loading": self._jobs.num_loading,
            "pinned_blocks": self._pins.num_blocks,
            "unsent": len(self._message.loads) + len(self._message.stores),
            "noted_events": self._events.num_held if self._events is not None else 0,
            **{f"manager.{name}": size for name, size in self._manager.leftovers().items()},
        }
