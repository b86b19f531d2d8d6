"""Checkers of what the scheduler half asks for and offers: whose keys (D5), what portions (V3), none skipped (L7)."""

from collections.abc import Iterator, Sequence
from math import lcm
from typing import TYPE_CHECKING, Any

from vllm_tiered_offload.contract.jobs import PreparedStore, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey, make_offload_key, split_offload_key
from vllm_tiered_offload.contract.managers import StoreOffer
from vllm_tiered_offload.settings import Settings
from vllm_tiered_offload.testing.simulator.checkers.base import Checker, spy

if TYPE_CHECKING:
    from vllm_tiered_offload.testing.simulator.engine import Simulation, Step


class ChunksOfRequests:
    """Which chunk of a request a key stands for."""

    def __init__(self, sim: "Simulation") -> None:
        config = sim.config
        self.chunk_tokens = [
            config.block_tokens(group) * config.blocks_per_chunk for group in range(len(config.groups))
        ]
        self._hash_tokens = config.hash_tokens
        self.tokens_ahead = [config.hash_tokens * group.draft for group in config.groups]
        # By id() of vLLM's request, which the first part keeps alive: what its hashes were, and where chunks end.
        self._known: dict[int, tuple[Any, tuple[int, bytes], dict[OffloadKey, int]]] = {}

    def end(self, request: Any, key: OffloadKey) -> int | None:
        """The token at which the chunk ends, or None if it is the key of none of the request's chunks."""
        hashes = request.block_hashes
        mark = (len(hashes), hashes[-1] if hashes else b"")  # hashes chain, so the last one tells of all
        known = self._known.get(id(request))
        if known is None or known[1] != mark:
            known = (request, mark, dict(self._ends(hashes)))
            self._known[id(request)] = known
        return known[2].get(key)

    def _ends(self, hashes: Sequence[bytes]) -> Iterator[tuple[OffloadKey, int]]:
        for group, tokens in enumerate(self.chunk_tokens):
            per_chunk, ahead = tokens // self._hash_tokens, self.tokens_ahead[group] // self._hash_tokens
            for chunk, last in enumerate(hashes[per_chunk - 1 + ahead :: per_chunk]):
                yield make_offload_key(last, group), (chunk + 1) * tokens


class D5OwnKeys(Checker):
    """Keys come from the request's own block hashes, and one key never stands for two contents.

    What the scheduler half looks up, loads, stores or touches for a request is the key of a full chunk of it. Whoever
    stores under a key has the same tokens up to the chunk's end (in a draft group one more), and the same salt, as all
    who did so before.

    Does not check what outlives the process (the fingerprint's tests do), nor LoRA and multimodal inputs, which vLLM
    mixes into the hashes as it does the salt.
    """

    name = "d5"
    CALLS = ("probe", "lookup", "touch", "prepare_load", "prepare_stores")

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._chunks = ChunksOfRequests(sim)
        self._lives: dict[str, list[Any]] = {}  # the last two vLLM requests of that id: it may be in use again
        self._contents: dict[OffloadKey, int] = {}  # key -> hash of (salt, all tokens up to the chunk's end)
        if hasattr(sim.manager, "lookup"):
            for call in self.CALLS:
                spy(sim.manager, call, getattr(self, f"_{call}"))

    def added(self, request: Any) -> None:
        self._lives[request.request_id] = [*self._lives.get(request.request_id, [])[-1:], request]

    def _own(self, call: str, keys: Sequence[OffloadKey], ctx: ReqContext) -> tuple[Any, list[int]]:
        """The life of the request that has all these keys, the later one first, and where their chunks end."""
        for request in reversed(self._lives.get(ctx.req_id, [])):
            ends = [self._chunks.end(request, key) for key in keys]
            own = [end for end in ends if end is not None]
            if len(own) == len(keys):
                return request, own
        raise self.broken(f"{call}: not all {len(keys)} keys are the request's", ctx.req_id)

    def _probe(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        self._own("probe", keys, ctx)

    def _lookup(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        self._own("lookup", keys, ctx)

    def _touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        self._own("touch", keys, ctx)

    def _prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        self._own("prepare_load", keys, ctx)

    def _prepare_stores(self, offers: Sequence[StoreOffer]) -> None:
        for keys, ctx in offers:
            self._offer(keys, ctx)

    def _offer(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        request, ends = self._own("prepare_stores", keys, ctx)
        for key, end in zip(keys, ends, strict=True):
            end += self._chunks.tokens_ahead[split_offload_key(key)[1]] > 0
            content = hash((request.cache_salt, tuple(request.all_token_ids[:end])))
            if self._contents.setdefault(key, content) != content:
                raise self.broken(f"the chunk up to token {end} has the key of another content", ctx.req_id)


class V3PartialStores(Checker):
    """A declined range leaves no hole, and is offered again only after progress, a bounded number of times.

    Since its last (re)start a request's offers follow on one another: each begins where what was taken so far ends, or
    before, but for what has left its window meanwhile, or leaves it before the next step, and what a draft group has
    from a device hit, where vLLM may have given it another request's slot. One that begins where an
    earlier one was declined reaches farther, unless it is the request's last. After `max_store_offers` declined offers
    there are no more. With several KV groups a place is a stride, the least common multiple of their chunks.

    Does not check ranges that the pin limit held back before they were offered, nor that the longest prefix that fits
    is taken (the CPU tier's own tests do).
    """

    name = "v3"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._chunks = ChunksOfRequests(sim)
        self._stride = lcm(*self._chunks.chunk_tokens)
        self._requests: dict[str, Any] = {}  # vLLM's request that the manager knows by an id
        self._local: dict[str, int] = {}  # device hits at the last question
        self._next: dict[str, int] = {}  # admitted request -> chunks before it need no offer
        self._declined: dict[str, list[int]] = {}  # ends of its declined offers since the last (re)start
        # Offers of this step: whose, where they had to begin, and each chunk's place and KV group.
        self._offers: list[tuple[str, int, list[tuple[int, int]]]] = []
        if hasattr(sim.manager, "lookup"):
            self._limit = Settings.parse(sim.config.connector_settings()).max_store_offers
            spy(sim.manager, "on_new_request", self._began)
            spy(sim.manager, "prepare_stores", self._offering, self._offered)

    def _began(self, ctx: ReqContext) -> None:
        self._requests[ctx.req_id] = self.sim.live.get(ctx.req_id)

    def hook(self, name: str, args: tuple[Any, ...], result: Any) -> None:  # noqa: ARG002
        if name == "get_num_new_matched_tokens":
            req_id = args[0].request_id
            self._local[req_id] = args[1]
            self._next.pop(req_id, None)
            self._declined.pop(req_id, None)
        elif name == "update_state_after_alloc" and args[0].num_computed_tokens == 0:
            req_id = args[0].request_id
            self._next[req_id] = (self._local.get(req_id, 0) + args[2]) // self._stride

    def _places(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> list[int]:
        """The stride of each key; empty for the last offer of a request, which is over for vLLM by then."""
        request = self._requests.get(ctx.req_id)
        if request is None or self.sim.live.get(ctx.req_id) is not request:
            return []
        return [((self._chunks.end(request, key) or 0) - 1) // self._stride for key in keys]

    def _offering(self, offers: Sequence[StoreOffer]) -> None:
        pinned = self.sim.connector.connector_scheduler.num_pinned_blocks
        # Who is held back need not be the last one: what a later offer can only store now has its pins first.
        pinned += sum(len(keys) for keys, _ctx in offers) * self.sim.config.blocks_per_chunk
        for keys, ctx in offers:
            places = self._places(keys, ctx)
            if places:
                self._check(places[-1] + 1, ctx.req_id, pinned)
                groups = [split_offload_key(key)[1] for key in keys]
                begins_at = self._next.get(ctx.req_id, places[0])
                self._offers.append((ctx.req_id, begins_at, list(zip(places, groups, strict=True))))

    def scheduled(self, step: "Step") -> None:  # noqa: ARG002
        """By now vLLM says which token comes next, so what leaves its window before that is known."""
        offers, self._offers = self._offers, []
        for req_id, begins_at, chunks in offers:
            patient = [place for place, group in chunks if not self._is_over(req_id, place, group)]
            if patient:
                groups = range(len(self.sim.config.groups))
                for place in range(begins_at, patient[0]):
                    if not all(self._is_over(req_id, place, group) for group in groups):
                        raise self.broken(f"chunk {place} is left out, {patient[0]} is offered", req_id)

    def _check(self, end: int, req_id: str, pinned: int) -> None:
        """`pinned`: device blocks that stores hold, if all offers of this step are taken."""
        declined = self._declined.get(req_id, [])
        if len(declined) >= self._limit:
            raise self.broken(f"an offer after {len(declined)} that were declined", req_id)
        chunks = sum(self._stride // tokens for tokens in self._chunks.chunk_tokens)
        held_back = pinned + chunks * self.sim.config.blocks_per_chunk > self.sim.config.max_pinned_blocks
        if declined and end <= declined[-1] and not held_back:
            raise self.broken(f"chunks up to {declined[-1] - 1} offered again without progress", req_id)

    def _is_over(self, req_id: str, place: int, group: int) -> bool:
        """Whether a group's blocks of this place are gone, go when the next token is computed, or are a device hit."""
        request, null = self.sim.live[req_id], self.sim.pool.null_block.block_id
        tokens, begin = self.sim.config.block_tokens(group), place * self._stride
        if self.sim.config.groups[group].draft and begin < self._local.get(req_id, 0):
            return True
        table = self.sim.scheduler.kv_cache_manager.get_block_ids(req_id)[group]
        blocks = table[begin // tokens : (begin + self._stride) // tokens]
        return (
            null in blocks or begin + tokens <= self.sim.runner.groups[group].read_by(request.num_computed_tokens).start
        )

    def _offered(self, prepared: PreparedStore, offers: Sequence[StoreOffer]) -> None:
        for (keys, ctx), accepted in zip(offers, prepared.accepted, strict=True):
            self._note(keys, ctx, accepted)

    def _note(self, keys: Sequence[OffloadKey], ctx: ReqContext, accepted: int) -> None:
        places = self._places(keys, ctx)
        if not places:
            return
        self._next[ctx.req_id] = places[accepted] if accepted < len(keys) else places[-1] + 1
        if accepted < len(keys):
            self._declined.setdefault(ctx.req_id, []).append(places[-1] + 1)
        else:
            self._declined.pop(ctx.req_id, None)


class L7NothingSkipped(Checker):
    """Nobody breaks the contract here, so no request's offloading may have been given up, in either lifecycle.

    ("strict" raises, which ends the run anyway; "tolerant" would go on with a line in the log.)

    Does not check what happens when the contract is broken (tests/scheduler/test_lifecycle_modes.py does).
    """

    name = "l7"
    COUNTER = "lifecycle_violations_total"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._skipped: float = 0
        self._half: Any = getattr(sim.connector, "connector_scheduler", None)
        if hasattr(self._half, "take_stats"):
            spy(self._half, "take_stats", lambda: None, self._reported)

    def _reported(self, stats: Any) -> None:
        if stats is not None:
            self._skipped += stats.counters.get(self.COUNTER, 0)

    def converged(self) -> None:
        if hasattr(self._half, "take_stats"):
            self._half.take_stats()
        if self._skipped:
            raise self.broken(f"the offloading of requests was given up {self._skipped} times")
