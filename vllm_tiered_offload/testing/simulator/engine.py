"""One simulated engine and its scripting interface. Imports vLLM."""

import pickle
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from vllm_tiered_offload.connector.overrides import Overrides, use_overrides
from vllm_tiered_offload.connector.ranks import use_rank_group
from vllm_tiered_offload.connector.views import SESSIONS_KEEP_TRUE_HASHES
from vllm_tiered_offload.contract.messages import DeviceJob, StepMessage, WorkerReport
from vllm_tiered_offload.testing.fakes.seams import ManualClock
from vllm_tiered_offload.testing.simulator import builders, guard
from vllm_tiered_offload.testing.simulator.checkers import ALL_CHECKERS, Checker, Watchers
from vllm_tiered_offload.testing.simulator.config import SimConfig
from vllm_tiered_offload.testing.simulator.copies import CopyControl
from vllm_tiered_offload.testing.simulator.hooks import watch_hooks
from vllm_tiered_offload.testing.simulator.messages import step_message, worker_report
from vllm_tiered_offload.testing.simulator.model_runner import SimModelRunner
from vllm_tiered_offload.testing.simulator.ranks import BarrierGroup, RankWorker, in_threads
from vllm_tiered_offload.testing.simulator.store_parts import stores_by_request
from vllm_tiered_offload.testing.simulator.story import Story
from vllm_tiered_offload.testing.simulator.tier_reporter import TierReporter
from vllm_tiered_offload.testing.simulator.tier_watch import TierWatch
from vllm_tiered_offload.testing.simulator.tiers import TierControl
from vllm_tiered_offload.testing.simulator.world import World


@dataclass(slots=True)
class Step:
    """One scheduled batch on its way through the engine."""

    number: int  # counts scheduled batches
    output: Any  # vLLM's SchedulerOutput
    metadata: bytes | None  # pickled connector metadata, as it travels to the workers
    message: StepMessage  # ours inside it; empty when the connector under test sent none
    allocated: list[int]  # device blocks that the pool handed out while this step was scheduled
    given: list[str]  # requests whose block tables grew meanwhile
    pool_full: bool  # no free block, or an allocation failed
    stores: list[DeviceJob]  # the message's stores, request by request
    device_hits: dict[str, int]  # tokens that requests which (re)start in it found on the device
    result: Any = None  # vLLM's ModelRunnerOutput of all ranks, once executed
    rank_outputs: list[Any] = field(default_factory=list)  # KVConnectorOutput per rank, as each rank sent it
    report: WorkerReport | None = None  # ours inside the merged output


class Simulation:
    """vLLM's engine loop over the real scheduler, with simulated workers.

    sim.add_request(tokens, max_tokens); sim.step(); sim.abort(id); sim.hold_copies(); sim.run_copies();
    sim.reset(); sim.run_until_idle(); sim.converge(). A broken invariant raises Violation from the call that shows it.
    """

    def __init__(
        self, config: SimConfig, seed: int | str = 0, checkers: Sequence[type[Checker]] = ALL_CHECKERS
    ) -> None:
        guard.install()
        self.config = config
        self.rng = random.Random(seed)
        self.story = Story()
        self.clock = ManualClock()
        self.copies = CopyControl(self.rng)
        self.tiers = TierControl(random.Random(f"{seed}/tiers"))
        self.runner = SimModelRunner(config, self.story)
        self.world = World.make(config, self.runner, random.Random(f"{seed}/neighbour"))
        self.outputs: dict[str, list[int]] = {}  # tokens that came out, per request
        self.live: dict[str, Any] = {}  # vLLM's Request of everything that has not finished
        self.eager = True  # depth 2: whether a batch runs before the next schedule()
        self.pool_full_steps = 0
        self.tokens_loaded = 0  # tokens of all load jobs, in the first KV group
        self.jobs: deque[tuple[str, DeviceJob]] = deque(maxlen=1000)  # the last jobs sent: ("load" | "store", job)
        self._ids = count(1)
        self._numbers = count(1)
        self._batches: deque[Step] = deque()  # scheduled, output not yet given back; oldest first
        self._aborts: list[str] = []  # arrive while a batch runs
        self._connector_resets = 0
        self._allocated: list[int] = []
        self._given: list[str] = []
        self._device_hits: dict[str, int] = {}  # of the requests that vLLM asked about, the last time
        self._allocation_failed = False
        self._build()
        self.watchers = Watchers([kind(self) for kind in checkers])
        self.runner.before_write = self._before_write
        self._watch_tiers()

    # -- construction --------------------------------------------------------------------------------------------

    def _build(self) -> None:
        config = self.config
        overrides = Overrides(self.clock, self.copies.executor, self.tiers.region_access)
        with use_overrides(overrides), self.tiers.registered():
            built = builders.vllm_config(config, self.world.name)
            kv_config = builders.kv_cache_config(config, self.runner.layer_names())
            self.scheduler = builders.scheduler(config, built, kv_config)
            self.workers = self._build_workers(built, kv_config)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._watch_pool()
        if self.scheduler.connector is not None:
            watch_hooks(self.scheduler.connector, self._on_hook, self._on_raise, self._on_io)
            self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, config.ranks)

    def _watch_tiers(self) -> None:
        timeout = self.config.setting("tier_job_timeout", 0.0)
        reporter = TierReporter(self.story, self.watchers)
        for tier_guard in getattr(self.manager, "guards", ()):
            TierWatch(tier_guard, self.clock, timeout, reporter)

    def _build_workers(self, built: Any, kv_config: Any) -> list[RankWorker]:
        if self.scheduler.connector is None:
            return []
        workers = []
        for group in BarrierGroup.make(self.config.ranks):
            with use_rank_group(group):
                connector = KVConnectorFactory.create_connector(
                    builders.for_rank(built, group.rank), KVConnectorRole.WORKER, kv_config
                )
            workers.append(RankWorker(connector, group.rank, self.runner))
        in_threads([worker.register for worker in workers])
        return workers

    def _watch_pool(self) -> None:
        """See each allocation: patched on the instances, so that vLLM's classes stay as they are."""
        get_new_blocks = self.pool.get_new_blocks
        allocate_slots = self.scheduler.kv_cache_manager.allocate_slots

        def watched_blocks(num_blocks: int) -> Any:
            blocks = get_new_blocks(num_blocks)
            ids = [block.block_id for block in blocks]
            self._allocated += ids
            self.watchers.tell("allocated", ids)
            return blocks

        def watched_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = allocate_slots(request, *args, **kwargs)
            self._allocation_failed |= blocks is None
            self._given.append(request.request_id)
            return blocks

        self.pool.get_new_blocks = watched_blocks
        self.scheduler.kv_cache_manager.allocate_slots = watched_slots

    # -- scripting -----------------------------------------------------------------------------------------------

    @property
    def sessions_are_sound(self) -> bool:
        """Where they are not, vLLM's own device cache can serve wrong bytes (see `has_true_hashes`)."""
        speculates = self.config.speculative_tokens or any(group.draft for group in self.config.groups)
        return SESSIONS_KEEP_TRUE_HASHES and not speculates

    @property
    def connector(self) -> Any:
        """The scheduler side of the connector under test (inside MultiConnector if there is a neighbour)."""
        connector = self.scheduler.connector
        if connector is None or self.config.neighbour is None:
            return connector
        return connector.sub_connectors[1 if self.config.neighbour_first else 0]

    @property
    def manager(self) -> Any:
        """What the scheduler half of the connector under test talks to, or None."""
        half = getattr(self.connector, "connector_scheduler", None)
        return getattr(half, "manager", None)

    def add_request(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        req_id: str | None = None,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
        skip_reading: bool = False,
        session: bool = False,
    ) -> str:
        """A request arrives; its id.

        `skip_reading`: it must not use any cached prefix. `session`: it waits for more input when it has answered.
        """
        req_id = req_id or f"r{next(self._ids)}"
        request = builders.request(
            req_id, list(tokens), max_tokens, self.config.hash_tokens, params, salt, skip_reading, session
        )
        self.live[req_id] = request
        self.outputs[req_id] = []
        self.story.tell("admit", [req_id], f"{len(tokens)} tokens, up to {max_tokens} more")
        self.watchers.tell("added", request)
        self.scheduler.add_request(request)
        return req_id

    def sessions_waiting(self) -> list[str]:
        """Sessions that have answered and wait for more input."""
        return [
            req_id for req_id, request in self.live.items() if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        ]

    def is_loading(self) -> bool:
        """Whether some request waits for a load, ours or the neighbour's."""
        return any(request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in self.live.values())

    def continue_session(self, req_id: str, tokens: Sequence[int], max_tokens: int) -> None:
        """More input for a session that waits for it."""
        self.story.tell("continue", [req_id], f"{len(tokens)} tokens, up to {max_tokens} more")
        more = builders.request(req_id, list(tokens), max_tokens, self.config.hash_tokens, session=True)
        self.scheduler.add_request(more)

    def end_sessions(self) -> None:
        """Close every session that waits for input; without it they would hold their blocks for ever."""
        for req_id in self.sessions_waiting():
            self.abort(req_id)

    def abort(self, req_id: str, while_running: bool = False) -> None:
        """The client goes away: between steps, or while the next batch runs (vLLM handles it before that output)."""
        if while_running:
            self._aborts.append(req_id)
        else:
            self._abort_now([req_id])

    def _abort_now(self, req_ids: list[str]) -> None:
        for req_id in req_ids:
            request = self.live.get(req_id)
            if request is None:
                continue
            self.story.tell("abort", [req_id], f"while {request.status.name}, {request.num_computed_tokens} computed")
            self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
            self._ended(req_id)

    def preempt_all(self) -> None:
        """Take the device blocks of everything that runs away, as a full pool would; nothing is forgotten."""
        try:
            self.scheduler.reset_prefix_cache(True, False)
        except RuntimeError:  # vLLM: its cache could not be cleared as well, because somebody holds blocks
            return

    def blocks_moved(self, kind: str, req_id: str) -> list[int]:
        """Device blocks that "load" or "store" jobs of this request moved, in the order they were sent."""
        return [
            block
            for sent, job in self.jobs
            if sent == kind and job.req_id == req_id
            for transfer in job.transfers
            for block in transfer.device_block_ids
        ]

    def hold_copies(self) -> None:
        """Copies wait from now on."""
        self.copies.held = True

    def run_copies(self, count: int | None = None, shuffle: bool = False) -> int:
        """Run waiting copies now (all by default); how many ran."""
        return self.copies.run(count, shuffle)

    def release_copies(self) -> None:
        """Run what waits; from now on copies run at the end of each step."""
        self.copies.held = False
        self.copies.run()

    def reset(self, reset_running: bool = False, new_weights: bool = False) -> bool:
        """vLLM's reset_prefix_cache with reset_connector; new weights are put in place only if it succeeded.

        (Weights changed before a reset that fails would make vLLM's own cache serve stale blocks; a careful operator
        pauses, resets, and updates. So after a successful reset no slot of an older epoch may ever be read.)
        """
        active = {req_id for req_id, request in self.live.items() if request.num_computed_tokens > 0}
        reached = self._connector_resets
        try:
            ok = bool(self.scheduler.reset_prefix_cache(reset_running, True))
        except RuntimeError:  # vLLM: blocks are still in use although nothing runs any more
            ok = False
        self.story.tell("reset", sorted(active) if ok or reset_running else (), f"ok={ok} running={reset_running}")
        if self._connector_resets > reached:
            self.watchers.tell("was_reset", ok, active)
        if ok and new_weights:
            self._execute_all()  # the workers get new weights after the batches that were sent to them before
            self.runner.new_weights()
        return ok

    def sleep(self) -> bool:
        """vLLM's sleep of an engine that is paused: a reset of all, and if that succeeds the KV cache loses its memory.

        Whether it did. Nothing may copy from then on until `wake_up`.
        """
        if self.has_work() or not self.reset(reset_running=True):
            return False
        if len(self.copies):
            raise self.story.violation("l6", f"{len(self.copies)} copies wait while the KV cache loses its memory")
        for worker in self.workers:
            worker.release()
        self.runner.poison(range(self.config.num_blocks))
        self.story.tell("sleep")
        return True

    def wake_up(self, new_weights: bool = False) -> None:
        """The KV cache has memory again, with anything in it; the weights may be others."""
        for worker in self.workers:
            worker.restore()
        if new_weights:
            self.runner.new_weights()
        self.story.tell("wake up")

    def leftover_state(self) -> dict[str, int]:
        """What must be 0 in the end, by name: maps of the scheduler half and the layers below, rows in use."""
        half = getattr(self.connector, "connector_scheduler", None) or self.connector
        report = getattr(half, "debug_state", None)
        return dict(report()) if report is not None else {}

    def may_reuse_id(self, req_id: str) -> bool:
        """Whether a new request may take the id of this finished one (vLLM itself must be done with it)."""
        in_flight = any(req_id in batch.output.num_scheduled_tokens for batch in self._batches)
        return not in_flight and req_id not in self.scheduler.requests

    def has_work(self) -> bool:
        """Whether vLLM's engine loop would go on stepping."""
        return bool(self._batches) or self.scheduler.has_requests()

    def run_until_idle(self, limit: int = 2000, sessions_end: bool = False) -> int:
        """Step until the engine would go to sleep; how many steps it took. `sessions_end`: no more input comes."""
        for steps in range(limit):
            if not self.has_work():
                return steps
            self.step()
            if sessions_end:
                self.end_sessions()
        raise self.story.violation("v5", f"the engine is still busy after {limit} steps: {self._why_busy()}")

    def converge(self, limit: int = 2000) -> None:
        """Faults stop, everything ends, and nothing may be left."""
        self.copies.no_more_faults()
        self.world.calm()
        self.release_copies()
        self.tiers.calm()
        self.end_sessions()
        self.run_until_idle(limit, sessions_end=True)
        self.settle_tiers()
        self.watchers.tell("converged")
        self.story.raise_broken()

    def settle_tiers(self) -> None:
        """What the last step gave the tiers to do ends, and vLLM's idle poll takes it in."""
        self.tiers.end_of_step()
        if self.scheduler.connector is not None:
            self.scheduler.connector.has_pending_push_work()

    def close(self) -> None:
        """Shut both halves down."""
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.connector.shutdown()
        self.world.forget()

    # -- the engine loop -----------------------------------------------------------------------------------------

    def step(self) -> Step | None:
        """One turn of vLLM's engine loop; the batch whose output was processed in it, if any."""
        self.clock.advance(self.config.seconds_per_step)
        done = None
        if self.scheduler.has_requests():
            self._batches.append(self._schedule())
            if self.config.depth == 1 or self.eager:
                self._execute_all()
            waits = self.config.depth > len(self._batches)
            if waits and (self._batches[-1].output.total_num_scheduled_tokens or self.scheduler.has_requests()):
                return None
        if self._batches:
            self._execute_all(upto=1)
            done = self._batches.popleft()
            self._process(done)
        return done

    def _schedule(self) -> Step:
        self._allocated, self._given, self._allocation_failed = [], [], False
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        message, hits = step_message(metadata) or StepMessage(), self._device_hits
        step = Step(
            number=next(self._numbers),
            output=output,
            metadata=pickle.dumps(metadata) if metadata is not None else None,
            message=message,
            allocated=self._allocated,
            given=self._given,
            pool_full=self._allocation_failed or not self.pool.get_num_free_blocks(),
            stores=stores_by_request(message, getattr(self.connector, "connector_scheduler", None)),
            device_hits={req_id: hits.pop(req_id) for req_id in output.num_scheduled_tokens if req_id in hits},
        )
        self._tell_scheduled(step)
        self.watchers.tell("scheduled", step)
        return step

    def _execute_all(self, upto: int | None = None) -> None:
        """Run the batches that have not run yet, in order."""
        for step in list(self._batches)[:upto]:
            if step.result is None:
                self._execute(step)

    def _execute(self, step: Step) -> None:
        output = step.output
        # vLLM's second runner clears new blocks first of all, the CPU one later; first is the harder case.
        if step.allocated:
            self.runner.poison(step.allocated)
        if step.metadata is not None:
            for worker in self.workers:
                worker.before_forward(step.metadata, output.has_sync_kv_loads)
        self.runner.update_states(output, step.device_hits)
        sampled = self.runner.forward(output)
        self.watchers.tell("received", step)
        result = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={req_id: i for i, req_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
        )
        if step.metadata is not None:
            self._finish_workers(step, result)
        # An id that is in use again was taken over by update_states.
        self.runner.forget(output.finished_req_ids - output.num_scheduled_tokens.keys())
        self.copies.end_of_step()
        self.tiers.end_of_step()
        step.result = result

    def _finish_workers(self, step: Step, result: Any) -> None:
        outputs = []
        for worker in self.workers:
            if step.output.total_num_scheduled_tokens:
                worker.during_forward()
            mine = ModelRunnerOutput(req_ids=result.req_ids, req_id_to_index=result.req_id_to_index)
            mine.kv_connector_output = worker.after_forward(step.output.finished_req_ids)
            step.rank_outputs.append(mine.kv_connector_output)  # the aggregator makes a new one of them
            outputs.append(mine)
        merged = self._aggregator.aggregate(outputs).kv_connector_output
        result.kv_connector_output = merged
        step.report = worker_report(merged.kv_connector_worker_meta)
        self._tell_reported(step)
        self.watchers.tell("reported", step)

    def _process(self, step: Step) -> None:
        aborts, self._aborts = self._aborts, []
        self._abort_now(aborts)
        outputs = self.scheduler.update_from_output(step.output, step.result)
        if self.config.speculative_tokens and self.config.depth == 1:  # else they stay with the workers
            guesses = self.runner.guesses(step.result.req_ids)
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(guesses), list(guesses.values())))
        for output in (one for client in outputs.values() for one in client.outputs):
            self.outputs[output.request_id] += output.new_token_ids
            if output.finish_reason is not None and self._is_over(output.request_id):
                self.story.tell("finish", [output.request_id], output.finish_reason)
                self._ended(output.request_id)
        self.watchers.tell("updated", step)
        jobs = step.message.loads or step.message.stores or (step.report is not None and step.report.acks)
        counted = bool(step.output.total_num_scheduled_tokens or jobs)
        self.pool_full_steps += counted and step.pool_full
        self.story.next_step(counted)

    # -- watching ------------------------------------------------------------------------------------------------

    def _is_over(self, req_id: str) -> bool:
        """Whether the request ended; a session that has answered has not."""
        request = self.live.get(req_id)
        return request is not None and request.is_finished()

    def _ended(self, req_id: str) -> None:
        request = self.live.pop(req_id, None)
        if request is not None:
            self.watchers.tell("ended", request)

    def _before_write(self, req_id: str, blocks: list[int], changes: Callable[[], bool]) -> None:
        self.watchers.tell("writing", req_id, blocks, changes)

    def _on_hook(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        self._connector_resets += name == "reset_cache"
        if name == "get_num_new_matched_tokens":
            self._device_hits[args[0].request_id] = args[1]
        self.story.raise_broken()
        self.watchers.tell("hook", name, args, result)

    def _on_raise(self, name: str, error: Exception) -> None:
        self.watchers.tell("hook_raised", name, error)

    def _on_io(self, name: str, call: str) -> None:
        raise self.story.violation("no_io", f"{name} on the scheduler thread made the call {call}")

    def _tell_scheduled(self, step: Step) -> None:
        output = step.output
        if output.preempted_req_ids:
            self.story.tell("preempt", sorted(output.preempted_req_ids))
        for new in output.scheduled_new_reqs:
            self.story.tell("start", [new.req_id], f"at {new.num_computed_tokens}", new.block_ids[0])
        for req_id in output.scheduled_cached_reqs.resumed_req_ids:
            self.story.tell("resume", [req_id])
        for kind, jobs in (("load", step.message.loads), ("store", step.stores)):
            for job in jobs:
                self.jobs.append((kind, job))
                self.story.tell(kind, [job.req_id], f"job {job.job_id}", job.transfers)
        transfers = (transfer for job in step.message.loads for transfer in job.transfers)
        blocks = sum(len(transfer.device_block_ids) for transfer in transfers if transfer.group_idx == 0)
        self.tokens_loaded += blocks * self.config.block_tokens(0)

    def _tell_reported(self, step: Step) -> None:
        for job_id, ack in (step.report.acks if step.report else {}).items():
            self.story.tell("ack", (), f"job {job_id} x{ack.ranks.bit_count()}", ack.error or "ok")
            if ack.error:
                self.story.tell("fault")
        for output in step.rank_outputs:
            if output.finished_recving:
                self.story.tell("received", sorted(output.finished_recving), f"failed {output.failed_recving or '-'}")

    def _why_busy(self) -> str:
        scheduler = self.scheduler
        running = [request.request_id for request in scheduler.running]
        waiting = [f"{request.request_id} {request.status.name}" for request in self.live.values()]
        pending = scheduler.connector.has_pending_push_work() if scheduler.connector is not None else None
        state = self.leftover_state()
        held = sorted(set(scheduler.requests) - set(self.live))
        return (
            f"running {running}, live {waiting}, held after finish {held}, push work {pending}, state {state}, "
            f"{len(self.copies)} copies and {len(self.tiers)} tier jobs wait"
        )
