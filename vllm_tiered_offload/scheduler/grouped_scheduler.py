"""The scheduler half for models whose KV cache is not one plain full-attention group.

Everything that does not ask which blocks a hit needs is the base class's; requests are counted in strides there (see
`scheduler.groups`), and an offer of some strides carries the chunks of all groups, stride by stride, so that a part
that was taken is a part of the prefix.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from vllm_tiered_offload.contract.jobs import LookupResult, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.lifecycle import Event
from vllm_tiered_offload.contract.managers import OffloadingManager
from vllm_tiered_offload.contract.messages import DeviceJob, GroupTransfer
from vllm_tiered_offload.scheduler.groups import (
    StoredChunk,
    chunks_between,
    longest_hit,
    needed_chunks,
    plan_chunk,
    plan_load_of_group,
    plan_stores,
    stored_chunks,
    stride_of,
    why_wait,
    window_start,
)
from vllm_tiered_offload.scheduler.load_planner import tokens_by_medium
from vllm_tiered_offload.scheduler.lookup_planner import ChunkRange, lookup_range, readable_prefix
from vllm_tiered_offload.scheduler.request_state import ChunkKeys, Offer, RequestState, Reservation
from vllm_tiered_offload.scheduler.scheduler import ASK_AGAIN, NOTHING, OffloadingConnectorScheduler
from vllm_tiered_offload.scheduler.views import BlockTables, BlockView, GroupShape, RequestView
from vllm_tiered_offload.settings import Settings


@dataclass(slots=True, eq=False)
class GroupedOffer(Offer):
    """Strides [first_chunk, covered) of one request, as far as they can still be stored: `chunks[i]` has `keys[i]`.

    Of the strides behind, chunks that can be stored now or never. They will be gone when their stride is offered.
    """

    covered: int
    chunks: list[StoredChunk]
    stride_tokens: int

    def chunk_after(self, num_keys: int) -> int:
        if num_keys == len(self.chunks):
            return self.covered
        return min(self.covered, self.chunks[num_keys].stride(self.stride_tokens))

    def numbered_keys(self) -> Iterable[tuple[int, OffloadKey]]:
        return ((chunk.chunk, key) for chunk, key in zip(self.chunks, self.keys, strict=True))

    def chunks_of(self, keys: Sequence[OffloadKey]) -> Iterator[StoredChunk]:
        """The chunks of `keys`, a subsequence of the offer's."""
        wanted = iter(keys)
        want = next(wanted, None)
        for chunk, key in zip(self.chunks, self.keys, strict=True):
            if key == want:
                yield chunk
                want = next(wanted, None)


@dataclass(slots=True)
class _Question:
    """What the manager said about one request's chunks in the course of one lookup.

    Where the hit ends is found out by probing, which moves nothing: of a long prefix that full attention could use,
    only what the other groups can go on from is worth a promotion.
    """

    manager: OffloadingManager
    state: RequestState
    keys: dict[int, ChunkKeys]  # by group
    probed: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    answers: dict[OffloadKey, LookupResult] = field(default_factory=dict)  # of lookups

    def slice(self, shape: GroupShape, chunks: ChunkRange) -> list[OffloadKey]:
        return self.keys[shape.group_idx].slice(chunks.first, chunks.end)

    def present(self, shape: GroupShape, chunks: ChunkRange) -> int:
        """How many leading chunks are there, or may yet turn out to be."""
        found = self._known(self.probed, self.manager.probe, self.slice(shape, chunks))
        return found.index(LookupResult.MISS) if LookupResult.MISS in found else len(found)

    def readable(self, shape: GroupShape, chunks: ChunkRange) -> int:
        """How many leading chunks are readable now."""
        return readable_prefix(self.look_up(self.slice(shape, chunks))).hits

    def look_up(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """What is known of the leading keys, up to the first that is missing; what another tier has is set off."""
        return self._known(self.answers, self.manager.lookup, keys)

    def _known(
        self,
        known: dict[OffloadKey, LookupResult],
        ask: Callable[[Sequence[OffloadKey], ReqContext], list[LookupResult]],
        keys: Sequence[OffloadKey],
    ) -> list[LookupResult]:
        """Behind the first key that is missing nobody has looked."""
        found = [known[key] for key in takewhile(known.__contains__, keys)]
        if len(found) < len(keys) and LookupResult.MISS not in found:
            more = ask(keys[len(found) :], self.state.ctx)
            if LookupResult.MISS in more:
                more = more[: more.index(LookupResult.MISS) + 1]
            known.update(zip(keys[len(found) :], more, strict=False))
            found += more
        return found


@dataclass(frozen=True, slots=True)
class _Part:
    """A group's part of a hit."""

    shape: GroupShape
    chunks: ChunkRange
    keys: list[OffloadKey]


@dataclass(frozen=True, slots=True)
class GroupedReservation(Reservation):
    """`prepared` holds the keys of `parts`, one behind the other; the hit ends at token `end`."""

    parts: tuple[_Part, ...]
    end: int


@dataclass(slots=True)
class _Plan:
    """What one request is to store in a step: strides up to `end` are due."""

    state: RequestState
    end: int
    leaving: list[StoredChunk] = field(default_factory=list)  # stored now or never
    chunks: list[StoredChunk] = field(default_factory=list)  # of strides up to `covered`, without those in `leaving`
    covered: int = 0

    @property
    def position(self) -> int:
        """The token that is computed next."""
        return self.state.written_tokens


class GroupedScheduler(OffloadingConnectorScheduler):
    """`shapes`: the offloaded KV groups. All other arguments are the base class's."""

    def __init__(
        self, settings: Settings, manager: OffloadingManager, shapes: Sequence[GroupShape], **options: Any
    ) -> None:
        super().__init__(settings, manager, stride_of(shapes), **options)
        # Full attention first: its answer bounds what is asked of the others.
        self._shapes = sorted(shapes, key=lambda shape: not shape.reads_all)
        self._stride = self._shape.chunk_tokens

    def _keys_of(self, request: RequestView) -> tuple[ChunkKeys, ...]:
        return tuple(ChunkKeys(request, shape.group_idx, shape) for shape in self._shapes)

    # ---- lookup and load ---------------------------------------------------------------------------------------

    def _look_up(self, state: RequestState, num_computed_tokens: int) -> tuple[int | None, bool]:
        limit_tokens = state.params.max_load_tokens
        # Behind the hashed tokens there are no keys to ask for.
        usable = min(state.request.num_tokens, self._hashed_tokens(state) + 1)
        strides = lookup_range(usable, num_computed_tokens, self._stride, limit_tokens)
        if strides.empty:
            return NOTHING
        self._stats.count("lookup_tokens_total", state.request.num_tokens - num_computed_tokens)
        head = self._probe_head(state, num_computed_tokens)
        if head is LookupResult.MISS or head is LookupResult.RETRY:
            return ASK_AGAIN if self._should_wait(state, (), [head]) else NOTHING
        question = _Question(self._manager, state, self._keys_by_group(state))
        limit = strides.end * self._stride
        end = longest_hit(self._shapes, self._stride, num_computed_tokens, limit, question.present)
        parts = self._parts(question, num_computed_tokens, end)
        answers = [answer for part in parts for answer in question.look_up(part.keys)]
        if self._should_wait(state, parts, answers):
            return ASK_AGAIN
        if answers.count(LookupResult.HIT) < len(answers):
            end = longest_hit(self._shapes, self._stride, num_computed_tokens, end, question.readable)
            parts = self._parts(question, num_computed_tokens, end)
        return self._reserve(state, num_computed_tokens, end, parts)

    def _probe_head(self, state: RequestState, local_tokens: int) -> LookupResult:
        """What is known of the first chunk that every hit needs (most prompts are new); HIT where there is none."""
        shape = self._shapes[0]
        if not shape.reads_all:
            return LookupResult.HIT
        chunk = local_tokens // shape.chunk_tokens
        (answer,) = self._manager.probe(state.keys[0].slice(chunk, chunk + 1), state.ctx)
        return answer

    def _keys_by_group(self, state: RequestState) -> dict[int, ChunkKeys]:
        return {shape.group_idx: keys for shape, keys in zip(self._shapes, state.keys, strict=True)}

    def _parts(self, question: _Question, local_tokens: int, end: int) -> tuple[_Part, ...]:
        """All that a hit at `end` needs; nothing where that is no hit."""
        if end <= local_tokens:
            return ()
        ranges = [(shape, needed_chunks(shape, local_tokens, end)) for shape in self._shapes]
        parts = [_Part(shape, chunks, question.slice(shape, chunks)) for shape, chunks in ranges if not chunks.empty]
        if self._events is not None:
            for part in parts:
                answers = question.look_up(part.keys)
                self._note_found(self._events, question.state, part.chunks.first, part.keys[: len(answers)], answers)
        return tuple(parts)

    def _should_wait(self, state: RequestState, parts: Sequence[_Part], answers: Sequence[LookupResult]) -> bool:
        reason = why_wait(answers)
        # Somebody else is loading this very prefix: soon it is a device hit, and one load serves everybody.
        if reason is None and parts and self._jobs.is_loading(parts[0].keys[0]):
            reason = LookupResult.HIT_PENDING
        limits = self._settings.retry_timeout, self._settings.pending_timeout
        return state.wait.should_wait(answers.count(LookupResult.HIT), reason, self._clock(), *limits)

    def _reserve(
        self, state: RequestState, local_tokens: int, end: int, parts: tuple[_Part, ...]
    ) -> tuple[int | None, bool]:
        """Pin the rows of a hit. All of them are readable: a row that is not after all makes it no hit."""
        if end - local_tokens < max(self._settings.min_load_tokens, 1) or not parts:
            return NOTHING
        state.lifecycle.advance(Event.SUBMIT)
        keys = [key for part in parts for key in part.keys]
        prepared = self._manager.prepare_load(keys, state.ctx)
        first = parts[0].chunks.first
        state.reservation = GroupedReservation(prepared, local_tokens, first, parts, end)
        self._reserving[state.req_id] = state
        if len(prepared.keys) < len(keys):
            self._release_reservation(state)
            return NOTHING
        return end - local_tokens, True

    def _admit(self, state: RequestState, num_external_tokens: int) -> None:
        strides = (state.local_tokens + num_external_tokens) // self._stride
        state.admitted(strides)
        self._manager.touch(self._keys_in_use(state, strides), state.ctx)

    def _keys_in_use(self, state: RequestState, strides: int) -> list[OffloadKey]:
        """What a hit of that many strides is made of, in prefix order. What lies before a window may age."""
        tail = window_start(self._shapes, strides, self._stride)
        groups = list(zip(self._shapes, state.keys, strict=True))
        full = [keys.slice(0, tail * self._stride // shape.chunk_tokens) for shape, keys in groups if shape.reads_all]
        in_step = len({len(keys) for keys in full}) == 1
        heads = [key for keys in (zip(*full, strict=True) if in_step else full) for key in keys]
        keys_of = self._keys_by_group(state)
        chunks = (one for stride in range(tail, strides) for one in stored_chunks(self._shapes, stride, self._stride))
        return heads + [key for shape, chunk in chunks for key in keys_of[shape.group_idx].slice(chunk, chunk + 1)]

    def _start_load(self, state: RequestState, tables: BlockTables, num_external_tokens: int) -> bool:
        reservation = state.reservation
        if not isinstance(reservation, GroupedReservation):
            return False
        if reservation.num_computed_tokens + num_external_tokens != reservation.end:
            return False
        transfers = _plan_load(reservation, tables)
        if transfers is None:
            return False
        state.reservation = None
        self._reserving.pop(state.req_id, None)
        record = self._jobs.add_load(state, reservation.prepared, self._deadline())
        media = self._manager.hit_media(reservation.prepared.keys, state.ctx)
        state.loaded_from = _loaded_from(reservation, media)
        self._stats.count("loaded_tokens_total", num_external_tokens)
        self._message.loads.append(DeviceJob(record.job_id, state.req_id, transfers))
        return True

    # ---- store -------------------------------------------------------------------------------------------------

    def _plan_offers(self, due: Sequence[tuple[RequestState, int]]) -> list[Offer]:
        offers = super()._plan_offers(due)
        if all(offer.chunk_after(len(offer.keys)) == offer.end for offer in offers):
            return offers
        return self._plan_offers_within_pins([_Plan(state, end) for state, end in due if not state.skipped])

    def _plan_offers_within_pins(self, plans: Sequence[_Plan]) -> list[Offer]:
        """Strides in order, as far as pins go, and first of all what can only be stored now and a request like this one
        will look for: the window in front of its end. That takes half of the pins at most, because every hit needs full
        attention from the start."""
        for plan in plans:
            with self._contained(plan.state):
                plan.leaving = self._leaving(plan)
        room = self._pins.room
        patient_room = max(room - sum(_num_blocks(plan.leaving) for plan in plans), room // 2)
        for plan in plans:
            with self._contained(plan.state):
                plan.chunks, plan.covered = self._leading_strides(plan.state, plan.end, patient_room, plan.leaving)
            patient_room -= _num_blocks(plan.chunks)
            room -= _num_blocks(plan.chunks)
        offers = []
        for plan in plans:
            last = _last_within(plan.leaving, room)
            room -= _num_blocks(last)
            chunks = sorted([*plan.chunks, *last], key=self._stride_of)
            with self._contained(plan.state):
                offers.append(self._offer(plan.state, plan.end, plan.covered, chunks))
        return offers

    def _cut_offer(self, state: RequestState, end: int, room: int) -> Offer:
        """Strides up to `end`, or as many leading ones as may be pinned."""
        chunks, covered = self._leading_strides(state, end, room)
        return self._offer(state, end, covered, chunks)

    def _leading_strides(
        self, state: RequestState, end: int, room: int, but: Collection[StoredChunk] = ()
    ) -> tuple[list[StoredChunk], int]:
        """Chunks of leading strides up to `end` that fit into `room` blocks, without some; and where these end."""
        tables = self._tables_of(state)
        left_out = {(stored.shape.group_idx, stored.chunk) for stored in but}
        chunks: list[StoredChunk] = []
        for stride in range(state.next_chunk, end):
            planned = [
                stored
                for shape, chunk in stored_chunks(self._shapes, stride, self._stride)
                if (shape.group_idx, chunk) not in left_out
                and (stored := self._plan_chunk(state, shape, chunk, tables)) is not None
            ]
            room -= _num_blocks(planned)
            if room < 0:
                return chunks, stride
            chunks += planned
        return chunks, end

    def _leaving(self, plan: _Plan) -> list[StoredChunk]:
        """What the longest hit of a request with these tokens reads, and vLLM gives up when it computes the next one;
        stride by stride."""
        tables, due = self._tables_of(plan.state), range(plan.state.next_chunk, plan.end)
        longest = (plan.position - 1) // self._stride * self._stride
        leaving = [
            stored
            for shape in self._shapes
            for chunk in chunks_between(shape, longest, plan.position)
            if (stored := self._plan_chunk(plan.state, shape, chunk, tables)) is not None
            and self._stride_of(stored) in due
            and stored.leaves(plan.position)
        ]
        leaving.sort(key=self._stride_of)
        return leaving

    def _plan_chunk(
        self, state: RequestState, shape: GroupShape, chunk: int, tables: BlockTables
    ) -> StoredChunk | None:
        return plan_chunk(shape, chunk, self._stride, tables[shape.group_idx], state.local_tokens)

    def _stride_of(self, chunk: StoredChunk) -> int:
        return chunk.stride(self._stride)

    def _tables_of(self, state: RequestState) -> BlockTables:
        assert self._resolve_blocks is not None
        return self._resolve_blocks(state.ctx.req_id)

    def _offer(self, state: RequestState, end: int, covered: int, chunks: list[StoredChunk]) -> Offer:
        """`chunks` stride by stride."""
        keys_of = self._keys_by_group(state)
        keys = [keys_of[one.shape.group_idx].anew(one.chunk, one.chunk + 1)[0] for one in chunks]
        blocks = [block for one in chunks for block in one.blocks]
        return GroupedOffer(state, state.next_chunk, end, keys, blocks, covered, chunks, self._stride)

    def _plan_copies(
        self, chosen: Sequence[tuple[Offer, Sequence[OffloadKey]]], rows: Sequence[int]
    ) -> tuple[list[BlockView], list[GroupTransfer]]:
        chunks: list[StoredChunk] = []
        for offer, keys in chosen:
            assert isinstance(offer, GroupedOffer)
            chunks += offer.chunks_of(keys)
        return [block for chunk in chunks for block in chunk.blocks], plan_stores(chunks, rows)


def _num_blocks(chunks: Sequence[StoredChunk]) -> int:
    return sum(len(chunk.blocks) for chunk in chunks)


def _last_within(chunks: Sequence[StoredChunk], room: int) -> list[StoredChunk]:
    """As many of the last chunks as fit into `room` blocks: a window is of use up to where it was whole."""
    first = len(chunks)
    while first and len(chunks[first - 1].blocks) <= room:
        first -= 1
        room -= len(chunks[first].blocks)
    return list(chunks[first:])


def _loaded_from(reservation: GroupedReservation, media: Sequence[str]) -> dict[str, int]:
    """How many of the loaded tokens each medium supplied, as the first group has it; what that one did not need at all
    counts to where its window begins."""
    part, num_tokens = reservation.parts[0], reservation.end - reservation.num_computed_tokens
    tokens = tokens_by_medium(part.shape, reservation, media[: len(part.keys)], num_tokens)
    tokens[media[0]] += num_tokens - sum(tokens.values())
    return tokens


def _plan_load(reservation: GroupedReservation, tables: BlockTables) -> list[GroupTransfer] | None:
    """The copies of all groups, or None where vLLM allocated something else for one of them."""
    rows = iter(reservation.prepared.block_ids)
    transfers = []
    for part in reservation.parts:
        table = tables[part.shape.group_idx]
        mine = list(islice(rows, len(part.keys)))
        transfer = plan_load_of_group(part.shape, reservation.num_computed_tokens, reservation.end, mine, table)
        if transfer is None:
            return None
        transfers.append(transfer)
    return transfers
