"""What ci/gpu_check.sh runs; see there.

Each check is a function that raises on the first wrong byte. Expected bytes come from the host copier over host copies
of the same memories, which the test-suite proves; so a check compares every byte of the KV cache and of the region, the
ones that must not change included.

Bandwidth: a job moves up to 1 GiB as fragments in random order, timed from submit until the poll that reports it,
against one copy of as many bytes between pinned and device memory in the same turn; medians of the turns' ratios.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

from _output import log, table

from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.messages import DeviceJob, GroupTransfer, StepMessage
from vllm_tiered_offload.region import HostRegion
from vllm_tiered_offload.worker.copy_engines import host_rows
from vllm_tiered_offload.worker.copy_engines.base import Direction
from vllm_tiered_offload.worker.copy_engines.choice import KERNEL, DeviceChoice
from vllm_tiered_offload.worker.copy_engines.cuda import CudaCopyEngine
from vllm_tiered_offload.worker.copy_engines.device import CopyDevice, CopyMethod, Descriptors, DeviceError, DeviceEvent
from vllm_tiered_offload.worker.copy_engines.host_copy import HostGroupCopier
from vllm_tiered_offload.worker.copy_engines.torch_device import TorchDevice
from vllm_tiered_offload.worker.copy_plan import CopyPlan
from vllm_tiered_offload.worker.layout import GroupLayout, build_group_layout
from vllm_tiered_offload.worker.worker import OffloadingConnectorWorker

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB]
LEAST_OF_ONE_COPY = {32 * KIB: 0.8, 64 * KIB: 0.8, 256 * KIB: 0.95, MIB: 0.95, 8 * MIB: 0.95}
LAYERS = 4
WAIT = 60.0

Layers = dict[str, torch.Tensor]


@dataclass
class Target:
    """The device that is checked, and what the checks ask of it beside copies."""

    device: CopyDevice
    on: torch.device
    dry: bool
    job_bytes: int
    turns: int
    iterations: int
    sizes: list[int] = field(default_factory=lambda: SIZES)
    chunks: tuple[int, ...] = (1, 3)
    next_job: int = 0
    found: dict[str, Any] = field(default_factory=dict)

    def long_kernel(self) -> None:
        """Keep the compute stream busy for a millisecond or so."""
        if not self.dry:
            torch.cuda._sleep(2_000_000)

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def bytes_on_device(self, count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count,), dtype=torch.uint8, device=self.on)


class Rig:
    """A KV group on the device, a real region, and the engine between them."""

    def __init__(self, target: Target, layers: Layers, num_blocks: int, chunk: int, rows: int) -> None:
        self.target = target
        self.layout = build_group_layout(0, layers, num_blocks, 16)
        self.chunk = chunk
        self.region = HostRegion.create(RegionGeometry(rows, (chunk * self.layout.block_bytes,), chunk), populate=True)
        self.slots = self.region.rank_view(0)
        self.engine = CudaCopyEngine([self.layout], self.slots, chunk, target.device)

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        stopped = self.engine.shutdown(WAIT)
        del self.engine, self.slots
        if stopped:
            self.region.close()

    def choices(self) -> dict[str, DeviceChoice]:
        """Each method by itself. The kernel would end the process at rows that are not pinned."""
        pinned = self.engine._choice.pinned
        methods = self.target.device.methods([self.layout], self.slots)
        return {
            name: DeviceChoice(method, None, pinned) for name, method in methods.items() if pinned or name != KERNEL
        }

    def submit(self, direction: Direction, plan: CopyPlan, ordered: bool = True) -> int:
        self.target.next_job += 1
        after = self.engine.record_compute_event() if ordered else None
        self.engine.submit(self.target.next_job, direction, [plan], after)
        return self.target.next_job

    def finish(self) -> dict[int, str | None]:
        assert self.engine.wait(WAIT), "copies did not end"
        return {result.job_id: result.error for result in self.engine.poll()}

    def move(self, direction: Direction, plan: CopyPlan, ordered: bool = True) -> None:
        job = self.submit(direction, plan, ordered)
        ended = self.finish()
        assert ended == {job: None}, f"job {job} ended as {ended}"


def random_plan(rig: Rig, blocks: int, rng: np.random.Generator) -> CopyPlan:
    """`blocks` random device blocks and as many places in random rows; the last row may be filled in part."""
    position = np.arange(blocks)
    rows = rng.permutation(len(rig.slots))[: -(-blocks // rig.chunk)]
    device_blocks = rng.permutation(rig.layout.num_blocks)[:blocks]
    return CopyPlan(0, rows[position // rig.chunk], position % rig.chunk, device_blocks)


# ---- bytes ---------------------------------------------------------------------------------------------------------


def layouts(target: Target) -> dict[str, tuple[Callable[[], Layers], int]]:
    """name -> (layers whose storages hold random bytes, blocks)"""
    blocks = 48

    def dense(page: int, count: int = 5) -> Layers:
        return {f"layer.{i}": target.bytes_on_device(blocks * page).view(blocks, page) for i in range(count)}

    def interleaved() -> Layers:
        storage = target.bytes_on_device(blocks * 3 * 5120).view(blocks, 3, 5120)
        return {f"layer.{i}": storage[:, i, :5000] for i in range(3)}

    def heads_outside() -> Layers:
        """(2, heads, blocks, ...) in memory, blocks first as vLLM shows it."""
        storage = target.bytes_on_device(2 * 4 * blocks * 2048).view(2, 4, blocks, 2048)
        return {"layer.0": storage.permute(2, 0, 1, 3)}

    def mixed() -> Layers:
        return {**dense(4096, 2), "latent": target.bytes_on_device(blocks * 1152).view(blocks, 1152)}

    def small_kernel_blocks() -> Layers:
        return {"layer.0": target.bytes_on_device(blocks * 4 * 640).view(blocks * 4, 640)}

    return {
        "dense, 16 KiB pages": (lambda: dense(16384), blocks),
        "dense, 24 KiB pages": (lambda: dense(24576), blocks),
        "dense, odd pages": (lambda: dense(1237), blocks),
        "layers interleaved, padded": (interleaved, blocks),
        "heads outside of blocks": (heads_outside, blocks),
        "pages of several sizes": (mixed, blocks),
        "kernel blocks of a quarter": (small_kernel_blocks, blocks),
        "one page a block": (lambda: dense(131072, 1), blocks),
    }


def check_round_trips(target: Target) -> None:
    rng = np.random.default_rng(0)
    count = 0
    for name, (make, blocks) in layouts(target).items():
        for chunk in target.chunks:
            layers = make()
            with Rig(target, layers, blocks, chunk, rows=40) as rig:
                for method_name, choice in {"chosen": rig.engine._choice, **rig.choices()}.items():
                    if method_name == KERNEL and not in_words(rig.layout):
                        continue
                    rig.engine._choice = choice
                    try:
                        round_trip(rig, layers, rng)
                    except Exception as error:
                        raise AssertionError(f"{name}, chunks of {chunk}, by {method_name}: {error}") from error
                    count += 1
    log(f"  {count} round trips, every byte of KV cache and region compared")
    target.found["round_trips"] = count


def round_trip(rig: Rig, layers: Layers, rng: np.random.Generator) -> None:
    """Store, compare; load into other blocks, compare."""
    plan = random_plan(rig, int(rng.integers(1, 30)), rng)
    elsewhere = CopyPlan(0, plan.rows, plan.sub_blocks, rng.permutation(rig.layout.num_blocks)[: plan.num_blocks])
    mirror = Mirror(rig, layers)
    for direction, moved in ((Direction.STORE, plan), (Direction.LOAD, elsewhere)):
        mirror.copier.copy(direction, moved, 0, moved.num_blocks)
        rig.move(direction, moved)
        rig.target.synchronize()
        mirror.compare(rig, layers)


def in_words(layout: GroupLayout) -> bool:
    """Whether every copy is in words of 8 bytes, as the kernel needs them."""
    return not (layout.piece_bytes % 8 or ((layout.piece_address | layout.piece_stride) & 7).any())


class Mirror:
    """The same memories on the host, and the host copier between them."""

    def __init__(self, rig: Rig, layers: Layers) -> None:
        rig.target.synchronize()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in layers.values()}
        copies = {at: bytes_of(storage).cpu().clone() for at, storage in storages.items()}
        twins = {
            name: torch.as_strided(
                copies[t.untyped_storage().data_ptr()], t.shape, t.stride(), t.storage_offset()
            )
            for name, t in layers.items()
        }  # fmt: skip
        self.rows = rig.slots.copy()
        self.copies = copies
        layout = build_group_layout(0, twins, rig.layout.num_blocks, 16)
        self.copier = HostGroupCopier(layout, self.rows, rig.chunk)

    def compare(self, rig: Rig, layers: Layers) -> None:
        if not np.array_equal(self.rows, rig.slots):
            raise AssertionError("bytes of the region are wrong")
        for tensor in layers.values():
            storage = tensor.untyped_storage()
            if not torch.equal(bytes_of(storage).cpu(), self.copies[storage.data_ptr()]):
                raise AssertionError("bytes of the KV cache are wrong")


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# ---- order ---------------------------------------------------------------------------------------------------------


def check_order(target: Target) -> None:
    """Case 30 on the device. Without the event the same scenes must go wrong, or they prove nothing."""
    kv = torch.zeros(8, 4 * KIB, dtype=torch.uint8, device=target.on)
    with Rig(target, {"x": kv}, 8, 1, rows=8) as rig:
        for scene in (store_behind_a_writer, load_behind_a_reader):
            for i in range(target.iterations):
                assert scene(rig, kv, i, ordered=True), f"{scene.__name__}, iteration {i}: wrong bytes"
            broken = sum(not scene(rig, kv, i, ordered=False) for i in range(10))
            log(f"  {scene.__name__}: {target.iterations} times right; without its event {broken} of 10 times wrong")
            assert broken or target.dry, f"{scene.__name__} goes right without its event too: it proves nothing"
    target.found["order_iterations"] = target.iterations


def store_behind_a_writer(rig: Rig, kv: torch.Tensor, i: int, ordered: bool) -> bool:
    block, value = i % 8, 1 + i % 250
    kv[block] = 0
    rig.target.synchronize()
    rig.target.long_kernel()
    kv[block] = value
    rig.move(Direction.STORE, one_block(row=(i * 3) % 8, block=block), ordered)
    right = bool((rig.slots[(i * 3) % 8] == value).all())
    rig.target.synchronize()
    return right


def load_behind_a_reader(rig: Rig, kv: torch.Tensor, i: int, ordered: bool) -> bool:
    block, row, value = i % 8, (i * 5) % 8, 1 + i % 250
    kv[block] = 0
    rig.slots[row] = value
    rig.target.synchronize()
    rig.target.long_kernel()
    read = kv[block].clone()
    rig.move(Direction.LOAD, one_block(row, block), ordered)
    rig.target.synchronize()
    return bool((read == 0).all()) and bool((kv[block] == value).all())


def one_block(row: int, block: int) -> CopyPlan:
    return CopyPlan(0, np.array([row]), np.array([0]), np.array([block]))


def check_both_ways_at_once(target: Target) -> None:
    """Loads and stores of different blocks and rows in flight together, beside kernels on other blocks."""
    rng = np.random.default_rng(1)
    blocks, half = 128, 64
    layers = {f"layer.{i}": target.bytes_on_device(blocks * 16384).view(blocks, 16384) for i in range(LAYERS)}
    busy = torch.ones(1 << 20, device=target.on)
    with Rig(target, layers, blocks, 1, rows=blocks) as rig:
        rig.slots[:] = rng.integers(0, 256, rig.slots.shape, np.uint8)
        mirror = Mirror(rig, layers)
        for _ in range(5):
            rows, ids = rng.permutation(blocks), rng.permutation(blocks)
            jobs = []
            for first in range(0, half, 8):
                for direction, offset in ((Direction.STORE, 0), (Direction.LOAD, half)):
                    part = slice(offset + first, offset + first + 8)
                    plan = CopyPlan(0, rows[part], np.zeros(8, np.int64), ids[part])
                    mirror.copier.copy(direction, plan, 0, 8)
                    busy = busy * 1.0001
                    jobs.append(rig.submit(direction, plan))
            assert rig.finish() == dict.fromkeys(jobs)
            target.synchronize()
            mirror.compare(rig, layers)
    target.found["both_ways"] = "right"


# ---- failures ------------------------------------------------------------------------------------------------------


def check_failures(target: Target) -> None:
    layers = {"x": target.bytes_on_device(64 * 8192).view(64, 8192)}
    with Rig(target, layers, 64, 1, rows=64) as rig:
        a_refused_copy_fails_its_job_alone(rig, layers)
    pageable_rows_still_carry_the_right_bytes(target, layers)
    queued_jobs_fail_at_shutdown(target, layers)
    if not target.dry:
        a_lost_device_is_answered_for()
    target.found["failures"] = "as they should be"


def a_refused_copy_fails_its_job_alone(rig: Rig, layers: Layers) -> None:
    """Batches are refused on the stream 0, which nothing sticks to. A wild address would not do: the driver takes what
    it does not know for host memory, and writes there."""
    chosen = rig.engine._choice

    class Refused(CopyMethod):
        name = chosen.bulk.name

        def launch(self, descriptors: Descriptors, stream: Any) -> None:  # noqa: ARG002
            if self.name == "batch" and not rig.target.dry:
                chosen.bulk.launch(descriptors, NoStream())
            raise DeviceError("refused by the check")

    rig.engine._choice = DeviceChoice(Refused(), None, chosen.pinned)
    job = rig.submit(Direction.STORE, one_block(0, 0))
    ended = rig.finish()
    assert ended[job], "a copy that was refused is reported as done"
    log(f"  a refused copy: {ended[job]}")
    rig.engine._choice = chosen
    round_trip(rig, layers, np.random.default_rng(2))


class NoStream:
    cuda_stream = 0


def pageable_rows_still_carry_the_right_bytes(target: Target, layers: Layers) -> None:
    real, calls = target.device.register, []

    def refuse_the_second(address: int, num_bytes: int) -> None:
        calls.append(address)
        if len(calls) == 2:
            raise DeviceError("refused by the check")
        real(address, num_bytes)

    with (
        mock.patch.object(target.device, "register", refuse_the_second),
        mock.patch.object(host_rows, "REGISTERED_AT_ONCE", 8 * 8192),
        Rig(target, layers, 64, 1, rows=64) as rig,
    ):
        assert not rig.engine._choice.pinned
        round_trip(rig, layers, np.random.default_rng(3))
        log(f"  a refused registration: {rig.engine.describe()}")


def queued_jobs_fail_at_shutdown(target: Target, layers: Layers) -> None:
    with Rig(target, layers, 64, 1, rows=64) as rig:
        jobs = []
        for i in range(50):
            target.long_kernel()
            jobs.append(rig.submit(Direction.STORE, one_block(i, i)))
        assert rig.engine.shutdown(WAIT)
        ended = [result.job_id for result in rig.engine.poll()]
        assert sorted(ended) == jobs, "a job ended twice or not at all"


def a_lost_device_is_answered_for() -> None:
    """In a process of its own, because the device is lost to it: a kernel writes where nothing is."""
    done = subprocess.run(
        [sys.executable, __file__, "--lose-the-device"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, (
        f"the process that lost its device ended with {done.returncode}:\n{done.stderr[-3000:]}"
    )
    log(f"  a lost device: {done.stdout.strip().splitlines()[-1]}")


def lose_the_device() -> NoReturn:
    kv = torch.zeros(8, 4096, dtype=torch.uint8, device="cuda")
    device = TorchDevice(kv.device)
    layout = build_group_layout(0, {"x": kv}, 8, 16)
    slots = np.zeros((8, 4096), np.uint8)
    worker = OffloadingConnectorWorker(
        WorkerConfig(capacity=1 << 20, blocks_per_chunk=1), 0, lambda *_: CudaCopyEngine([layout], slots, 1, device)
    )
    worker.attach([layout], slots)
    wild = torch.tensor([1 << 40], device=kv.device)
    torch.zeros(16, device=kv.device)[wild]  # a device-side assertion refuses the index, and ends the context
    worker.bind(StepMessage(loads=[DeviceJob(1, "req", [GroupTransfer(0, [0], [0])])]))
    worker.start_loads()
    deadline = time.monotonic() + 30
    while not (failed := worker.take_transfer_results()[1]) and time.monotonic() < deadline:
        time.sleep(0.01)
    acks = worker.build_report().acks
    assert failed == {"req"}, f"the load was not reported as failed: {acks}"
    assert acks[1].error
    worker.shutdown()
    print(acks[1].error.splitlines()[0], flush=True)
    os._exit(0)  # torch's own clearing up does not survive what was done to its context


# ---- bandwidth -----------------------------------------------------------------------------------------------------


def check_bandwidth(target: Target) -> dict[str, Any]:
    found: dict[str, Any] = {direction.value: {} for direction in Direction}
    for size in target.sizes:
        blocks = min(target.job_bytes, size << 14) // (LAYERS * size)
        kv = torch.zeros(LAYERS, 2 * blocks, size, dtype=torch.uint8, device=target.on)
        layers = {f"layer.{i}": kv[i] for i in range(LAYERS)}
        with Rig(target, layers, 2 * blocks, 1, rows=blocks) as rig:
            rng = np.random.default_rng(size)
            plan = CopyPlan(
                0, rng.permutation(blocks), np.zeros(blocks, np.int64), rng.permutation(2 * blocks)[:blocks]
            )
            for direction in Direction:
                found[direction.value][str(size)] = of_one_copy(rig, plan, direction, size)
        del kv, layers
    return found


def of_one_copy(rig: Rig, plan: CopyPlan, direction: Direction, size: int) -> dict[str, float]:
    """Median ratios by method, `chosen` being what the engine takes by itself; one copy's GB/s; the model's thread."""
    chosen, num_bytes = rig.engine._choice, plan.num_blocks * rig.layout.block_bytes
    ways = {"chosen": chosen, **rig.choices()}
    if size < 64 * KIB:
        ways.pop("torch", None)  # it takes seconds
    one = one_copy(rig.target, direction, num_bytes)
    took: dict[str, list[float]] = {name: [] for name in ways}
    ones: list[float] = []
    submits: list[float] = []
    for turn in range(rig.target.turns + 1):
        for name in random.sample([*ways, "one"], len(ways) + 1):
            if name == "one":
                seconds = one()
                ones.append(seconds)
                continue
            rig.engine._choice = ways[name]
            seconds, submit = timed(rig, direction, plan)
            took[name].append(seconds)
            submits.append(submit)
        if not turn:  # warm-up
            ones.clear()
            submits.clear()
            for times in took.values():
                times.clear()
    rig.engine._choice = chosen
    ratios = {
        name: statistics.median(best / seconds for best, seconds in zip(ones, times, strict=True))
        for name, times in took.items()
    }
    return {
        **ratios,
        "one_copy_gb_s": num_bytes / statistics.median(ones) / 1e9,
        "submit_us": statistics.median(submits) * 1e6,
    }


def timed(rig: Rig, direction: Direction, plan: CopyPlan) -> tuple[float, float]:
    """(seconds until the poll that reports the job, of them in the calls that the model's thread makes to submit)"""
    rig.target.synchronize()
    begin = time.perf_counter()
    job = rig.submit(direction, plan)
    submitted = time.perf_counter()
    while not (results := rig.engine.poll()):
        time.sleep(0.00002)
    end = time.perf_counter()
    assert [(result.job_id, result.error) for result in results] == [(job, None)]
    return end - begin, submitted - begin


def one_copy(target: Target, direction: Direction, num_bytes: int) -> Callable[[], float]:
    """One large copy between pinned and device memory, timed until it is seen to have ended."""
    host = torch.ones(num_bytes, dtype=torch.uint8)
    host = host if target.dry else host.pin_memory()
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=target.on)
    into, out_of = (there, host) if direction is Direction.LOAD else (host, there)

    def run() -> float:
        target.synchronize()
        begin = time.perf_counter()
        into.copy_(out_of, non_blocking=True)
        target.synchronize()
        return time.perf_counter() - begin

    return run


def show_bandwidth(found: dict[str, Any]) -> list[str]:
    """Print the table; what falls short of LEAST_OF_ONE_COPY."""
    names = sorted({name for sizes in found.values() for row in sizes.values() for name in row})
    methods = ["chosen", *(name for name in names if name not in ("chosen", "one_copy_gb_s", "submit_us"))]
    rows, short = [], []
    for direction, sizes in found.items():
        for size, row in sizes.items():
            cells = [f"{row[name]:.2f}" if name in row else "" for name in methods]
            label = f"{direction} {int(size) // KIB} KiB"
            rows.append([label, f"{row['one_copy_gb_s']:.1f}", *cells, f"{row['submit_us']:.0f}"])
            least = LEAST_OF_ONE_COPY.get(int(size), 0.0)
            if row["chosen"] < least:
                short.append(f"{label}: {row['chosen']:.2f} of one copy, at least {least} is wanted")
    print("\n  of one large copy (whose GB/s stand first), by method; microseconds of the model's thread a job")
    table(["fragments", "one copy", *methods, "submit"], rows)
    return short


# ---- a dry run -----------------------------------------------------------------------------------------------------


class DryEvent(DeviceEvent):
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def is_complete(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, DryEvent)
        return self.at - earlier.at


class DryCopies(CopyMethod):
    def __init__(self, name: str) -> None:
        self.name = name

    def launch(self, descriptors: Descriptors, stream: Any) -> None:  # noqa: ARG002
        parts = (descriptors.target.tolist(), descriptors.source.tolist(), descriptors.length.tolist())
        for target, source, length in zip(*parts, strict=True):
            ctypes.memmove(target, source, length)


class DryDevice(CopyDevice):
    """The host as its own accelerator: everything launched has run."""

    name = "dry run"

    def enter_thread(self) -> None:
        return

    def open_stream(self, urgent: bool) -> Any:
        return urgent

    def record_compute(self) -> DryEvent:
        return DryEvent()

    def wait_event(self, stream: Any, event: DeviceEvent) -> None:
        pass

    def record(self, stream: Any) -> DryEvent:  # noqa: ARG002
        return DryEvent()

    def drain(self, stream: Any) -> None:
        pass

    def descriptors(self, capacity: int) -> Descriptors:
        return Descriptors(np.zeros((3, capacity), np.int64))

    def register(self, address: int, num_bytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass

    def methods(self, layouts: Sequence[GroupLayout], slots: np.ndarray) -> Mapping[str, CopyMethod]:  # noqa: ARG002
        return {name: DryCopies(name) for name in ("batch", KERNEL, "each")}

    def numa_node(self) -> int | None:
        return None


# ---- all of it -----------------------------------------------------------------------------------------------------


def open_target(dry: bool) -> Target:
    if dry:
        return Target(DryDevice(), torch.device("cpu"), True, job_bytes=32 * MIB, turns=1, iterations=20)
    if not torch.cuda.is_available():
        sys.exit("gpu_check: torch sees no GPU here; --dry-run shows that the script runs")
    on = torch.device("cuda", 0)
    torch.cuda.set_device(on)
    return Target(TorchDevice(on), on, False, job_bytes=1 << 30, turns=5, iterations=200)


def what_is_checked(target: Target) -> dict[str, Any]:
    probe = np.zeros((1, 4096), np.uint8)
    facts: dict[str, Any] = {"torch": torch.__version__, "methods": sorted(target.device.methods([], probe))}
    if not target.dry:
        facts |= {"device": torch.cuda.get_device_name(target.on), "cuda": torch.version.cuda}
        facts["memory_node"] = target.device.numa_node()
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--dry-run", action="store_true", help="the host as the device")
    parser.add_argument("--quick", action="store_true", help="fewer round trips, bandwidth of one size")
    parser.add_argument("--lose-the-device", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lose_the_device:
        lose_the_device()
    began = time.monotonic()
    target = open_target(args.dry_run)
    if args.quick:
        target.chunks, target.sizes, target.job_bytes = (3,), [32 * KIB], 4 * MIB
    result: dict[str, Any] = {"dry_run": args.dry_run, **what_is_checked(target)}
    log(f"gpu_check: {result}")
    problems: list[str] = []
    for check in (check_round_trips, check_order, check_both_ways_at_once, check_failures):
        log(f"{check.__name__} ...")
        try:
            check(target)
        except Exception as error:
            traceback.print_exc()
            problems.append(f"{check.__name__}: {error}")
    log("check_bandwidth ...")
    try:
        result["bandwidth"] = check_bandwidth(target)
        short = show_bandwidth(result["bandwidth"])
        problems += [] if target.dry else short
    except Exception as error:
        traceback.print_exc()
        problems.append(f"check_bandwidth: {error}")
    result |= {"checks": target.found, "problems": problems, "seconds": round(time.monotonic() - began, 1)}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for problem in problems:
        print(f"FAILED  {problem}")
    print(f"gpu_check: {'failed' if problems else 'all right'} after {result['seconds']:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
