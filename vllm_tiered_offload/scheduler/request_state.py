"""What the scheduler half remembers of one request."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_tiered_offload.contract.jobs import OffloadPolicy, PreparedLoad, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey, make_offload_key
from vllm_tiered_offload.contract.lifecycle import RequestLifecycle
from vllm_tiered_offload.scheduler.lookup_planner import LookupWait
from vllm_tiered_offload.scheduler.views import BlockView, GroupShape, RequestView
from vllm_tiered_offload.settings import RequestParams


class ChunkKeys:
    """Keys of a request's full chunks in one KV group, made when first needed from vLLM's live `block_hashes`.

    A streaming session cuts the list and grows it again with other tokens. Hashes chain over the whole prefix, so
    one comparison at the end tells whether all keys made so far still stand.
    """

    def __init__(self, request: RequestView, group_idx: int, shape: GroupShape) -> None:
        self._request = request
        self._group_idx = group_idx
        self._per_chunk = shape.hashes_per_chunk
        self._keys: list[OffloadKey] = []  # _keys[i] is chunk i's key

    def upto(self, end: int) -> list[OffloadKey]:
        """The keys of chunks [0, end), as far as they are hashed. The list is this object's own: do not change it."""
        hashes, per_chunk, keys, group = self._request.block_hashes, self._per_chunk, self._keys, self._group_idx
        end = min(end, len(hashes) // per_chunk)
        while keys and (
            len(keys) * per_chunk > len(hashes)
            or keys[-1] != make_offload_key(hashes[len(keys) * per_chunk - 1], group)
        ):
            keys.pop()
        for chunk in range(len(keys), end):
            keys.append(make_offload_key(hashes[(chunk + 1) * per_chunk - 1], group))
        return keys

    def slice(self, first: int, end: int) -> list[OffloadKey]:
        """The keys of chunks [first, end), as far as they are hashed."""
        return self.upto(end)[first:end]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Rows answered as hits, pinned until this step's build_connector_meta, or taken over by a load (D8)."""

    prepared: PreparedLoad
    num_computed_tokens: int  # local prefix at the lookup: where the load starts
    first_chunk: int  # chunk of prepared.keys[0]


@dataclass(slots=True)
class FinalStore:
    """The last unstored chunks of a finished request, pinned before vLLM freed them (L2)."""

    first_chunk: int
    keys: list[OffloadKey]
    blocks: list[BlockView]  # blocks_per_chunk a key, pinned


@dataclass(slots=True)
class RequestState:
    """One tracked request. It dies when it is signalled and no job of it is in flight, whichever comes last."""

    request: RequestView
    ctx: ReqContext
    params: RequestParams
    policy: OffloadPolicy
    keys: tuple[ChunkKeys, ...]  # one per KV group
    lifecycle: RequestLifecycle
    wait: LookupWait = field(default_factory=LookupWait)
    reservation: Reservation | None = None
    final: FinalStore | None = None
    jobs: set[int] = field(default_factory=set)  # ids in the job table
    written_tokens: int = 0  # end of the last scheduled step since the last (re)start; see store_planner
    local_tokens: int = 0  # device prefix hit at the last lookup
    next_chunk: int = 0  # chunks before it need no offer any more
    offered_chunks: int = 0  # end of the last offer: a declined range is offered again only beyond it (V3)
    declines: int = 0  # offers that were not taken in full since the last (re)start
    loaded_from: Mapping[str, int] = field(default_factory=dict)  # medium -> tokens of the last load
    noted_keys: list[OffloadKey] = field(default_factory=list)  # held in the event ledger until the signal
    load_failed: bool = False  # a load of it failed, whoever's: it is recomputed until it is preempted
    stale: bool = False  # active at a reset: offers nothing until it restarts at 0 computed tokens (L6)
    skipped: bool = False  # an invariant of this request broke: it is not offloaded any more (L7, tolerant)

    @property
    def req_id(self) -> str:
        return self.ctx.req_id

    def restart(self, num_computed_tokens: int) -> None:
        """vLLM asks for the request's prefix: nothing it computed before holds any more."""
        self.written_tokens = 0
        self.local_tokens = num_computed_tokens
        self.declines = 0
        if num_computed_tokens == 0:
            self.stale = False

    def admitted(self, prefix_chunks: int) -> None:
        """vLLM allocated blocks for a prefix hit of `prefix_chunks` full chunks."""
        first = 0 if self.policy is OffloadPolicy.REQUEST_LEVEL else prefix_chunks
        self.next_chunk = first
        self.offered_chunks = first
