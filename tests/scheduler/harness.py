"""A scheduler half with hand-made requests, device blocks and a manager that records every call."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import (
    LookupResult,
    PreparedLoad,
    PreparedStore,
    ReqContext,
    RequestOffloadingContext,
)
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import OffloadingManager, StoreOffer
from vllm_tiered_offload.contract.messages import JobAck, RegionAnnouncement, StepMessage, WorkerReport
from vllm_tiered_offload.scheduler.scheduler import OffloadingConnectorScheduler, Role
from vllm_tiered_offload.scheduler.views import GroupShape, StepView
from vllm_tiered_offload.settings import Settings
from vllm_tiered_offload.testing.fakes.seams import ManualClock

BLOCK = 4


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False
    block_hash_num_tokens: int | None = None


class Pool:
    """Reference counts of vLLM's block pool; block 0 is the placeholder."""

    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks = [Block(index) for index in range(num_blocks)]
        self.blocks[0].is_null = True

    def take(self, num_blocks: int) -> list[Block]:
        free = [block for block in self.blocks[1:] if block.ref_cnt == 0][:num_blocks]
        assert len(free) == num_blocks, "the test's device pool is too small"
        self.touch(free)
        return free

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return sum(block.ref_cnt == 0 for block in self.blocks[1:])


@dataclass(eq=False)
class Request:
    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hash_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def hash_blocks(self) -> None:
        """Chained hashes of all full blocks, as vLLM keeps them."""
        for index in range(len(self.block_hashes), len(self.tokens) // BLOCK):
            self.block_hashes.append(repr(self.tokens[: (index + 1) * BLOCK]).encode())

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.hash_blocks()


class RecordingManager(OffloadingManager):
    """An endless CPU tier (or one of `room` rows) that writes down every call."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.calls: list[tuple[str, str]] = []  # (method, request id)
        self.room = room
        self.resident: set[OffloadKey] = set()
        self.storing: set[OffloadKey] = set()
        self.loading = 0  # prepared loads that were not completed
        self.answers: dict[OffloadKey, LookupResult] = {}  # overrides what lookup says of a key
        self.touched: list[list[OffloadKey]] = []
        self.failed: list[OffloadKey] = []
        self.generation = 0
        self._rows = count()

    def bind_region(self, geometry: RegionGeometry) -> None:
        self.calls.append(("bind_region", ""))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.calls.append(("on_new_request", req_context.req_id))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.calls.append(("on_request_finished", req_context.req_id))

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        self.calls.append(("lookup", req_context.req_id))
        known = dict.fromkeys(self.resident, LookupResult.HIT)
        known |= dict.fromkeys(self.storing, LookupResult.HIT_PENDING)
        known |= self.answers
        return [known.get(key, LookupResult.MISS) for key in keys]

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.touched.append(list(keys))

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PreparedLoad:
        self.calls.append(("prepare_load", req_context.req_id))
        self.loading += 1
        return PreparedLoad(tuple(keys), tuple(next(self._rows) for _ in keys))

    def complete_load(self, prepared: PreparedLoad, failed_keys: Collection[OffloadKey] = ()) -> None:
        self.loading -= 1
        self.failed.extend(failed_keys)
        self.resident.difference_update(failed_keys)

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> PreparedStore:
        chosen: list[OffloadKey] = []
        accepted, taken = [], []
        for keys, req_context in offers:
            self.calls.append(("prepare_store", req_context.req_id))
            before = len(chosen)
            accepted.append(self._choose(keys, chosen))
            taken.append(len(chosen) - before)
        rows = tuple(next(self._rows) for _ in chosen)
        return PreparedStore(tuple(chosen), rows, accepted, taken, self.generation)

    def _choose(self, keys: Sequence[OffloadKey], chosen: list[OffloadKey]) -> int:
        for index, key in enumerate(keys):
            if key not in self.resident and key not in self.storing:
                if not self.room:
                    return index
                self.room -= 1
                chosen.append(key)
                self.storing.add(key)
        return len(keys)

    def complete_store(self, prepared: PreparedStore, failed_keys: Collection[OffloadKey] = ()) -> None:
        self.calls.append(("complete_store", ""))
        if prepared.generation != self.generation:
            return
        self.storing.difference_update(prepared.keys)
        self.resident.update(set(prepared.keys) - set(failed_keys))
        self.room += len(failed_keys)

    def reset_cache(self) -> None:
        self.resident.clear()
        self.storing.clear()
        self.generation += 1

    def of(self, req_id: str) -> list[str]:
        """The calls of one request, in order."""
        return [name for name, request in self.calls if request == req_id]


class Half:
    """The half under test, and shorthand for what vLLM does around it."""

    def __init__(
        self,
        *,
        device_blocks: int = 65,
        room: int = 1 << 30,
        ranks: int = 1,
        bind: bool = True,
        role: Role | None = None,
        **settings: Any,
    ) -> None:
        self.clock = ManualClock()
        self.manager = RecordingManager(room)
        parsed = Settings.parse({"cpu": {"capacity": "1GiB"}, "lifecycle": "strict", **settings})
        shape = GroupShape(BLOCK, BLOCK * parsed.blocks_per_chunk, BLOCK)
        self.inner = OffloadingConnectorScheduler(parsed, self.manager, shape, role=role or Role(), clock=self.clock)
        self.pool = Pool(device_blocks)
        self.tables: dict[str, list[Block]] = {}
        self.requests: dict[str, Request] = {}
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.inner.bind_device(self.pool, lambda req_id: (self.tables.get(req_id, []),))
        self.geometry = RegionGeometry(64, (4096,) * ranks, parsed.blocks_per_chunk)
        if bind:
            self.announce()

    def announce(self) -> None:
        self.inner.update_connector_output(WorkerReport(region=RegionAnnouncement(1, 1, 1, self.geometry)))

    def add(self, req_id: str, num_tokens: int, first_token: int = 0, **fields: Any) -> Request:
        request = Request(req_id, list(range(first_token, first_token + num_tokens)), num_tokens, **fields)
        self.requests[req_id] = request
        self.tables[req_id] = []
        self.inner.on_new_request(request)
        return request

    def ask(self, request: Request, local: int = 0) -> tuple[int | None, bool]:
        return self.inner.get_num_new_matched_tokens(request, local)

    def allocate(self, request: Request, num_tokens: int, external: int = 0) -> None:
        """Device blocks for `num_tokens` in all; then the hook."""
        table = self.tables[request.request_id]
        table += self.pool.take(-(-num_tokens // BLOCK) - len(table))
        self.inner.update_state_after_alloc(request, (table,), external)

    def step(self, scheduled: dict[Request, int] | None = None) -> StepMessage:
        """build_connector_meta, and what vLLM adds to num_computed_tokens after it."""
        scheduled = scheduled or {}
        for request, num_tokens in scheduled.items():
            table = self.tables[request.request_id]
            table += self.pool.take(max(0, -(-(request.num_computed_tokens + num_tokens) // BLOCK) - len(table)))
        message = self.inner.build_connector_meta(
            StepView({r.request_id: n for r, n in scheduled.items()}, self.preempted, self.finished)
        )
        for request, num_tokens in scheduled.items():
            request.num_computed_tokens += num_tokens
        self.finished, self.preempted = set(), set()
        return message

    def start(self, request: Request, num_tokens: int) -> StepMessage:
        """Admit a request without a hit and compute its first tokens."""
        assert self.ask(request) == (0, False)
        self.allocate(request, num_tokens)
        return self.step({request: num_tokens})

    def ack(self, *messages: StepMessage, error: str | None = None, ranks: Iterable[int] = (0,)) -> None:
        mask = sum(1 << rank for rank in ranks)
        jobs = [job for message in messages for job in (*message.loads, *message.stores)]
        self.inner.update_connector_output(WorkerReport(acks={job.job_id: JobAck(mask, error) for job in jobs}))

    def release_blocks(self, request: Request) -> None:
        self.pool.free_blocks(self.tables[request.request_id])
        self.tables[request.request_id] = []

    def finish(self, request: Request, aborted: bool = False) -> None:
        """vLLM's _free_request: the hook, then the blocks are free."""
        self.inner.request_finished(request, aborted)
        self.finished.add(request.request_id)
        self.release_blocks(request)

    def preempt(self, request: Request) -> None:
        self.release_blocks(request)
        request.num_computed_tokens = 0
        self.preempted.add(request.request_id)

    def assert_empty(self) -> None:
        """Nothing is left once all requests ended and all jobs were acknowledged."""
        assert set(self.inner.debug_state().values()) == {0}, self.inner.debug_state()
        assert self.manager.loading == 0
        assert not self.manager.storing
        assert not self.inner.has_pending_work()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        for req_id in self.requests:
            calls = self.manager.of(req_id)
            assert calls.count("on_new_request") == calls.count("on_request_finished")
