"""What the scheduler half remembers of one request."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from vllm_tiered_offload.contract.jobs import OffloadPolicy, PreparedLoad, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey, group_suffix
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
        self._ahead = shape.hashes_ahead
        self._suffix = group_suffix(group_idx)
        self._keys: list[OffloadKey] = []  # _keys[i] is chunk i's key
        self._last_hash = b""  # the hash that _keys[-1] was made of

    def upto(self, end: int) -> list[OffloadKey]:
        """The keys of chunks [0, end), as far as they are hashed. The list is this object's own: do not change it."""
        hashes, per_chunk, ahead, keys = self._request.block_hashes, self._per_chunk, self._ahead, self._keys
        made = len(keys) * per_chunk + ahead
        if keys and (made > len(hashes) or hashes[made - 1] != self._last_hash):
            self._cut()
        end = min(end, (len(hashes) - ahead) // per_chunk)
        if len(keys) < end:
            keys += self.anew(len(keys), end)
            self._last_hash = hashes[end * per_chunk + ahead - 1]
        return keys

    def _cut(self) -> None:
        """The session went on with other tokens: forget the keys from the first that differs."""
        hashes, per_chunk, keys = self._request.block_hashes, self._per_chunk, self._keys
        while keys:
            last = len(keys) * per_chunk + self._ahead - 1
            if last < len(hashes) and keys[-1] == hashes[last] + self._suffix:
                self._last_hash = hashes[last]
                return
            keys.pop()

    def slice(self, first: int, end: int) -> list[OffloadKey]:
        """The keys of chunks [first, end), as far as they are hashed."""
        return self.upto(end)[first:end]

    def anew(self, first: int, end: int) -> list[OffloadKey]:
        """As `slice`, without looking for or keeping any: for chunks that are asked for once."""
        per_chunk, ahead, suffix = self._per_chunk, self._ahead, self._suffix
        hashes = self._request.block_hashes[(first + 1) * per_chunk + ahead - 1 : end * per_chunk + ahead : per_chunk]
        return cast(list[OffloadKey], [one + suffix for one in hashes])  # OffloadKey() would cost a call a key


@dataclass(frozen=True, slots=True)
class Reservation:
    """Rows answered as hits, pinned until this step's build_connector_meta, or taken over by a load (D8)."""

    prepared: PreparedLoad
    num_computed_tokens: int  # local prefix at the lookup: where the load starts
    first_chunk: int  # chunk of prepared.keys[0]


@dataclass(slots=True, eq=False)
class Offer:
    """Chunks of one request to store, from `first_chunk` on; those up to `end` are due."""

    state: "RequestState"
    first_chunk: int
    end: int
    keys: list[OffloadKey]
    blocks: Sequence[BlockView]  # blocks_per_chunk a key

    def chunk_after(self, num_keys: int) -> int:
        """The first chunk that is not done with once the first `num_keys` keys are."""
        return self.first_chunk + num_keys

    def numbered_keys(self) -> Iterable[tuple[int, OffloadKey]]:
        """Each key with the number of its chunk."""
        return enumerate(self.keys, self.first_chunk)


@dataclass(slots=True)
class RequestState:
    """One tracked request. It dies when it is signalled and no job holds it, whichever comes last."""

    request: RequestView
    ctx: ReqContext
    params: RequestParams
    policy: OffloadPolicy
    keys: tuple[ChunkKeys, ...]  # one per KV group
    store_limit: int | None  # the last token that may be stored
    lifecycle: RequestLifecycle
    wait: LookupWait = field(default_factory=LookupWait)
    reservation: Reservation | None = None
    final: Offer | None = None  # the last unstored chunks after the end; pinned before vLLM freed the blocks (L2)
    written_tokens: int = 0  # end of the last scheduled step since the last (re)start; see store_planner
    local_tokens: int = 0  # device prefix hit at the last lookup
    next_chunk: int = 0  # chunks before it need no offer any more
    offered_chunks: int = 0  # end of the last offer: a declined range is offered again only beyond it (V3)
    quiet_until: int = 0  # no offer can be due while fewer tokens are written
    declines: int = 0  # offers that were not taken in full since the last (re)start
    loaded_from: Mapping[str, int] = field(default_factory=dict)  # medium -> tokens of the last load
    noted_keys: list[OffloadKey] = field(default_factory=list)  # held in the event ledger until the signal
    load_failed: bool = False  # a load of it failed, whoever's: it is recomputed until it is preempted
    stale: bool = False  # active at a reset: offers nothing until it restarts at 0 computed tokens (L6)
    skipped: bool = False  # not offloaded: an invariant of it broke (L7, tolerant), or its keys say too little (D5)

    @property
    def req_id(self) -> str:
        return self.ctx.req_id

    def restart(self, num_computed_tokens: int) -> None:
        """vLLM asks for the request's prefix: nothing it computed before holds any more."""
        self.written_tokens = 0
        self.quiet_until = 0
        self.local_tokens = num_computed_tokens
        self.declines = 0
        if num_computed_tokens == 0:
            self.stale = False

    def admitted(self, prefix_chunks: int) -> None:
        """vLLM allocated blocks for a prefix hit of `prefix_chunks` full chunks."""
        first = 0 if self.policy is OffloadPolicy.REQUEST_LEVEL else prefix_chunks
        self.next_chunk = first
        self.offered_chunks = first
        self.quiet_until = 0
