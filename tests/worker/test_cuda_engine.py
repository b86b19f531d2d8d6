"""The device copy engine on a fake device whose operations run in any order that its streams and events allow."""

import logging
import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch

from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.contract.messages import DeviceJob, GroupTransfer, StepMessage
from vllm_tiered_offload.testing.fakes.copy_device import FakeDevice
from vllm_tiered_offload.testing.fakes.copy_driver import FakeDriver, UnorderedAccess
from vllm_tiered_offload.testing.fakes.seams import ManualExecutor
from vllm_tiered_offload.worker.copy_engines import cuda, host_rows
from vllm_tiered_offload.worker.copy_engines.base import CopyResult, Direction
from vllm_tiered_offload.worker.copy_engines.choice import device_choice
from vllm_tiered_offload.worker.copy_engines.cuda import CudaCopyEngine
from vllm_tiered_offload.worker.copy_engines.descriptor_pool import DescriptorPool
from vllm_tiered_offload.worker.copy_engines.device import DeviceError
from vllm_tiered_offload.worker.copy_engines.host import CompletedEvent
from vllm_tiered_offload.worker.copy_plan import CopyPlan, PlanBounds, plan_transfer
from vllm_tiered_offload.worker.layout import build_group_layout
from vllm_tiered_offload.worker.worker import OffloadingConnectorWorker

CHUNK, BLOCKS, ROWS, WIDTH = 2, 64, 32, 16
BLOCK_BYTES = 2 * WIDTH * 4  # two layers of float32
ALL_METHODS = ("batch", "op", "each", "torch", "kernel")
SEEDS = range(6)


class Lane(ManualExecutor):
    """Runs each task at once, unless told to keep them."""

    keep = False
    closed = False

    def shutdown(self, wait: bool = True) -> None:
        self.closed = True
        super().shutdown(wait)

    def submit(self, job: Callable[[], None], /) -> None:
        super().submit(job)
        if not self.keep:
            self.run_all()


class Rig:
    """Two layers of 64 blocks, 32 rows of 2 blocks, the engine, and the worker half on top of it."""

    def __init__(self, methods: tuple[str, ...] = ALL_METHODS, node: int | None = None, **faults: int) -> None:
        self.kv = [torch.arange(BLOCKS * WIDTH).view(BLOCKS, WIDTH) * 1.0 + 10_000 * layer for layer in range(2)]
        self.slots = np.zeros((ROWS, CHUNK * BLOCK_BYTES), np.uint8)
        self.layout = build_group_layout(0, {f"layer.{i}": t for i, t in enumerate(self.kv)}, BLOCKS, 16)
        self.driver = FakeDriver()
        self.device = FakeDevice(self.driver, self.layout, self.slots, methods)
        self.device.node = node
        for name, value in faults.items():
            setattr(self.device, name, value)
        self.lanes: list[Lane] = []
        self.worker = OffloadingConnectorWorker(
            WorkerConfig(capacity=1 << 20, blocks_per_chunk=CHUNK), 0, lambda config, layouts, slots: self.make_engine()
        )
        self.worker.attach([self.layout], self.slots)

    def make_engine(self) -> CudaCopyEngine:
        self.engine = CudaCopyEngine(
            [self.layout], self.slots, CHUNK, self.device, self.make_lane, lambda _: self.driver.run_all()
        )
        return self.engine

    def make_lane(self) -> Lane:
        self.lanes.append(Lane())
        return self.lanes[-1]

    def plan(self, rows: list[int], blocks: list[int]) -> CopyPlan:
        return plan_transfer(GroupTransfer(0, rows, blocks), PlanBounds(CHUNK, ROWS, {0: BLOCKS}))

    def submit(self, job_id: int, direction: Direction, rows: list[int], blocks: list[int]) -> None:
        self.engine.submit(job_id, direction, [self.plan(rows, blocks)], self.engine.record_compute_event())

    def row(self, row: int) -> np.ndarray:
        """Row as float32, (block, layer, element)."""
        return self.slots[row].view(np.float32).reshape(CHUNK, 2, WIDTH)

    def step(self, *, loads: tuple[DeviceJob, ...] = (), stores: tuple[DeviceJob, ...] = ()) -> None:
        """A step of the worker half without kernels."""
        self.worker.bind(StepMessage(loads=list(loads), stores=list(stores)))
        self.worker.start_loads()
        self.worker.submit_stores()

    def write(self, block: int, value: float) -> None:
        """A kernel that writes the block, in all layers."""
        self.driver.compute(f"write {block}", [], [block], lambda: [layer[block].fill_(value) for layer in self.kv])

    def read(self, block: int, into: list[float]) -> None:
        self.driver.compute(f"read {block}", [block], [], lambda: into.append(float(self.kv[0][block, 0])))


def job(job_id: int, rows: list[int], blocks: list[int]) -> DeviceJob:
    return DeviceJob(job_id, f"req-{job_id}", [GroupTransfer(0, rows, blocks)])


def ended(results: list[CopyResult]) -> dict[int, str | None]:
    return {result.job_id: result.error for result in results}


def store_after_a_long_write(rig: Rig) -> None:
    """The kernel that writes block 3 has been launched, not run, when the store is submitted."""
    rig.worker.bind(StepMessage(stores=[job(1, [0], [3])]))
    rig.write(3, 7.0)
    rig.worker.submit_stores()


def load_after_a_long_read(rig: Rig, got: list[float]) -> None:
    """A kernel of an earlier request still reads block 3 when a load into it is submitted."""
    rig.row(0)[...] = 9.0
    rig.read(3, got)
    rig.step(loads=(job(1, [0], [3]),))


# ---- order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_reads_what_the_kernel_wrote(seed: int) -> None:
    """Case 30 through the real engine. Submitting without the event makes this fail, and so does a CudaCopyEngine
    that does not pass it to `wait_event` (tried)."""
    rig = Rig()
    store_after_a_long_write(rig)
    rig.driver.run_all(random.Random(seed))
    rig.driver.check()
    assert (rig.row(0)[0] == 7.0).all()
    rig.worker.take_transfer_results()
    assert rig.worker.build_report().acks[1].error is None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_leaves_earlier_readers_alone(seed: int) -> None:
    """Case 30, the other direction; the same mutation makes it fail (tried)."""
    rig = Rig()
    got: list[float] = []
    before = float(rig.kv[0][3, 0])
    load_after_a_long_read(rig, got)
    rig.driver.run_all(random.Random(seed))
    rig.driver.check()
    assert (got, float(rig.kv[1][3, 0])) == ([before], 9.0)


def test_either_wait_left_out_is_noticed() -> None:
    """Case 30, mutation: a stream that forgets its wait, even when operations happen to run in the order of launch."""
    for stream, scene, rivals in (
        ("patient", store_after_a_long_write, "batch begins and write 3"),
        ("urgent", lambda rig: load_after_a_long_read(rig, []), "batch begins and read 3"),
    ):
        rig = Rig()
        rig.device.ignored_waits = {stream}
        scene(rig)
        rig.driver.run_all()
        with pytest.raises(UnorderedAccess, match=rivals):
            rig.driver.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_that_the_runner_zeroes_and_copies_on_write(seed: int) -> None:
    """V2's model runner zeroes new blocks, and copies shared ones, before the connector hears of the step.

    The load into the zeroed block comes after the zeroing, so its bytes stay; the store of the copied block comes
    after the copy. Block 9 is a copy of 8 and stored in the step that makes it.
    """
    rig = Rig()
    rig.row(0)[...] = 5.0
    rig.write(4, 0.0)
    rig.driver.compute("copy 8 to 9", [8], [9], lambda: [layer[9].copy_(layer[8]) for layer in rig.kv])
    rig.step(loads=(job(1, [0], [4]),), stores=(job(2, [1], [9]),))
    rig.driver.run_all(random.Random(seed))
    rig.driver.check()
    assert (rig.kv[0][4] == 5.0).all()
    np.testing.assert_array_equal(rig.row(1)[0, 0], rig.kv[0][8].numpy())


def test_a_result_means_that_later_kernels_may_use_the_blocks() -> None:
    """No job is reported before its last copy has run, and what the host launches after the report is ordered."""
    rig = Rig()
    rig.step(loads=(job(1, [0], [3, 4]),))
    rig.driver.run(rig.driver.runnable()[0])
    while rig.driver.pending:
        assert rig.worker.take_transfer_results() == (set(), set())
        rig.driver.run(rig.driver.runnable()[0])
    assert rig.worker.take_transfer_results() == ({"req-1"}, set())
    rig.write(3, 1.0)
    rig.driver.check()


def test_a_kernel_before_the_result_is_noticed() -> None:
    """The fake itself: a kernel launched on a block whose load has run, but was not seen to have."""
    rig = Rig()
    rig.step(loads=(job(1, [0], [3]),))
    rig.driver.run_all()
    rig.write(3, 1.0)
    with pytest.raises(UnorderedAccess, match="write 3 and batch"):
        rig.driver.check()


def test_a_load_does_not_wait_for_stores() -> None:
    """The two directions are on streams of their own. One stream for both makes this fail (tried)."""
    rig = Rig()
    store_after_a_long_write(rig)
    write, *of_the_store = rig.driver.pending
    rig.step(loads=(job(2, [5], [40]),))
    rig.driver.run(write)
    while others := [op for op in rig.driver.runnable() if op not in of_the_store]:
        rig.driver.run(others[0])
    assert rig.worker.take_transfer_results()[0] == {"req-2"}
    rig.driver.run_all()
    rig.worker.take_transfer_results()
    assert set(rig.worker.build_report().acks) == {1, 2}


@pytest.mark.parametrize("seed", SEEDS)
def test_many_jobs_in_both_directions_in_any_order(seed: int) -> None:
    """Each result once, every byte right, nothing unordered, all buffers back."""
    order = random.Random(seed)
    rig = Rig()
    expected = [kv.clone() for kv in rig.kv]
    seen: dict[int, str | None] = {}
    for turn in range(40):
        first = turn % 8
        rig.submit(2 * turn, Direction.STORE, [first], [first, first + 8])
        rig.submit(2 * turn + 1, Direction.STORE, [first + 16], [first + 40])
        for _ in range(order.randrange(12)):
            if rig.driver.pending:
                rig.driver.run(order.choice(rig.driver.runnable()))
        seen |= ended(rig.engine.poll())
        if turn % 8 == 7:
            rig.driver.run_all(order)
            seen |= ended(rig.engine.poll())
    assert seen == dict.fromkeys(range(80))
    rig.driver.check()
    for row in range(8):
        np.testing.assert_array_equal(rig.row(row)[1, 1], expected[1][row + 8].numpy())
    assert all(torch.equal(kv, old) for kv, old in zip(rig.kv, expected, strict=True))
    assert rig.engine.wait(0)


# ---- the model's thread --------------------------------------------------------------------------------------------


def test_the_caller_launches_nothing() -> None:
    """Submit returns before anything was launched: a driver may block whoever launches, never the model's thread."""
    rig = Rig()
    for lane in rig.lanes:
        lane.keep = True
    rig.submit(1, Direction.STORE, [0], [1])
    assert rig.driver.pending == []
    assert not rig.engine.wait(0)
    rig.lanes[0].run_all()
    assert rig.device.launches == [("batch", 2)]
    assert rig.engine.poll() == []
    rig.driver.run_all()
    assert ended(rig.engine.poll()) == {1: None}


def test_an_event_of_another_kind_is_waited_for_on_the_lane() -> None:
    """Any event will do; an empty job ends too."""
    rig = Rig()
    rig.engine.submit(1, Direction.STORE, [rig.plan([0], [5])], CompletedEvent())
    rig.engine.submit(2, Direction.LOAD, [])
    rig.driver.run_all()
    results = rig.engine.poll()
    assert ended(results) == {1: None, 2: None}
    assert {r.job_id: r.num_bytes for r in results} == {1: BLOCK_BYTES, 2: 0}
    assert results[0].seconds == 1.0


# ---- descriptors ---------------------------------------------------------------------------------------------------


def test_buffers_are_used_again_and_not_too_early() -> None:
    """Jobs one after the other share one buffer, jobs in flight have one each. Giving a buffer back once its copies
    are launched makes the bytes wrong (tried: in `_launch`, behind `launch`)."""
    rig = Rig()
    for turn in range(5):
        rig.submit(turn, Direction.STORE, [0], [turn])
        assert rig.engine.wait(1)
    assert len(rig.device.buffers) == 1
    rig.engine.poll()
    for turn in range(3):
        rig.submit(turn, Direction.STORE, [turn], [turn + 10])
    assert len(rig.device.buffers) == 3
    rig.driver.run_all(random.Random(1))
    assert len(rig.engine.poll()) == 3
    for turn in range(3):
        np.testing.assert_array_equal(rig.row(turn)[0, 1], rig.kv[1][turn + 10].numpy())


def test_a_long_job_is_launched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device copies while the next descriptors are written; one result, all bytes."""
    monkeypatch.setattr(cuda, "LAUNCH_COPIES", 6)
    rig = Rig()
    rig.submit(1, Direction.STORE, [0, 1, 2, 3], [9, 1, 7, 3, 5, 2, 8])
    assert rig.device.launches == [("batch", 6), ("batch", 6), ("batch", 2)]
    rig.driver.run_all(random.Random(5))
    assert [(r.error, r.num_bytes) for r in rig.engine.poll()] == [(None, 7 * BLOCK_BYTES)]
    np.testing.assert_array_equal(rig.row(3)[0, 1], rig.kv[1][8].numpy())
    np.testing.assert_array_equal(rig.row(1)[1, 0], rig.kv[0][3].numpy())


def test_the_pool_keeps_few_of_a_size_and_rounds_up() -> None:
    """A burst does not pin memory for ever."""
    rig = Rig()
    pool = DescriptorPool(rig.device.descriptors)
    held = [pool.take(300) for _ in range(20)]
    assert {buffer.table.shape[1] for buffer in held} == {512}
    for buffer in held:
        pool.give_back(buffer)
    again = [pool.take(512) for _ in range(20)]
    assert len({id(buffer) for buffer in held} & {id(buffer) for buffer in again}) == 8


# ---- failures ------------------------------------------------------------------------------------------------------


def test_a_failed_launch_fails_its_job_alone_and_only_when_nothing_of_it_runs() -> None:
    """Case 42: half of the copies were launched before the driver refused. The job ends after them, once."""
    rig = Rig()
    rig.device.launch_errors = [DeviceError("invalid argument")]
    rig.submit(1, Direction.LOAD, [0, 1], [1, 2, 3, 4])
    rig.submit(2, Direction.LOAD, [2], [5])
    assert rig.engine.poll() == []
    assert not rig.engine.wait(0)
    rig.driver.run_all(random.Random(3))
    assert ended(rig.engine.poll()) == {1: "DeviceError: invalid argument", 2: None}
    assert rig.engine.wait(0)


def test_no_event_to_be_had_the_lane_waits_for_the_stream() -> None:
    """Case 42: the event behind a job's copies is refused; its thread drains the stream, and the job has failed."""
    rig = Rig()
    lane = rig.lanes[list(Direction).index(Direction.STORE)]
    lane.keep = True
    rig.submit(1, Direction.STORE, [0], [1])
    real = rig.device.record
    rig.device.record = lambda stream: real(stream) if not rig.device.launches else refuse()  # type: ignore[method-assign]

    def refuse() -> None:
        raise DeviceError("out of events")

    lane.run_all()
    assert not rig.driver.pending
    assert ended(rig.engine.poll()) == {1: "DeviceError: out of events"}


@pytest.mark.parametrize("how", ["on the lane", "at a query"])
def test_a_lost_device_ends_offloading_and_nothing_else(how: str) -> None:
    """Case 42: the worker half retires the engine, fails what was in flight, and answers for what comes later."""
    rig = Rig()
    if how == "on the lane":
        rig.device.record_errors = [DeviceError("lost"), DeviceError("lost")]
        rig.device.drain_errors = [DeviceError("lost")]
    rig.step(loads=(job(1, [0], [3]),), stores=(job(2, [1], [4]),))
    rig.device.lost = how == "at a query"
    assert rig.worker.take_transfer_results() == ({"req-1"}, {"req-1"})
    report = rig.worker.build_report()
    assert "the copy engine is broken" in (report.broken or "")
    assert all(ack.error for ack in report.acks.values())
    assert len(report.acks) == 2
    rig.step(loads=(job(3, [0], [3]),))
    assert rig.worker.take_transfer_results() == ({"req-3"}, {"req-3"})


def test_submit_that_raises_leaves_nothing() -> None:
    """Case 42: no thread to be had, an unknown group."""
    rig = Rig()

    def refuse(job: object) -> None:
        raise RuntimeError("can't start new thread")

    for lane in rig.lanes:
        lane.submit = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="new thread"):
        rig.submit(1, Direction.STORE, [0], [0])
    with pytest.raises(ValueError, match="KV group 3"):
        rig.engine.submit(2, Direction.LOAD, [CopyPlan(3, *[np.array([0])] * 3)])
    assert rig.engine.wait(0)
    assert rig.engine.poll() == []


def test_shutdown_fails_what_waits_and_keeps_rows_pinned_while_a_copy_runs() -> None:
    """A copy in flight may still read the rows: they are given back once it has ended, at the next shutdown."""
    rig = Rig()
    rig.submit(1, Direction.STORE, [0], [1])
    for lane in rig.lanes:
        lane.keep = True
    rig.submit(2, Direction.STORE, [1], [2])
    assert rig.engine.shutdown(0.0) is False
    assert list(ended(rig.engine.poll())) == [2]
    assert rig.device.registered
    with pytest.raises(DeviceError, match="shut down"):
        rig.submit(3, Direction.STORE, [2], [3])
    assert rig.engine.shutdown(1.0)
    assert not rig.device.registered
    assert ended(rig.engine.poll()) == {1: None}
    assert rig.engine.shutdown(1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_tensors_are_registered_again(seed: int) -> None:
    """What was in flight ends first; the former engine's threads are gone, and the rows are pinned anew behind it.

    Fails when the former engine is not shut down, or only when the new one is there.
    """
    rig = Rig()
    pinned = dict(rig.device.registered)
    store_after_a_long_write(rig)
    former, lanes = rig.engine, list(rig.lanes)
    rig.worker.attach([rig.layout], rig.slots)
    assert rig.engine is not former
    assert (rig.row(0)[0] == 7.0).all()
    assert rig.device.registered == pinned
    assert all(lane.closed for lane in lanes)
    rig.step(loads=(job(2, [0], [40]),))
    rig.driver.run_all(random.Random(seed))
    rig.driver.check()
    assert rig.worker.take_transfer_results() == ({"req-2"}, set())
    assert {job_id: ack.error for job_id, ack in rig.worker.build_report().acks.items()} == {1: None, 2: None}
    assert (rig.kv[0][40] == 7.0).all()


# ---- rows ----------------------------------------------------------------------------------------------------------


def test_rows_are_registered_in_pieces_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of every row once, and all of it given back."""
    monkeypatch.setattr(host_rows, "REGISTERED_AT_ONCE", 10_000)
    slots = np.zeros((10, 8192), np.uint8)[:, 100:8000]
    rig = Rig()
    rig.device.registered.clear()
    rows = host_rows.prepare_rows(slots, rig.device)
    pieces = sorted(rig.device.registered.items())
    assert pieces[0][0] <= slots.ctypes.data
    assert pieces[-1][0] + pieces[-1][1] >= slots.ctypes.data + 9 * 8192 + 7900
    assert all(start % 4096 == 0 and size <= 10_000 for start, size in pieces)
    assert all(a + size == b for (a, size), (b, _) in pairwise(pieces))
    rows.release()
    rows.release()
    assert not rig.device.registered


def test_a_refused_piece_rolls_back_and_copies_go_pageable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Registration fails at the third piece: none stays, it is said once with the setting, and bytes still arrive."""
    monkeypatch.setattr(host_rows, "REGISTERED_AT_ONCE", 4096)
    with caplog.at_level(logging.WARNING):
        rig = Rig(register_fails_at=1)
    assert not rig.device.registered
    assert [record for record in caplog.records if "cpu.capacity" in record.getMessage()] == caplog.records
    assert len(caplog.records) == 1
    assert "PAGEABLE" in rig.engine.describe()
    rig.submit(1, Direction.STORE, [0], [1])
    rig.driver.run_all()
    assert rig.device.launches == [("each", 2)]
    np.testing.assert_array_equal(rig.row(0)[0, 1], rig.kv[1][1].numpy())


def test_rows_go_to_the_node_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where it is known and all of a row is ours; binding comes before pinning, which would hold pages."""
    bound: list[tuple[int, int]] = []

    def bind(address: int, num_bytes: int, node: int) -> bool:
        assert not rig.device.registered
        bound.append((num_bytes, node))
        return True

    rig = Rig()
    rig.device.registered.clear()
    monkeypatch.setattr(host_rows, "bind_memory", bind)
    assert host_rows.prepare_rows(rig.slots, rig.device).node is None
    rig.device.node = 1
    rig.device.registered.clear()
    assert host_rows.prepare_rows(rig.slots, rig.device).node == 1
    rig.device.registered.clear()
    shared = np.zeros((4, 16384), np.uint8)[:, :8192]
    assert host_rows.prepare_rows(shared, rig.device).node is None
    assert [node for _, node in bound] == [1]


# ---- the choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "pinned", "used", "words"),
    [
        (ALL_METHODS, True, "batch", "loads of pieces below 28 KiB by a kernel, pinned rows"),
        (("op", "each", "torch"), True, "op", "vLLM's batched copy, pinned rows"),
        (("each", "torch"), True, "each", "one driver call a copy, pinned rows"),
        (("torch",), True, "torch", "one torch copy each, pinned rows"),
        (ALL_METHODS, False, "each", "one driver call a copy, PAGEABLE rows (slow)"),
        (("op", "torch"), False, "torch", "PAGEABLE"),
    ],
)
def test_the_best_method_that_is_there(there: tuple[str, ...], pinned: bool, used: str, words: str) -> None:
    """The kernel never touches rows that are not pinned: the device cannot read them."""
    rig = Rig(there)
    choice = device_choice(rig.device.methods([], rig.slots), pinned)
    assert choice.bulk.name == used
    assert (choice.kernel is not None) == (pinned and "kernel" in there)
    assert words in str(choice)


def test_small_loads_go_by_the_kernel_where_there_are_many() -> None:
    """By size, number and direction, and only whole words."""
    rig = Rig()
    rig.submit(1, Direction.LOAD, list(range(10)), list(range(20)))
    rig.submit(2, Direction.LOAD, [20], [40])
    rig.submit(3, Direction.STORE, list(range(10, 20)), list(range(20)))
    assert rig.device.launches == [("kernel", 40), ("batch", 2), ("batch", 40)]
    rig.driver.run_all(random.Random(0))
    assert set(ended(rig.engine.poll())) == {1, 2, 3}


def test_no_method_at_all_is_said_at_start() -> None:
    """Not at the first request."""
    with pytest.raises(DeviceError, match="no way was found"):
        Rig(())
