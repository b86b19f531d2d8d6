"""From disk to host memory to the device, with a fault on each leg (case 35): what failed never counts as loaded."""

import errno
import mmap
from collections.abc import Callable

import numpy as np
import pytest
import torch
from fs_kit import ROW, FaultyFiles, HandLane, content, fingerprint, inline_lanes, keys_of

from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import LookupResult, PreparedLoad, ReqContext
from vllm_tiered_offload.contract.messages import DeviceJob, GroupTransfer, RegionAnnouncement, StepMessage
from vllm_tiered_offload.hierarchy.manager import TieringOffloadingManager
from vllm_tiered_offload.testing.fakes.copy_driver import FakeCopyEngine, FakeDriver
from vllm_tiered_offload.testing.fakes.seams import ManualClock
from vllm_tiered_offload.tiers.cpu.tier import CpuTier, CpuTierSettings
from vllm_tiered_offload.tiers.fs.tier import FsTier
from vllm_tiered_offload.tiers.guard import GuardLimits, TierGuard
from vllm_tiered_offload.worker.layout import build_group_layout
from vllm_tiered_offload.worker.worker import OffloadingConnectorWorker

HIT, MISS = LookupResult.HIT, LookupResult.MISS
KEYS = keys_of("leg", 4)
BAD = 2  # position of the chunk that a fault meets
ROWS = 8
SENTINEL = 0xEE
FIRST, SECOND = ReqContext("first"), ReqContext("second")


class Region:
    """Rows of this process, full of the sentinel."""

    failed = False

    def __init__(self, geometry: RegionGeometry) -> None:
        self.geometry = geometry
        memory = mmap.mmap(-1, geometry.total_bytes)
        self.slots = np.frombuffer(memory, np.uint8).reshape(geometry.num_rows, geometry.row_bytes)
        self.slots[:] = SENTINEL

    def start(self, announcement: RegionAnnouncement) -> None:
        pass

    def take(self) -> "Region":
        return self

    def rows(self) -> list[memoryview]:
        return [memoryview(row) for row in self.slots]

    def close(self) -> None:
        pass


class Engine:
    """Primary tier, filesystem tier and a worker whose device blocks are full of the sentinel, too."""

    def __init__(self, root: object) -> None:
        self.files, self.read_lane, self.clock = FaultyFiles(), HandLane(), ManualClock()
        self.fs = FsTier.from_settings(
            {"root": str(root)},
            engine_id="engine",
            lanes=inline_lanes(read=self.read_lane),
            files=self.files,
            clock=self.clock,
        )
        geometry = RegionGeometry(ROWS, (ROW,), 1)
        self.region = Region(geometry)
        self.primary = CpuTier(CpuTierSettings(capacity=ROWS * ROW), strict=True)
        self.manager = TieringOffloadingManager(
            self.primary,
            [TierGuard(self.fs, "fs", GuardLimits(5.0, 100, 10.0), self.clock)],
            strict=True,
            clock=self.clock,
            region_access=self.region,  # type: ignore[arg-type]
        )
        self.manager.bind_region(geometry)
        self.manager.open_region(RegionAnnouncement(1, 1, 1, geometry, fingerprint()))
        self.manager.on_schedule_end()
        self.device = torch.full((ROWS, ROW), SENTINEL, dtype=torch.uint8)
        self.driver = FakeDriver()
        layout = build_group_layout(0, {"layer": self.device}, ROWS, 16)
        self.copies = FakeCopyEngine(self.driver, [layout], self.region.slots, 1)
        self.worker = OffloadingConnectorWorker(WorkerConfig(4096, 1), 0, lambda config, layouts, slots: self.copies)
        self.worker.attach([layout], self.region.slots)

    def store(self) -> None:
        self.manager.on_new_request(FIRST)
        prepared = self.manager.prepare_store(KEYS, FIRST)
        for key, row in zip(prepared.keys, prepared.block_ids, strict=True):
            self.region.slots[row] = np.frombuffer(content(key, ROW), np.uint8)
        self.manager.complete_store(prepared)
        self.manager.on_request_finished(FIRST)
        self.manager.on_schedule_end()

    def promote(self, run: Callable[[], None]) -> list[LookupResult]:
        """The answers once nothing is on its way any more; `run` lets the disk read."""
        self.manager.on_new_request(SECOND)
        for _ in range(6):
            answers = self.manager.lookup(KEYS, SECOND)
            self.manager.on_schedule_end()
            if set(answers) <= {HIT, MISS}:
                return answers
            run()
        raise AssertionError(f"no end: {answers}")

    def to_device(self, load: PreparedLoad) -> tuple[set[str], set[str]]:
        """Copy the rows of a load to the device blocks of the same positions: requests received, and failed."""
        blocks = list(range(len(load.keys)))
        self.worker.bind(StepMessage(loads=[DeviceJob(1, "second", [GroupTransfer(0, list(load.block_ids), blocks)])]))
        received: set[str] = set()
        failed: set[str] = set()
        for _ in range(4):
            self.worker.start_loads()
            self.driver.run_all()
            done, bad = self.worker.take_transfer_results()
            received, failed = received | done, failed | bad
            self.worker.unbind()
            self.worker.bind(StepMessage())
        return received, failed

    def on_device(self) -> list[bool]:
        """Which chunks the device holds."""
        return [bytes(self.device[i].numpy()) == content(key, ROW) for i, key in enumerate(KEYS)]


@pytest.fixture
def engine(tmp_path) -> Engine:
    """Has everything on disk and nothing in memory."""
    Engine(tmp_path).store()
    return Engine(tmp_path)


def path_of(engine: Engine, position: int) -> str:
    return engine.fs._holdings.namespace.file_path(KEYS[position])


def spoil(path: str, damage: Callable[[bytearray], object]) -> None:
    with open(path, "rb+") as file:
        data = bytearray(file.read())
        damage(data)
        file.seek(0)
        file.write(data)
        file.truncate()


DISK = {
    "not readable": lambda e, path: e.files.fail("open", errno.EIO, match=path),
    "too many files": lambda e, path: e.files.fail("open", errno.EMFILE, match=path),
    "gone since the lookup": lambda e, path: e.files.unlink(path),
    "short": lambda e, path: spoil(path, lambda data: data.__delitem__(slice(-1, None))),
    "one bit in the payload": lambda e, path: spoil(path, lambda data: data.__setitem__(-1, data[-1] ^ 1)),
    "one bit in the header": lambda e, path: spoil(path, lambda data: data.__setitem__(90, data[90] ^ 1)),
    "another chunk's": lambda e, path: spoil(
        path,
        lambda data: data.__setitem__(slice(None), open(path_of(e, 0), "rb").read()),  # noqa: SIM115
    ),
}


def test_nothing_fails(engine: Engine) -> None:
    """Guards the tests below: all four come from disk to the device, over the sentinel."""
    assert engine.promote(engine.read_lane.run_all) == [HIT] * 4
    load = engine.manager.prepare_load(KEYS, SECOND)
    assert load.keys == tuple(KEYS)
    assert engine.to_device(load) == ({"second"}, set())
    assert engine.on_device() == [True] * 4
    engine.manager.complete_load(load)
    engine.manager.on_request_finished(SECOND)


@pytest.mark.parametrize("fault", DISK)
def test_case_35_disk_to_memory(engine: Engine, fault: str) -> None:
    """The chunk is a miss, its neighbours are kept, and no row of the load holds a byte that nobody verified.

    Mutation: reporting every key of a job as successful hands out the sentinel, or half a file.
    """

    def fail_and_run() -> None:
        if engine.read_lane.jobs:
            DISK[fault](engine, path_of(engine, BAD))
            engine.read_lane.run_all()

    answers = engine.promote(fail_and_run)
    assert answers[BAD] is MISS
    assert [a for i, a in enumerate(answers) if i != BAD] == [HIT] * 3
    load = engine.manager.prepare_load(KEYS[:BAD], SECOND)
    assert load.keys == tuple(KEYS[:BAD])
    assert engine.manager.prepare_load(KEYS[BAD : BAD + 1], SECOND).keys == ()
    assert engine.to_device(load) == ({"second"}, set())
    assert engine.on_device() == [True, True, False, False]
    assert bool((engine.device[BAD:] == SENTINEL).all())
    engine.manager.complete_load(load)
    engine.manager.on_request_finished(SECOND)


def test_case_35_a_disk_that_does_not_answer(engine: Engine) -> None:
    """Missed at the deadline; the late read then hurts nobody."""

    def wait() -> None:
        engine.clock.advance(5.0)
        engine.manager.on_schedule_end()

    assert engine.promote(wait) == [MISS] * 4
    assert engine.manager.prepare_load(KEYS, SECOND).keys == ()
    prepared = engine.manager.prepare_store(keys_of("other", ROWS), SECOND)
    others = dict(zip(prepared.keys, prepared.block_ids, strict=True))
    for key, row in others.items():
        engine.region.slots[row] = np.frombuffer(content(key, ROW), np.uint8)
    assert 0 < len(others) < ROWS, "rows that the read may still write are nobody's"
    engine.read_lane.run_all()
    assert all(bytes(engine.region.slots[row]) == content(key, ROW) for key, row in others.items())
    engine.manager.complete_store(prepared)
    engine.manager.on_request_finished(SECOND)


@pytest.mark.parametrize("fault", ["submit", "poll", "result"])
def test_case_35_memory_to_device(engine: Engine, fault: str) -> None:
    """The receive fails, and the keys are misses before anybody asks again (D7).

    Mutation: completing a failed load without its failed keys promises the same rows to the next one.
    """
    assert engine.promote(engine.read_lane.run_all) == [HIT] * 4
    load = engine.manager.prepare_load(KEYS, SECOND)
    if fault == "submit":
        engine.copies.submit_errors.append(MemoryError("no staging memory"))
    elif fault == "poll":
        engine.copies.poll_errors.append(RuntimeError("device lost"))
    else:
        engine.copies.job_errors[1] = "copy failed"
    assert engine.to_device(load) == ({"second"}, {"second"})
    engine.manager.complete_load(load, load.keys)
    assert HIT not in engine.manager.lookup(KEYS, SECOND)
    assert engine.manager.prepare_load(KEYS, SECOND).keys == ()
    engine.manager.on_request_finished(SECOND)
