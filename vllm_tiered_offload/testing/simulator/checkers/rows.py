"""Checkers of region rows: reuse (D4), readability (D8) and resets (L6)."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm_tiered_offload.contract.jobs import JobResult
from vllm_tiered_offload.contract.messages import DeviceJob
from vllm_tiered_offload.testing.simulator.checkers.base import AckCounter, Checker

if TYPE_CHECKING:
    from vllm_tiered_offload.testing.simulator.engine import Simulation, Step
    from vllm_tiered_offload.testing.simulator.tier_watch import Flight


def rows_of(job: DeviceJob) -> set[int]:
    """The region rows that a job moves."""
    return {row for transfer in job.transfers for row in transfer.rows}


class D4RowReuse(Checker):
    """A row is reusable only when nothing reads or writes it any more.

    A store must not go to a row that a pending store or load uses, a load must not read a row that a pending store
    fills. Pending means: in a message, not yet acknowledged by every rank in a processed report.

    Does not check jobs of the tiers behind (D4TierRows does) and of peers: they are not in these messages.
    """

    name = "d4"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._acks = AckCounter(sim.config.ranks)
        self._stores: dict[int, set[int]] = {}  # pending jobs and their rows
        self._loads: dict[int, set[int]] = {}

    def scheduled(self, step: "Step") -> None:
        for job in step.message.loads:
            self._refuse(job, "load", self._stores)
            self._loads[job.job_id] = rows_of(job)
        for job in step.message.stores:
            self._refuse(job, "store", self._stores)
            self._refuse(job, "store", self._loads)
            self._stores[job.job_id] = rows_of(job)

    def _refuse(self, job: DeviceJob, kind: str, others: dict[int, set[int]]) -> None:
        rows = rows_of(job)
        for other, theirs in others.items():
            if not rows.isdisjoint(theirs):
                text = f"{kind} job {job.job_id} uses rows {sorted(rows & theirs)} of pending job {other}"
                raise self.broken(text, job.req_id)

    def updated(self, step: "Step") -> None:
        for job_id, _ in self._acks.count(step):
            self._stores.pop(job_id, None)
            self._loads.pop(job_id, None)

    def converged(self) -> None:
        if self._stores or self._loads:
            raise self.broken(f"jobs never acknowledged: stores {sorted(self._stores)}, loads {sorted(self._loads)}")


class D8ReadableRows(Checker):
    """Only readable rows are loaded, and exactly as many tokens as were promised.

    A row is readable once the store into it was acknowledged by every rank without an error, or a promotion into it
    ended well and in time. When vLLM allocated N external tokens for us, the same step's message has a load of exactly
    N tokens for that request: in each KV group, the blocks of them that vLLM's own manager keeps.

    Does not check that an answer given without allocation (the pool was full) was pinned, only that no wrong load
    follows from it.
    """

    name = "d8"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._acks = AckCounter(sim.config.ranks)
        self._readable: set[int] = set()
        self._stores: dict[int, set[int]] = {}  # pending store jobs and their rows
        self._promised: dict[str, int] = {}  # external tokens that vLLM allocated in this pass, per request
        self._local: dict[str, int] = {}  # device hits at the last question

    def hook(self, name: str, args: tuple[Any, ...], result: Any) -> None:  # noqa: ARG002
        if name == "get_num_new_matched_tokens":
            self._local[args[0].request_id] = args[1]
        elif name == "update_state_after_alloc" and args[2]:
            self._promised[args[0].request_id] = args[2]

    def scheduled(self, step: "Step") -> None:
        promised, self._promised = self._promised, {}
        for job in step.message.loads:
            self._check_load(job, promised.pop(job.req_id, 0), job.job_id in step.message.cancelled_loads)
        for req_id in promised:
            if not self.sim.world.take_promise(req_id):
                raise self.broken(f"{promised[req_id]} tokens promised, no load in the message", req_id)
        for job in step.message.stores:
            self._readable -= rows_of(job)
            self._stores[job.job_id] = rows_of(job)

    def tier_submitted(self, flight: "Flight") -> None:
        if flight.job.is_promotion:
            self._readable -= flight.rows

    def tier_ended(self, flight: "Flight", result: JobResult) -> None:
        if flight.job.is_promotion and not flight.late:
            self._readable |= flight.rows_of(result.successful_keys)

    def _check_load(self, job: DeviceJob, promised: int, cancelled: bool) -> None:
        moved = Counter({transfer.group_idx: len(transfer.device_block_ids) for transfer in job.transfers})
        wanted = self._blocks_to_fill(self._local.get(job.req_id, 0), promised)
        if moved != wanted and not cancelled:
            text = f"load job {job.job_id} moves {dict(moved)} blocks by KV group, {promised} tokens were promised"
            raise self.broken(f"{text}: {dict(wanted)}", job.req_id)
        if not rows_of(job) <= self._readable:
            unreadable = sorted(rows_of(job) - self._readable)
            raise self.broken(f"load job {job.job_id} reads rows {unreadable}, which hold nothing", job.req_id)

    def _blocks_to_fill(self, local: int, promised: int) -> Counter[int]:
        """The device blocks, by KV group, between the local prefix and the promise that vLLM itself keeps."""
        end, blocks = local + promised, Counter[int]()
        for group, manager in enumerate(self.sim.scheduler.kv_cache_manager.coordinator.single_type_managers):
            first = max(local, manager.get_num_skipped_tokens(end)) // manager.block_size
            blocks[group] = end // manager.block_size - first
        return blocks

    def updated(self, step: "Step") -> None:
        for job_id, error in self._acks.count(step):
            rows = self._stores.pop(job_id, set())
            if error is None:
                self._readable |= rows


class L6Reset(Checker):
    """Nothing stored before a reset is served after it, and what was active then offers nothing until it restarts.

    A load planned after a reset must not read a row whose last store or promotion was planned before it. A request
    that had KV at the reset stores nothing until it is looked up again without device hits (they may be stale while
    vLLM's own reset failed); a request that had finished before it stores nothing at all. A load in flight at the reset
    must not end well in a batch that was scheduled after it.

    Does not check what a restarted process would find, nor what a tier behind kept over the reset (the bytes show it
    once the weights are new), nor a stale block that a request of another connector brings in.
    """

    name = "l6"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._row_age: dict[int, int] = {}  # row -> resets before its last store was planned
        self._resets = 0
        self._stale: set[str] = set()  # requests whose later slots attend to slots from before the reset
        self._ended: set[str] = set()  # requests that finished since the last reset
        self._over: set[str] = set()  # requests that had finished before the last reset
        # Ids in use again, whose former request may still store in the next batch: whether that would be stale.
        self._former: dict[str, bool] = {}
        self._device_cache_suspect = False  # vLLM's own reset failed: its prefix cache is older than the last reset
        self._loads: set[int] = set()  # load jobs sent and not yet acknowledged by any rank
        self._cancelled: set[int] = set()  # those of them that were in flight at a reset
        self._last_batch = 0  # number of the last batch scheduled before the last reset
        self._batch = 0  # number of the last batch scheduled

    def added(self, request: Any) -> None:
        req_id = request.request_id
        if req_id in self._ended or req_id in self._over:
            self._former[req_id] = self._is_stale(req_id)
        for ids in (self._ended, self._over, self._stale):
            ids.discard(req_id)

    def _is_stale(self, req_id: str) -> bool:
        """Whether what this id may store is from before the last reset, whichever of its requests it is of."""
        return (req_id in self._stale or req_id in self._over) and self._former.get(req_id, True)

    def ended(self, request: Any) -> None:
        self._ended.add(request.request_id)

    def hook(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "get_num_new_matched_tokens" and result[0] is not None:
            request, local_tokens = args
            if local_tokens and self._device_cache_suspect:
                self._stale.add(request.request_id)
            else:
                self._stale.discard(request.request_id)

    def was_reset(self, ok: bool, active: set[str]) -> None:
        self._resets += 1
        self._stale |= active
        self._former = dict.fromkeys(self._former, True)
        self._over, self._ended = self._over | self._ended, set()
        self._device_cache_suspect = not ok
        self._cancelled |= self._loads
        self._last_batch = self._batch

    def tier_submitted(self, flight: "Flight") -> None:
        if flight.job.is_promotion:
            self._row_age.update(dict.fromkeys(flight.rows, self._resets))

    def reported(self, step: "Step") -> None:
        for job_id, ack in (step.report.acks if step.report is not None else {}).items():
            self._loads.discard(job_id)
            if job_id in self._cancelled and ack.error is None and step.number > self._last_batch:
                raise self.broken(f"load job {job_id} was in flight at the reset and ended well")

    def scheduled(self, step: "Step") -> None:
        self._batch = step.number
        self._loads |= {job.job_id for job in step.message.loads}
        for job in step.message.loads:
            old = sorted(row for row in rows_of(job) if self._row_age.get(row, 0) < self._resets)
            if old and job.job_id not in step.message.cancelled_loads:
                raise self.broken(f"load job {job.job_id} reads rows {old} from before the reset", job.req_id)
        for job in step.stores:
            if self._is_stale(job.req_id):
                raise self.broken(f"store job {job.job_id} offers slots from before the reset", job.req_id)
            self._row_age.update(dict.fromkeys(rows_of(job), self._resets))
        self._former.clear()
