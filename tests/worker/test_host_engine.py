"""The host copy engine: each job ends once, loads overtake stores, failures stay with their job, bounded stop."""

import os
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.contract.messages import GroupTransfer
from vllm_tiered_offload.contract.seams import thread_executor
from vllm_tiered_offload.testing.fakes.seams import ManualClock, ManualExecutor
from vllm_tiered_offload.worker.copy_engines import host, host_copy
from vllm_tiered_offload.worker.copy_engines.affinity import copy_executor
from vllm_tiered_offload.worker.copy_engines.base import ComputeEvent, CopyResult, Direction
from vllm_tiered_offload.worker.copy_engines.host import HostCopyEngine, host_engine
from vllm_tiered_offload.worker.copy_plan import CopyPlan, PlanBounds, plan_transfer
from vllm_tiered_offload.worker.layout import build_group_layout

CHUNK, BLOCKS, ROWS, WIDTH = 2, 64, 32, 16
BLOCK_BYTES = 2 * WIDTH * 4  # two layers of float32


class Rig:
    """Two layers of 64 blocks, 32 rows of 2 blocks, and an engine whose copies run when the test says so."""

    def __init__(self, threads: int = 1, executor: Any = None) -> None:
        self.kv = [torch.arange(BLOCKS * WIDTH).view(BLOCKS, WIDTH) * 1.0 + 10_000 * layer for layer in range(2)]
        self.slots = np.zeros((ROWS, CHUNK * BLOCK_BYTES), np.uint8)
        self.layout = build_group_layout(0, {f"layer.{i}": t for i, t in enumerate(self.kv)}, BLOCKS, 16)
        self.executor: Any = executor or ManualExecutor()
        self.clock = ManualClock()
        self.engine = HostCopyEngine([self.layout], self.slots, CHUNK, threads, self.executor, self.clock)

    def plan(self, rows: list[int], blocks: list[int]) -> CopyPlan:
        return plan_transfer(GroupTransfer(0, rows, blocks), PlanBounds(CHUNK, ROWS, {0: BLOCKS}))

    def submit(self, job_id: int, direction: Direction, rows: list[int], blocks: list[int]) -> None:
        self.engine.submit(job_id, direction, [self.plan(rows, blocks)], self.engine.record_compute_event())

    def row(self, row: int) -> np.ndarray:
        """Row as float32, (block, layer, element)."""
        return self.slots[row].view(np.float32).reshape(CHUNK, 2, WIDTH)


@pytest.fixture
def one_block_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slice is one block, so that a job of n blocks takes n tasks."""
    monkeypatch.setattr(host_copy, "CALL_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(host_copy, "NUMPY_CALL_BYTES", BLOCK_BYTES)


def ids(results: list[CopyResult]) -> list[int]:
    return [result.job_id for result in results]


def test_bytes_arrive_and_each_job_ends_once() -> None:
    """A store, then a load of it elsewhere; a job without blocks ends too."""
    rig = Rig()
    rig.submit(1, Direction.STORE, [7, 3], [10, 11, 12])
    assert rig.engine.poll() == []
    assert not rig.engine.wait(0)
    rig.executor.run_all()
    assert [(r.job_id, r.error, r.num_bytes) for r in rig.engine.poll()] == [(1, None, 3 * BLOCK_BYTES)]
    np.testing.assert_array_equal(rig.row(7)[1, 1], rig.kv[1][11].numpy())
    assert not rig.row(3)[1].any()
    rig.submit(2, Direction.LOAD, [7], [40, 41])
    rig.engine.submit(3, Direction.LOAD, [])
    rig.executor.run_all()
    assert sorted(ids(rig.engine.poll())) == [2, 3]
    assert torch.equal(rig.kv[0][41], rig.kv[0][11])
    assert rig.engine.poll() == []
    assert rig.engine.wait(0)


@pytest.mark.usefixtures("one_block_slices")
def test_a_load_overtakes_queued_and_running_stores() -> None:
    """One slice of the long store has been copied when a load arrives: the load is next, the store goes on after it."""
    rig = Rig()
    rig.submit(1, Direction.STORE, list(range(4)), list(range(8)))
    rig.submit(2, Direction.STORE, [9], [30])
    rig.executor.run_next()
    rig.submit(3, Direction.LOAD, [20], [60, 61])
    rig.executor.run_next()
    rig.executor.run_next()
    assert ids(rig.engine.poll()) == [3]
    while rig.executor.jobs:
        rig.executor.run_next()
    assert ids(rig.engine.poll()) == [1, 2]


@pytest.mark.usefixtures("one_block_slices")
def test_a_failed_slice_fails_its_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 42: the job ends once, with the first error, and drops its other slices; its neighbours are untouched."""
    rig = Rig()
    copier = rig.engine._copiers[0]
    real = copier.copy

    def fail_on_block_2(direction: Direction, plan: CopyPlan, start: int, stop: int) -> int:
        if 2 in plan.device_blocks[start:stop]:
            raise OSError("bus error")
        return real(direction, plan, start, stop)

    monkeypatch.setattr(copier, "copy", fail_on_block_2)
    rig.submit(1, Direction.STORE, [0, 1, 2], [0, 1, 2, 3, 4])
    rig.submit(2, Direction.STORE, [3], [6])
    while rig.executor.jobs:
        rig.executor.run_next()
    results = rig.engine.poll()
    assert [(r.job_id, r.error) for r in results] == [(1, "OSError: bus error"), (2, None)]
    assert results[0].num_bytes == 2 * BLOCK_BYTES
    assert not rig.row(2).any()
    assert rig.engine.wait(0)


def test_submit_that_raises_leaves_nothing() -> None:
    """Case 42: an executor that takes no task, an unknown group: submit raises, and the job is in no poll."""
    rig = Rig()

    def refuse(job: object) -> None:
        raise RuntimeError("can't start new thread")

    rig.executor.submit = refuse
    with pytest.raises(RuntimeError, match="new thread"):
        rig.submit(1, Direction.STORE, [0], [0])
    with pytest.raises(ValueError, match="KV group 3"):
        rig.engine.submit(2, Direction.LOAD, [CopyPlan(3, *[np.array([0])] * 3)])
    assert rig.engine.wait(0)
    assert rig.engine.poll() == []


def test_copies_wait_for_their_event() -> None:
    """Case 30 on the host engine: the copy starts after the event it was given. Copying first makes this fail."""
    rig = Rig()

    class WritesThenCompletes(ComputeEvent):
        def is_complete(self) -> bool:
            return False

        def synchronize(self) -> None:
            rig.kv[0][5] = -1.0

    rig.engine.submit(1, Direction.STORE, [rig.plan([0], [5])], WritesThenCompletes())
    rig.executor.run_all()
    assert (rig.row(0)[0, 0] == -1.0).all()


@pytest.mark.usefixtures("one_block_slices")
def test_shutdown_ends_queued_jobs_and_waits_for_no_one() -> None:
    """A job half done and one not begun end as failed, exactly once; nothing is submitted afterwards."""
    rig = Rig()
    rig.submit(1, Direction.STORE, [0, 1], [0, 1, 2])
    rig.submit(2, Direction.LOAD, [5], [9])
    rig.executor.run_next()
    assert rig.engine.shutdown(0.0)
    assert {r.job_id: r.error is None for r in rig.engine.poll()} == {1: False, 2: True}
    assert rig.engine.shutdown(0.0)
    assert rig.engine.poll() == []
    with pytest.raises(RuntimeError, match="shut down"):
        rig.submit(3, Direction.STORE, [0], [0])


def test_shutdown_is_bounded_while_a_copy_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that does not return: shutdown says False after its time-out, and the late end is still reported."""
    rig = Rig(executor=thread_executor(1, "test-copy"))
    entered, leave = threading.Event(), threading.Event()
    copier = rig.engine._copiers[0]
    real = copier.copy

    def hang(*args: Any) -> int:
        entered.set()
        assert leave.wait(20)
        return real(*args)

    monkeypatch.setattr(copier, "copy", hang)
    rig.submit(1, Direction.LOAD, [0], [0])
    rig.submit(2, Direction.LOAD, [1], [2])
    assert entered.wait(20)
    began = time.monotonic()
    assert rig.engine.shutdown(0.05) is False
    assert time.monotonic() - began < 5
    assert ids(rig.engine.poll()) == [2]
    leave.set()
    assert rig.engine.wait(20)
    assert [(r.job_id, r.error) for r in rig.engine.poll()] == [(1, None)]


@pytest.mark.usefixtures("one_block_slices")
def test_a_job_ends_with_its_last_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads copy the two slices of a job; the later slice ends first: no result yet, then exactly one."""
    rig = Rig(threads=2)
    copier = rig.engine._copiers[0]
    real = copier.copy
    seen_inside: list[int] = []

    def let_the_other_thread_go_first(direction: Direction, plan: CopyPlan, start: int, stop: int) -> int:
        if start == 0:
            rig.executor.run_next()
            seen_inside.extend(ids(rig.engine.poll()))
            assert not rig.engine.wait(0)
        return real(direction, plan, start, stop)

    monkeypatch.setattr(copier, "copy", let_the_other_thread_go_first)
    rig.submit(1, Direction.STORE, [0], [0, 1])
    assert len(rig.executor.jobs) == 2
    rig.executor.run_next()
    assert (seen_inside, ids(rig.engine.poll())) == ([], [1])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.usefixtures("one_block_slices")
def test_threads_lose_and_double_nothing(threads: int) -> None:
    """Many jobs of several slices, polled while they run: each result once, every byte right."""
    rig = Rig(threads, thread_executor(threads, "test-copy"))
    expected = [kv.clone() for kv in rig.kv]
    seen: list[int] = []
    for turn in range(60):
        first = turn % 8
        rig.submit(2 * turn, Direction.STORE, [first, first + 8], [first, first + 8, first + 16])
        rig.engine.submit(2 * turn + 1, Direction.STORE, [rig.plan([16 + first], [40 + first])])
        if turn % 8 == 7:
            assert rig.engine.wait(20)
        seen += ids(rig.engine.poll())
    assert rig.engine.wait(20)
    seen += ids(rig.engine.poll())
    assert sorted(seen) == list(range(120))
    for block in range(8):
        np.testing.assert_array_equal(rig.row(block + 8)[0, 1], expected[1][block + 16].numpy())
    assert all(torch.equal(kv, old) for kv, old in zip(rig.kv, expected, strict=True))
    assert rig.engine.shutdown(5)


def test_seconds_are_copy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in the queue does not count, or a bandwidth computed from it is wrong."""
    rig = Rig()
    rig.submit(1, Direction.STORE, [0], [0])
    rig.clock.advance(100)
    copier = rig.engine._copiers[0]
    real = copier.copy

    def slow(*args: Any) -> int:
        rig.clock.advance(2)
        return real(*args)

    monkeypatch.setattr(copier, "copy", slow)
    rig.executor.run_all()
    assert rig.engine.poll()[0].seconds == 2


def test_large_rows_are_copied_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one-pass path: calls end at row borders, bytes are the same."""
    monkeypatch.setattr(host_copy, "WHOLE_ROW_BYTES", 1)
    monkeypatch.setattr(host, "host_way", lambda: (None, "numpy"))
    rig = Rig()
    plan = rig.plan([4, 1], [3, 9, 2])
    copier = rig.engine._copiers[0]
    assert [copier.end_of_call(plan, start) for start in (0, 1, 2)] == [2, 2, 3]
    rig.engine.submit(1, Direction.STORE, [plan])
    while rig.executor.jobs:
        rig.executor.run_next()
    np.testing.assert_array_equal(rig.row(4)[1, 0], rig.kv[0][9].numpy())
    np.testing.assert_array_equal(rig.row(1)[0, 1], rig.kv[1][2].numpy())


def test_blocks_of_a_row_in_any_order() -> None:
    """The one-pass path is taken only for blocks that follow each other in the row."""
    rig = Rig()
    plan = CopyPlan(0, np.array([4, 4]), np.array([1, 0]), np.array([3, 9]))
    rig.engine.submit(1, Direction.STORE, [plan])
    rig.executor.run_all()
    np.testing.assert_array_equal(rig.row(4)[:, 0, 0], rig.kv[0][[9, 3], 0].numpy())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_copy_threads_leave_the_core_of_the_model_thread() -> None:
    """vLLM's CPU backend has bound the thread that makes the engine to one core: copy threads may use the others."""
    allowed = os.sched_getaffinity(0)
    masks: list[set[int]] = []
    done = threading.Event()

    def note_mask() -> None:
        masks.append(os.sched_getaffinity(0))
        done.set()

    executor = copy_executor(1)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        executor.submit(note_mask)
        assert done.wait(20)
        assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)
        executor.shutdown()
    assert masks == [os.sched_getaffinity(os.getppid()) | {min(allowed)}]


def test_factory_and_bad_settings() -> None:
    """The factory the connector uses; an error text names the setting."""
    rig = Rig()
    engine = host_engine(
        WorkerConfig(capacity=1 << 20, blocks_per_chunk=CHUNK, copy_threads=2), [rig.layout], rig.slots
    )
    assert engine.record_compute_event().is_complete()
    assert engine.describe().startswith("host, 2 thread(s), ")
    assert engine.shutdown(1)
    with pytest.raises(ValueError, match=r"cpu\.copy_threads"):
        HostCopyEngine([], rig.slots, CHUNK, threads=0)
