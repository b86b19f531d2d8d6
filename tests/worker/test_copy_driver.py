"""The fake device notices unordered accesses in both directions (case 30), driven through the worker half."""

import random

import numpy as np
import pytest
import torch

from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.contract.messages import DeviceJob, GroupTransfer, StepMessage
from vllm_tiered_offload.testing.fakes.copy_driver import FakeCopyEngine, FakeDriver, UnorderedAccess
from vllm_tiered_offload.worker.copy_engines.base import Direction
from vllm_tiered_offload.worker.layout import build_group_layout
from vllm_tiered_offload.worker.worker import OffloadingConnectorWorker

BLOCKS, ROWS, CHUNK = 8, 4, 2


class Device:
    """A worker half over the fake device: 8 blocks of 4 floats, 4 rows of 2 blocks."""

    def __init__(self, ignore_events: tuple[Direction, ...] = ()) -> None:
        self.kv = torch.zeros(BLOCKS, 4)
        self.slots = np.zeros((ROWS, CHUNK * 16), np.uint8)
        self.driver = FakeDriver()
        layout = build_group_layout(0, {"x": self.kv}, BLOCKS, 16)
        self.worker = OffloadingConnectorWorker(
            WorkerConfig(capacity=4096, blocks_per_chunk=CHUNK),
            0,
            lambda config, layouts, slots: FakeCopyEngine(self.driver, layouts, slots, CHUNK, ignore_events),
        )
        self.worker.attach([layout], self.slots)

    def write(self, block: int, value: float) -> None:
        self.driver.compute(f"write {block}", writes=[block], action=lambda: self.kv[block].fill_(value))

    def read(self, block: int, into: list[float]) -> None:
        self.driver.compute(f"read {block}", reads=[block], action=lambda: into.append(float(self.kv[block, 0])))

    def row(self, row: int) -> list[float]:
        return self.slots[row].view(np.float32)[::4].tolist()


def job(job_id: int, rows: list[int], blocks: list[int]) -> DeviceJob:
    return DeviceJob(job_id, f"req-{job_id}", [GroupTransfer(0, rows, blocks)])


def store_after_a_long_write(device: Device) -> None:
    """The kernel that writes block 3 has been launched, not run, when the store is submitted."""
    device.worker.bind(StepMessage(stores=[job(1, [0], [3])]))
    device.write(3, 7.0)
    device.worker.submit_stores()


def load_after_a_long_read(device: Device, got: list[float]) -> None:
    """A kernel of an earlier request still reads block 3 when a load into it is submitted."""
    device.slots[0] = np.full(CHUNK * 4, 9.0, np.float32).view(np.uint8)
    device.kv[3] = 1.0
    device.read(3, got)
    device.worker.bind(StepMessage(loads=[job(1, [0], [3])]))
    device.worker.start_loads()


@pytest.mark.parametrize("seed", range(10))
def test_store_reads_what_the_kernel_wrote(seed: int) -> None:
    """Case 30, store after the writer: in every order the device may choose, the row has the new bytes."""
    device = Device()
    store_after_a_long_write(device)
    device.driver.run_all(random.Random(seed))
    device.driver.check()
    assert device.row(0)[0] == 7.0


@pytest.mark.parametrize("seed", range(10))
def test_load_leaves_earlier_readers_alone(seed: int) -> None:
    """Case 30, load after earlier readers."""
    device = Device()
    got: list[float] = []
    load_after_a_long_read(device, got)
    device.driver.run_all(random.Random(seed))
    device.driver.check()
    assert (got, float(device.kv[3, 0])) == ([1.0], 9.0)


def test_store_without_its_event_is_noticed() -> None:
    """Case 30, mutation: the store forgets the event. Noticed even when the operations happen to run in order."""
    device = Device(ignore_events=(Direction.STORE,))
    store_after_a_long_write(device)
    device.driver.run_all()
    assert device.row(0)[0] == 7.0
    with pytest.raises(UnorderedAccess, match=r"store 1 and write 3 both touch \('block', 3\)"):
        device.driver.check()


def test_load_without_its_event_is_noticed() -> None:
    """Case 30, mutation: the load forgets the event."""
    device = Device(ignore_events=(Direction.LOAD,))
    load_after_a_long_read(device, [])
    device.driver.run_all()
    with pytest.raises(UnorderedAccess, match=r"load 1 and read 3 both touch \('block', 3\)"):
        device.driver.check()


def test_store_submitted_before_the_forward_pass_is_noticed() -> None:
    """Rule of the worker half: stores go after the forward pass was launched. The other way is a violation."""
    device = Device()
    device.worker.bind(StepMessage(stores=[job(1, [0], [3])]))
    device.worker.submit_stores()
    device.write(3, 7.0)
    with pytest.raises(UnorderedAccess, match="write 3 and store 1"):
        device.driver.check()


def test_reuse_of_a_block_before_its_store_was_polled_is_noticed() -> None:
    """D2: an unpinned block is overwritten while its store is pending, and may be after the result has been polled."""
    for polled in (False, True):
        device = Device()
        store_after_a_long_write(device)
        device.driver.run_all()
        if polled:
            device.worker.take_transfer_results()
            assert list(device.worker.build_report().acks) == [1]
        device.write(3, 8.0)
        assert bool(device.driver.violations) is not polled


def test_unordered_copies_of_one_row_are_noticed() -> None:
    """D4: a row is loaded while the store that fills it has not ended."""
    device = Device()
    store_after_a_long_write(device)
    device.worker.bind(StepMessage(loads=[job(2, [0], [5])]))
    device.worker.start_loads()
    with pytest.raises(UnorderedAccess, match="load 2 and store 1"):
        device.driver.check()


def test_order_reaches_through_other_operations() -> None:
    """Arrows are transitive, observed operations are ordered before all later ones, readers do not exclude readers."""
    driver = FakeDriver()
    first = driver.launch("a", "first", writes=["x"])
    second = driver.launch("b", "second", waits=[first])
    third = driver.launch("c", "third", reads=["x"], waits=[second])
    fourth = driver.launch("d", "fourth", reads=["x"], waits=[first])
    driver.check()
    with pytest.raises(RuntimeError, match="third has to wait for first, second"):
        driver.run(third)
    driver.launch("e", "lonely", writes=["x"], waits=[third])
    with pytest.raises(UnorderedAccess, match="lonely and fourth"):
        driver.check()
    driver.violations.clear()
    with pytest.raises(RuntimeError, match="has not run"):
        driver.observe(fourth)
    driver.run_all()
    for op in (third, fourth):
        driver.observe(op)
    driver.launch("f", "late", reads=["x"])
    with pytest.raises(UnorderedAccess, match="late and lonely"):
        driver.check()
