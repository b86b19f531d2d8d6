"""The worker half: every job acknowledged once, every load received once, whatever the engine or vLLM's order does."""

import itertools

import numpy as np
import pytest
import torch

from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.messages import (
    DeviceJob,
    GroupTransfer,
    RegionAnnouncement,
    StepMessage,
    WorkerReport,
)
from vllm_tiered_offload.testing.fakes.copy_driver import FakeCopyEngine, FakeDriver
from vllm_tiered_offload.worker.copy_engines.base import CopyResult, Direction
from vllm_tiered_offload.worker.layout import build_group_layout
from vllm_tiered_offload.worker.worker import OffloadingConnectorWorker

CHUNK, BLOCKS, ROWS = 2, 16, 8


class Harness:
    """A worker half with `groups` KV groups over a fake engine; copies run when told to."""

    def __init__(self, groups: int = 1, writes: bool = True) -> None:
        self.groups = groups
        self.kv = [torch.zeros(BLOCKS, 4) for _ in range(groups)]
        for group, tensor in enumerate(self.kv):
            tensor[:] = torch.arange(BLOCKS)[:, None] + 100 * (group + 1)
        self.slots = np.zeros((ROWS, CHUNK * 16), np.uint8)
        self.driver = FakeDriver()
        layouts = [build_group_layout(g, {f"layer.{g}": t}, BLOCKS, 16) for g, t in enumerate(self.kv)]
        self.engine = FakeCopyEngine(self.driver, layouts, self.slots, CHUNK)
        config = WorkerConfig(capacity=4096, blocks_per_chunk=CHUNK)
        self.worker = OffloadingConnectorWorker(config, 0, lambda config, layouts, slots: self.engine, writes)
        self.worker.attach(layouts, self.slots)
        self.acks: list[tuple[int, bool]] = []  # job id, success; over all steps
        self.received: list[str] = []
        self.failed: list[str] = []

    def job(self, job_id: int, first_row: int = 0, first_block: int = 0, req_id: str | None = None) -> DeviceJob:
        transfers = [GroupTransfer(g, [first_row + g], [first_block + 2 * g]) for g in range(self.groups)]
        return DeviceJob(job_id, req_id or f"req-{job_id}", transfers)

    def step(
        self,
        message: StepMessage | None = None,
        run: bool = False,
        hooks: tuple[str, ...] = ("start_loads", "submit_stores"),
    ) -> WorkerReport:
        """One step in vLLM's order, with the hooks that vLLM calls around the forward pass."""
        self.worker.bind(message or StepMessage())
        for hook in hooks:
            getattr(self.worker, hook)()
        if run:
            self.driver.run_all()
        received, failed = self.worker.take_transfer_results()
        report = self.worker.build_report()
        self.worker.unbind()
        assert failed <= received
        self.received += received
        self.failed += failed
        self.acks += [(job_id, ack.error is None) for job_id, ack in report.acks.items()]
        assert all(ack.ranks == 1 for ack in report.acks.values())
        return report

    def settle(self) -> None:
        for _ in range(3):
            self.step(run=True)
        self.driver.check()


HOOKS = [
    ("start_loads", "submit_stores"),
    ("submit_stores", "start_loads"),
    ("start_loads",),
    ("submit_stores",),
    (),
]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("hooks", HOOKS)
def test_bound_jobs_are_never_lost(groups: int, hooks: tuple[str, ...]) -> None:
    """Case 12: a step without scheduled tokens carries store and load metadata, and vLLM leaves hooks out.

    Dropping pending jobs in unbind makes this fail.
    """
    rig = Harness(groups)
    rig.step(StepMessage(stores=[rig.job(1)], loads=[rig.job(2, 4, 8)]), hooks=hooks)
    rig.settle()
    assert sorted(rig.acks) == [(1, True), (2, True)]
    assert (rig.received, rig.failed) == (["req-2"], [])
    for group in range(groups):
        assert rig.slots[group, :16].view(np.float32)[0] == 100 * (group + 1) + 2 * group


def test_binding_again_without_unbind_keeps_the_jobs() -> None:
    """Case 12: a step that only binds; its jobs go with the next one."""
    rig = Harness()
    rig.worker.bind(StepMessage(stores=[rig.job(1)], loads=[rig.job(2, 4, 8)]))
    rig.worker.bind(StepMessage(stores=[rig.job(3, 1, 2)]))
    assert list(rig.engine.copies) == [1]
    rig.settle()
    assert sorted(rig.acks) == [(1, True), (2, True), (3, True)]
    assert rig.received == ["req-2"]


def test_stores_wait_for_the_forward_pass() -> None:
    """0.33 may ask for results before wait_for_save: a store is not submitted by asking for results.

    Submitting stores in take_transfer_results makes this fail.
    """
    rig = Harness()
    rig.worker.bind(StepMessage(stores=[rig.job(1)], loads=[rig.job(2, 4, 8)]))
    rig.worker.take_transfer_results()
    assert list(rig.engine.copies) == [2]
    rig.worker.submit_stores()
    assert sorted(rig.engine.copies) == [1, 2]


@pytest.mark.parametrize("order", itertools.permutations(["store", "load", "cancel"]))
def test_load_in_flight_aborted_reported_once(order: tuple[str, ...]) -> None:
    """Case 8 (worker part): load and store in flight, the request aborted and the load cancelled, in every order."""
    rig = Harness()
    rig.step(StepMessage(stores=[rig.job(1)], loads=[rig.job(2, 4, 8)]))
    copies = dict(rig.engine.copies)
    for event in order:
        if event == "cancel":
            rig.step(StepMessage(cancelled_loads=[2]))
        else:
            rig.driver.run(copies[1 if event == "store" else 2])
            rig.step()
    rig.settle()
    assert sorted(job_id for job_id, _ in rig.acks) == [1, 2]
    assert rig.received == ["req-2"]
    assert rig.failed == (["req-2"] if order.index("cancel") < order.index("load") else [])


def test_cancelled_before_it_was_submitted() -> None:
    """Load and cancellation in one message: nothing is copied, the receive fails, once."""
    rig = Harness()
    before = rig.kv[0].clone()
    rig.step(StepMessage(loads=[rig.job(1, 0, 3)], cancelled_loads=[1]))
    rig.settle()
    assert (rig.acks, rig.received, rig.failed) == ([(1, False)], ["req-1"], ["req-1"])
    assert torch.equal(rig.kv[0], before)
    assert rig.worker.take_stats()["load_failures"] == 0


def test_cancelling_a_store_or_a_stranger_changes_nothing() -> None:
    """Only loads are cancelled; ids of jobs that have been reported are ignored."""
    rig = Harness()
    rig.step(StepMessage(stores=[rig.job(1)]))
    rig.step(StepMessage(cancelled_loads=[1, 99]))
    rig.settle()
    assert (rig.acks, rig.received) == ([(1, True)], [])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("fault", ["submit", "poll", "result"])
@pytest.mark.parametrize("direction", list(Direction))
def test_engine_faults_become_failed_acks(groups: int, fault: str, direction: Direction) -> None:
    """Case 42: the engine fails at submit, at poll, or returns a failure; the worker half lives and says so once."""
    rig = Harness(groups)
    if fault == "submit":
        rig.engine.submit_errors.append(MemoryError("no staging memory"))
    elif fault == "poll":
        rig.engine.poll_errors.append(RuntimeError("device lost"))
    else:
        rig.engine.job_errors[1] = "copy failed"
    jobs = [rig.job(1)]
    rig.step(StepMessage(loads=jobs) if direction is Direction.LOAD else StepMessage(stores=jobs), run=True)
    rig.settle()
    assert rig.acks == [(1, False)]
    assert (rig.received, rig.failed) == ((["req-1"], ["req-1"]) if direction is Direction.LOAD else ([], []))
    assert rig.worker.take_stats()[f"{direction.value}_failures"] == 1
    rig.step(StepMessage(loads=[rig.job(2, 4, 8)]), run=True)
    rig.settle()
    assert (rig.worker.build_report().broken is not None) is (fault == "poll")
    assert rig.acks[1:] == [(2, fault != "poll")]
    assert rig.received[-1:] == ["req-2"]


def test_broken_engine_is_believed_only_when_it_stands_still() -> None:
    """D4: poll raised while a load is being copied: the receive fails only after the copy has ended.

    Failing the jobs at once makes this fail: vLLM would give the block to another request under a running copy.
    """
    rig = Harness()
    rig.step(StepMessage(loads=[rig.job(1)]))
    rig.engine.poll_errors.append(RuntimeError("device lost"))
    rig.step()
    rig.step()
    assert rig.received == []
    rig.driver.run_all()
    rig.step()
    assert (rig.acks, rig.received, rig.failed) == ([(1, False)], ["req-1"], ["req-1"])


def test_invalid_plans_fail_the_job_alone() -> None:
    """A job that addresses what does not exist never reaches the engine; its neighbours do."""
    rig = Harness()
    wrong = DeviceJob(1, "req-1", [GroupTransfer(0, [0], [BLOCKS])])
    report = rig.step(StepMessage(loads=[wrong, rig.job(2, 1, 4)]), run=True)
    assert "device block 16 is outside 0..15" in (report.acks[1].error or "")
    assert sorted(rig.acks) == [(1, False), (2, True)]
    assert (sorted(rig.received), rig.failed) == (["req-1", "req-2"], ["req-1"])


def test_an_engine_that_repeats_itself_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second result for a load would be an assertion inside vLLM."""
    rig = Harness()
    rig.step(StepMessage(loads=[rig.job(1)]), run=True)
    monkeypatch.setattr(rig.engine, "poll", lambda: [CopyResult(1, Direction.LOAD, None, 16, 0.1)])
    rig.step()
    rig.step()
    assert (rig.acks, rig.received) == ([(1, True)], ["req-1"])
    assert rig.worker.take_stats()["duplicate_results"] == 2


def test_a_job_announced_twice_is_one_job() -> None:
    """The first announcement counts, pending or in flight."""
    rig = Harness()
    rig.step(StepMessage(loads=[rig.job(1), rig.job(1)]))
    rig.step(StepMessage(loads=[rig.job(1)]))
    rig.settle()
    assert (rig.acks, rig.received) == ([(1, True)], ["req-1"])


def test_two_loads_of_one_request_are_two_receives() -> None:
    """A set names a request once a step: the second load is delivered in the next one, ack and receive together."""
    rig = Harness()
    loads = [rig.job(1, 0, 0, "req"), rig.job(2, 1, 4, "req")]
    assert list(rig.step(StepMessage(loads=loads), run=True).acks) == [1]
    assert rig.received == ["req"]
    assert list(rig.step().acks) == [2]
    assert rig.received == ["req", "req"]


def test_jobs_outlive_steps() -> None:
    """Acknowledgement and finished receive come in the same step, however late."""
    rig = Harness()
    rig.step(StepMessage(stores=[rig.job(1)], loads=[rig.job(2, 4, 8)]))
    for _ in range(5):
        assert rig.step().acks == {}
    rig.step(run=True)
    assert sorted(rig.acks) == [(1, True), (2, True)]
    assert rig.received == ["req-2"]


def test_announcement_is_repeated_until_a_step_answers() -> None:
    """In every report up to the first one that a step message follows."""
    rig = Harness()
    announcement = RegionAnnouncement(1, 2, 3, RegionGeometry(ROWS, (32,), CHUNK))
    assert rig.worker.build_report().region is None
    rig.worker.set_announcement(announcement)
    rig.worker.bind(StepMessage())
    assert rig.worker.build_report().region == announcement
    assert rig.worker.build_report().region == announcement
    rig.worker.bind(StepMessage())
    assert rig.worker.build_report().region is None


def test_stats_are_deltas() -> None:
    """Bytes and jobs since the last call; a failed job counts as job and failure, not as bytes."""
    rig = Harness()
    rig.engine.job_errors[2] = "copy failed"
    rig.step(StepMessage(stores=[rig.job(1), rig.job(2, 1, 4)], loads=[rig.job(3, 4, 8)]), run=True)
    stats = rig.worker.take_stats()
    assert (stats["store_bytes"], stats["store_jobs"], stats["store_failures"]) == (16, 2, 1)
    assert (stats["load_bytes"], stats["load_jobs"], stats["load_failures"]) == (16, 1, 0)
    assert set(rig.worker.take_stats().values()) == {0.0}


def test_before_attach_and_after_shutdown() -> None:
    """Jobs without an engine fail, each once; nothing raises."""
    worker = OffloadingConnectorWorker(WorkerConfig(4096, CHUNK), 0, lambda *_: pytest.fail("not attached"))
    load = DeviceJob(1, "r", [GroupTransfer(0, [0], [0])])
    worker.bind(StepMessage(loads=[load]))
    assert worker.take_transfer_results() == ({"r"}, {"r"})
    assert worker.build_report().acks[1].error == "RuntimeError: no KV cache has been registered"
    assert worker.shutdown()
    rig = Harness()
    rig.step(StepMessage(loads=[rig.job(1)]))
    assert rig.worker.shutdown()
    assert rig.worker.shutdown()
    rig.step(StepMessage(loads=[rig.job(2)]))
    assert sorted(rig.acks) == [(1, False), (2, False)]
    assert sorted(rig.received) == ["req-1", "req-2"]


# ---- memory that goes and comes back -------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
def test_before_sleep_copies_end_and_after_it_none_begins(groups: int) -> None:
    """What is in flight is waited for, what comes while the memory is gone fails, and afterwards copies work again.

    Fails when `release` does not wait, when jobs bound before it are still submitted, and when `restore` is left out.
    """
    rig = Harness(groups)
    rig.step(StepMessage(stores=[rig.job(1)]))
    rig.worker.bind(StepMessage(loads=[rig.job(2, 4, 8)]))
    rig.worker.release()
    assert all(copy.done for copy in rig.engine.copies.values())
    rig.step(StepMessage(loads=[rig.job(3, 4, 8)]))
    assert list(rig.engine.copies) == []
    rig.worker.restore()
    rig.step(StepMessage(loads=[rig.job(4, 4, 8)]))
    rig.settle()
    assert sorted(rig.acks) == [(1, True), (2, False), (3, False), (4, True)]
    assert (sorted(rig.received), sorted(rig.failed)) == (["req-2", "req-3", "req-4"], ["req-2", "req-3"])


def test_sleep_is_refused_while_a_copy_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory must not go: vLLM hears an error, and the engine serves on. Releasing anyway makes this fail."""
    rig = Harness()
    rig.step(StepMessage(stores=[rig.job(1)]))
    monkeypatch.setattr(rig.engine, "wait", lambda timeout: False)
    with pytest.raises(RuntimeError, match="did not end within 0 s"):
        rig.worker.release(0.0)
    monkeypatch.undo()
    rig.step(StepMessage(loads=[rig.job(2, 4, 8)]))
    rig.settle()
    assert sorted(rig.acks) == [(1, True), (2, True)]


def test_a_broken_engine_does_not_keep_anybody_awake() -> None:
    """The device is lost, so nothing of it is copied any more."""
    rig = Harness()
    rig.step(StepMessage(stores=[rig.job(1)]))
    rig.engine.poll_errors.append(RuntimeError("lost"))
    rig.engine.wait = lambda timeout: 1 // 0  # type: ignore[method-assign]
    rig.step()
    rig.worker.release()
    rig.worker.restore()
    rig.step(StepMessage(loads=[rig.job(2)]))
    assert sorted(rig.acks) == [(1, False), (2, False)]


@pytest.mark.parametrize("finished", [True, False])
def test_registered_again_elsewhere(finished: bool) -> None:
    """A copy of the former tensors ends and is acknowledged once; later ones go to the new tensors.

    Fails when the former engine's last results are not taken.
    """
    rig = Harness()
    rig.step(StepMessage(stores=[rig.job(1)]), run=False)
    if finished:
        rig.driver.run_all()
    former = rig.kv[0].clone()
    moved = torch.zeros(BLOCKS, 4)
    layouts = [build_group_layout(0, {"layer.0": moved}, BLOCKS, 16)]
    rig.engine = FakeCopyEngine(rig.driver, layouts, rig.slots, CHUNK)
    rig.worker.attach(layouts, rig.slots)
    rig.step(StepMessage(loads=[rig.job(2, 0, 8)]))
    rig.settle()
    assert rig.acks == [(1, True), (2, True)]
    assert rig.received == ["req-2"]
    assert torch.equal(rig.kv[0], former)
    assert torch.equal(moved[8], former[0])


def test_registered_again_while_a_copy_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused after a bounded time; the former tensors stay in use."""
    rig = Harness()
    rig.step(StepMessage(stores=[rig.job(1)]))
    monkeypatch.setattr(rig.engine, "wait", lambda timeout: False)
    with pytest.raises(RuntimeError, match="try again when the engine is idle"):
        rig.worker.attach([], np.zeros((0, 0), np.uint8))
    monkeypatch.undo()
    rig.settle()
    assert rig.acks == [(1, True)]


def test_a_rank_that_writes_nothing_acknowledges_stores_and_loads() -> None:
    """Another rank holds the same KV and writes it: the store ends here without a copy, the load moves its bytes."""
    harness = Harness(writes=False)
    harness.slots[:] = 7
    harness.step(StepMessage(stores=[harness.job(1)], loads=[harness.job(2, first_row=1, first_block=4)]))
    harness.settle()
    assert sorted(harness.acks) == [(1, True), (2, True)]
    assert (harness.slots == 7).all()
    assert (harness.kv[0][4].view(torch.uint8) == 7).all()
    assert harness.received == ["req-2"]
