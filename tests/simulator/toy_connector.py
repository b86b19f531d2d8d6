"""A small correct offloading connector, and one deliberate bug at a time, to see that the simulator notices.

It speaks `contract.messages`, keeps one row per block and never evicts. `bug` in its settings names what to break.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_tiered_offload.connector.overrides import current_overrides
from vllm_tiered_offload.contract.jobs import ReqContext
from vllm_tiered_offload.contract.messages import DeviceJob, GroupTransfer, JobAck, StepMessage, WorkerReport


@dataclass
class ToyMetadata(KVConnectorMetadata):
    message: StepMessage = field(default_factory=StepMessage)


@dataclass
class ToyWorkerMetadata(KVConnectorWorkerMetadata):
    report: WorkerReport = field(default_factory=WorkerReport)

    def aggregate(self, other: Any) -> "ToyWorkerMetadata":
        return ToyWorkerMetadata(self.report.merge(other.report))


class ToyManager:
    """Only there to be spied on."""

    def on_new_request(self, ctx: ReqContext) -> None: ...

    def on_request_finished(self, ctx: ReqContext) -> None: ...

    def prepare_load(self, keys: Any, ctx: ReqContext) -> None: ...

    def prepare_stores(self, offers: Any) -> None: ...


class ToyConnector(KVConnectorBase_V1, SupportsHMA):
    # world name -> (rank, row) -> layer tensors: the host memory that both halves share
    memory: ClassVar[dict[str, dict[tuple[int, int], list[torch.Tensor]]]] = defaultdict(dict)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.bug = settings.get("bug")
        self.block_size = vllm_config.cache_config.block_size
        self.ranks = vllm_config.parallel_config.tensor_parallel_size
        self.connector_scheduler = self
        if role is KVConnectorRole.SCHEDULER:
            self._init_scheduler()
        else:
            self._init_worker(settings["world"], vllm_config.parallel_config.rank)

    # -- scheduler side

    def _init_scheduler(self) -> None:
        self.manager = ToyManager()
        self.rows: dict[bytes, int] = {}  # readable
        self.storing: dict[bytes, int] = {}  # job by key
        self.jobs: dict[int, tuple[str, Any, list[Any]]] = {}  # id -> kind, keys or None, pinned blocks
        self.acks: dict[int, int] = defaultdict(int)
        self.failed: set[int] = set()  # jobs that failed on some rank
        self.requests: dict[str, Any] = {}
        self.stale: set[str] = set()
        self.reused: set[str] = set()
        self.local: dict[str, int] = {}
        self.message = StepMessage()
        self.next_job, self.next_row = 1, 0
        self.suspect = False
        self.leaked = 0

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.cache, self.pool = kv_cache_manager, kv_cache_manager.block_pool

    def on_new_request(self, request: Any) -> None:
        if self.requests.pop(request.request_id, None) is not None:  # finished, its id is used again at once
            self.reused.add(request.request_id)
            self.stale.discard(request.request_id)
            self.manager.on_request_finished(ReqContext(request.request_id))
        self.requests[request.request_id] = request
        self.manager.on_new_request(ReqContext(request.request_id))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.bug == "ask_forever":
            return None, False
        if self.bug == "file":
            open("/dev/null").close()
        self.local[request.request_id] = num_computed_tokens
        if num_computed_tokens and self.suspect:
            self.stale.add(request.request_id)
        else:
            self.stale.discard(request.request_id)
        first = num_computed_tokens // self.block_size
        hits = 0
        for key in request.block_hashes[first : (request.num_tokens - 1) // self.block_size]:
            if key not in self.rows:
                break
            hits += 1
        return hits * self.block_size, hits > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens or self.bug == "lost_load":
            return
        first = self.local[request.request_id] // self.block_size
        count = num_external_tokens // self.block_size
        keys = request.block_hashes[first : first + count]
        ids = blocks.get_block_ids()[0][first : first + count]
        self.manager.prepare_load(keys, ReqContext(request.request_id))
        self._add("load", request.request_id, [self.rows[key] for key in keys], ids, None, [])

    def _add(self, kind: str, req_id: str, rows: list[int], ids: list[int], keys: Any, pinned: list[Any]) -> None:
        job = DeviceJob(self.next_job, req_id, [GroupTransfer(0, rows, ids)])
        self.jobs[job.job_id] = (kind, keys, pinned)
        self.next_job += 1
        (self.message.loads if kind == "load" else self.message.stores).append(job)

    def build_connector_meta(self, scheduler_output: Any) -> ToyMetadata:
        finished = scheduler_output.finished_req_ids - self.reused
        self.reused.clear()
        for req_id in finished:
            if self.bug == "late_final":
                self._store_late(req_id)
            if self.bug != "no_finish" and self.requests.pop(req_id, None) is not None:
                self.manager.on_request_finished(ReqContext(req_id))
            if self.bug == "submit_after_finish":
                self.manager.prepare_stores([([], ReqContext(req_id))])
            self.stale.discard(req_id)
            self.local.pop(req_id, None)
        for req_id, count in scheduler_output.num_scheduled_tokens.items():
            if req_id not in self.stale or self.bug == "stale_offer":
                self._offer(self.requests[req_id], count)
        message, self.message = self.message, StepMessage()
        return ToyMetadata(message)

    def _store_late(self, req_id: str) -> None:
        self.late = getattr(self, "late", [])
        for old in self.late:
            self._add("store", old, [self._new_row()], [], [], [])
        self.late = [req_id]

    def _offer(self, request: Any, count: int) -> None:
        written = request.num_computed_tokens + count
        full = min(written // self.block_size, len(request.block_hashes))
        if self.bug == "unwritten":
            full = len(request.block_hashes)
        keys = [key for key in request.block_hashes[:full] if key not in self.rows and key not in self.storing]
        table = self.cache.get_blocks(request.request_id).blocks[0]
        pairs = [(key, block) for key, block in zip(request.block_hashes[:full], table, strict=False) if key in keys]
        if not pairs:
            return
        blocks = [block for _, block in pairs]
        if self.bug != "no_pin":
            self.pool.touch(blocks)
        keys = [key for key, _ in pairs]
        self.storing.update(dict.fromkeys(keys, self.next_job))
        rows = [self._new_row() for _ in keys]
        self.manager.prepare_stores([(keys, ReqContext(request.request_id))])
        self._add(
            "store",
            request.request_id,
            rows,
            [block.block_id for block in blocks],
            dict(zip(keys, rows, strict=True)),
            blocks,
        )

    def _new_row(self) -> int:
        self.next_row += 1
        return self.next_row % 3 if self.bug == "row_reuse" else self.next_row

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        for job_id, ack in meta.report.acks.items() if meta is not None else ():
            self.acks[job_id] |= ack.ranks
            if ack.error is not None:
                self.failed.add(job_id)
            if self.acks[job_id].bit_count() < self.ranks or job_id not in self.jobs:
                continue
            del self.acks[job_id]
            kind, keys, pinned = self.jobs.pop(job_id)
            if kind == "store":
                self._stored(job_id, keys, pinned)
            self.failed.discard(job_id)

    def _stored(self, job_id: int, keys: Any, pinned: list[Any]) -> None:
        if pinned and self.bug != "no_pin":
            self.pool.free_blocks(pinned)
        for key in keys:
            if self.storing.get(key) == job_id:
                del self.storing[key]
                if job_id not in self.failed:
                    self.rows[key] = keys[key]
        self.leaked += self.bug == "leak"

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def has_pending_push_work(self) -> bool:
        return bool(self.jobs) or self.bug == "busy"

    def has_pending_block_frees(self) -> bool:
        return any(pinned for _, _, pinned in self.jobs.values())

    def reset_cache(self) -> bool:
        if self.bug == "stale_rows":
            return True
        self.rows.clear()
        self.storing.clear()
        self.stale |= {req_id for req_id, request in self.requests.items() if request.num_computed_tokens}
        self.suspect = self.pool.get_num_free_blocks() != self.pool.num_gpu_blocks - 1
        self.message.cancelled_loads += [job_id for job_id, (kind, _, _) in self.jobs.items() if kind == "load"]
        return True

    def debug_state(self) -> dict[str, int]:
        return {"requests": len(self.requests), "jobs": len(self.jobs), "leaked": self.leaked}

    # -- worker side

    def _init_worker(self, world: str, rank: int) -> None:
        self.rank = rank
        self.rows_of_rank = self.memory[world]
        factory = current_overrides().executor_factory
        assert factory is not None
        self.executor = factory()
        self.report = WorkerReport()
        self.loading: dict[int, str] = {}
        self.cancelled: set[int] = set()
        self.done: list[tuple[int, str, bool]] = []  # loads: job, request, success
        self.again: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        message = self._get_connector_metadata().message
        self.cancelled |= set(message.cancelled_loads)
        for job in message.loads:
            self.loading[job.job_id] = job.req_id
            try:
                self.executor.submit(lambda job=job: self._load(job))
            except RuntimeError:
                del self.loading[job.job_id]
                self.done.append((job.job_id, job.req_id, False))

    def _load(self, job: DeviceJob) -> None:
        good = True
        for transfer in job.transfers:
            for row, block in zip(transfer.rows, transfer.device_block_ids, strict=True):
                source = self.rows_of_rank.get((self.rank, row + (self.bug == "wrong_row")))
                if source is None or self.bug == "silent_failure":
                    good = self.bug == "silent_failure"
                    break
                for layer, saved in zip(self.layers, source, strict=True):
                    layer[block].copy_(saved)
        del self.loading[job.job_id]
        self.done.append((job.job_id, job.req_id, good))

    def wait_for_save(self) -> None:
        for job in self._get_connector_metadata().message.stores:
            if self.bug == "early_ack":
                self.report.acks[job.job_id] = JobAck(1 << self.rank)
            try:
                self.executor.submit(lambda job=job: self._store(job))
            except RuntimeError as error:
                self.report.acks[job.job_id] = JobAck(1 << self.rank, str(error))

    def _store(self, job: DeviceJob) -> None:
        for transfer in job.transfers:
            for row, block in zip(transfer.rows, transfer.device_block_ids, strict=False):
                self.rows_of_rank[self.rank, row] = [layer[block].clone() for layer in self.layers]
        if self.bug != "early_ack":
            self.report.acks[job.job_id] = JobAck(1 << self.rank)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults(finished_recving=set(self.again))
        self.again.clear()
        for job_id, req_id, good in self.done:
            good = good and job_id not in self.cancelled
            self.report.acks[job_id] = JobAck(1 << self.rank, None if good else "failed")
            results.finished_recving.add(req_id)
            if not good and self.bug != "hidden_failure":
                results.failed_recving.add(req_id)
            if self.bug == "double_receive":
                self.again.add(req_id)
        self.done.clear()
        return results

    def build_connector_worker_meta(self) -> ToyWorkerMetadata:
        report, self.report = self.report, WorkerReport()
        return ToyWorkerMetadata(report)
