"""What the filesystem tier reaches of the disk, against fio and against vLLM's in-tree fs tier.

    python ci/bench/fs.py --json build/bench_fs.json --scratch DIR     # about 12 minutes, DIR on the disk to measure
    python ci/bench/fs.py --quick --only 1mib                          # while working on it
    python ci/bench/fs.py --intree-at-its-best                         # see below

256 rows of 1 MiB and of 4 MiB, as jobs of 64 one after the other (1x64) and as 16 jobs of 16 at once (16x16). Every
turn measures everything once, in a new order, the disk's queue emptied before each: ours and in-tree with their
default settings, each over a region as its product makes it, and fio with as many files of the same size (direct,
created in the run, with the best of 1, 4 and 16 jobs). What counts are medians of the ratios of one turn: this kind of
disk drifts by a third.

    load       cold: what was written past the page cache, or has been dropped from it
    checksum   wall time of our cold load with the checksum divided by that without it, minus one
    lookup     10,000 keys until each has its answer, on the scheduler thread: present, absent from a complete index,
               and absent by way of the filesystem; the worst of the three
    index      bytes a key of the index at a million keys, the keys themselves included

A virtual disk takes one descriptor for each physically contiguous run of a request's memory and has a few hundred of
them, so where a region's pages lie decides how many requests are in flight. Our region takes huge pages where it can.
In-tree's gets what the kernel finds, more scattered the longer a machine has been up; how much is shown. At its best:
free memory is compacted before that region is made, and what is scattered nevertheless is held meanwhile (the kernel
gives the smallest free pieces first).

Shown beside them, and not counted: ours with "io": "buffered", its loads from the page cache.
"""

import argparse
import json
import math
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import _intree as b
import _intree_fs as fs
import numpy as np
from _output import log, table, write_results
from vllm.utils.gc_utils import freeze_gc_heap

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import JobMetadata, LookupResult, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.region import HostRegion
from vllm_tiered_offload.tiers.fs.index import KeyIndex
from vllm_tiered_offload.tiers.fs.settings import FsTierSettings
from vllm_tiered_offload.tiers.registry import load_eviction_policy

MIB = 1 << 20
NUM_ROWS = 256
SHAPES = {"1x64": (1, 64), "16x16": (16, 16)}  # jobs at once, rows a job
FIO_JOBS = (1, 4, 16)
POLL_SECONDS = 0.0002
SIZES = {"1mib": MIB, "4mib": 4 * MIB}
INDEX_KEYS = 1_000_000
LOOKUP_KEYS = 10_000
PASS_SECONDS = 0.01
SHORT_REFRESH = 2.0
SCATTERED_BYTES = 2 << 30
REQUEST = ReqContext("bench")

Samples = dict[str, list[float]]  # by case; one of each turn


# ---- moving rows ---------------------------------------------------------------------------------------------------


def move(side: fs.Side, keys: Sequence[OffloadKey], shape: str, *, load: bool) -> float:
    """All rows; seconds."""
    at_once, rows = SHAPES[shape]
    spent = 0.0
    for first in range(0, NUM_ROWS, at_once * rows):
        begin = time.perf_counter()
        for start in range(first, first + at_once * rows, rows):
            side.submit(keys[start : start + rows], range(start, start + rows), load=load)
        left = at_once
        while left:
            time.sleep(POLL_SECONDS)
            left -= side.num_finished()
        spent += time.perf_counter() - begin
    return spent


def each_file(side: fs.Side, keys: Sequence[OffloadKey], do: Callable[[int], object]) -> None:
    for key in keys:
        fd = os.open(side.path(key), os.O_RDONLY)
        try:
            do(fd)
        finally:
            os.close(fd)


def drop_from_page_cache(fd: int) -> None:
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_whole(fd: int) -> None:
    while os.read(fd, MIB):
        pass


def run_fio(folder: Path, rw: str, row: int, jobs: int) -> float:
    """Seconds for all files. Written ones are made in the run, which is what a tier has to do."""
    folder.mkdir(exist_ok=True)
    created = ["--create_on_open=1", "--fallocate=none"] if rw == "write" else []
    done = subprocess.run(
        ["fio", "--name=x", f"--directory={folder}", f"--rw={rw}", f"--bs={row}", f"--filesize={row}",
         f"--nrfiles={NUM_ROWS // jobs}", f"--numjobs={jobs}", "--direct=1", "--ioengine=psync", "--group_reporting",
         "--output-format=json", "--file_service_type=sequential", "--openfiles=1", *created],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)["jobs"][0][rw]
    assert found["io_bytes"] == NUM_ROWS * row
    return found["io_bytes"] / found["bw_bytes"]


# ---- one turn ------------------------------------------------------------------------------------------------------


@dataclass
class Rig:
    """Both tiers, for one size of rows. Each moves a region as its own product makes it."""

    name: str
    ours: fs.OurFs
    buffered: fs.OurFs
    theirs: fs.InTreeFs
    source: np.ndarray  # what the rows hold when they are stored
    folder: Path
    seconds: Samples = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        return self.source.shape[1]

    def add(self, case: str, seconds: float) -> None:
        self.seconds.setdefault(case, []).append(seconds)

    def fill(self, side: fs.Side) -> None:
        side.rows[:] = self.source

    def wipe(self, side: fs.Side) -> None:
        side.rows[:, -4096:] = 0

    def check(self, side: fs.Side) -> None:
        assert np.array_equal(side.rows[:, -4096:], self.source[:, -4096:])


@contextmanager
def contiguous_memory() -> Iterator[None]:
    """What is allocated meanwhile lies in few pieces, as far as the system lets us."""
    with suppress(OSError):
        Path("/proc/sys/vm/compact_memory").write_text("1")
    with mmap.mmap(-1, SCATTERED_BYTES) as scattered:
        np.frombuffer(scattered, dtype=np.uint8)[:: mmap.PAGESIZE].fill(1)
        yield


def contiguous_runs(row: np.ndarray) -> int | None:
    """Of physical memory; None where the system does not say where a page is."""
    first, count = row.__array_interface__["data"][0] // mmap.PAGESIZE, row.nbytes // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(first * 8)
        frames = np.frombuffer(pagemap.read(count * 8), dtype=np.uint64) & np.uint64((1 << 55) - 1)
    return int(np.count_nonzero(np.diff(frames) != 1)) + 1 if frames.all() else None


@contextmanager
def rig(name: str, model: str, folder: Path, intree_at_its_best: bool) -> Iterator[Rig]:
    row = SIZES[name]
    source = np.random.default_rng(7).integers(0, 256, (NUM_ROWS, row), dtype=np.uint8)
    with contiguous_memory() if intree_at_its_best else nullcontext():
        theirs = fs.InTreeFs(model, str(folder / "intree"), NUM_ROWS, row)
        theirs.rows[:] = source
    with HostRegion.create(RegionGeometry(NUM_ROWS, (row,), 1)) as region:
        ours = fs.OurFs(str(folder / "ours"), region)
        buffered = fs.OurFs(str(folder / "buffered"), region, io="buffered")
        ours.rows[:] = source
        for side in (ours, theirs):
            runs = statistics.mean(contiguous_runs(row) or math.nan for row in side.rows)
            log(f"  {name} {side.name} rows in contiguous runs of memory: {runs:.1f} each")
        freeze_gc_heap()  # as EngineCore does once it is up
        try:
            yield Rig(name, ours, buffered, theirs, source, folder)
        finally:
            for side in (ours, buffered, theirs):
                side.shutdown()


def new_keys(rng: np.random.Generator, count: int = NUM_ROWS) -> list[OffloadKey]:
    return b.keys_of(b.random_hashes(rng, count))


def turn(rig: Rig, index: int) -> None:
    """Everything once, in an order of its own."""
    rng = np.random.default_rng([index, rig.row_bytes])
    tasks: list[Callable[[], None]] = [lambda jobs=jobs: fio_group(rig, jobs) for jobs in FIO_JOBS]
    tasks += [lambda shape=shape: pair(rig, shape, rng, index % 2 == 1) for shape in SHAPES]
    tasks.append(lambda: hot_group(rig, "16x16", rng))
    for which in rng.permutation(len(tasks)):
        tasks[which]()


def fio_group(rig: Rig, jobs: int) -> None:
    folder = rig.folder / f"fio{jobs}"
    for rw in ("write", "read"):
        os.sync()
        rig.add(f"fio {rw} j{jobs}", run_fio(folder, rw, rig.row_bytes, jobs))
    shutil.rmtree(folder)


def pair(rig: Rig, shape: str, rng: np.random.Generator, theirs_first: bool) -> None:
    """Ours and in-tree, one after the other."""
    sides: list[fs.Side] = [rig.ours, rig.theirs]
    for side in reversed(sides) if theirs_first else sides:
        keys = new_keys(rng)
        rig.fill(side)
        os.sync()
        rig.add(f"{side.name} store {shape}", move(side, keys, shape, load=False))
        loads = [f"{side.name} load {shape}"]
        if side is rig.ours:
            loads.insert(rng.integers(2), f"unchecked load {shape}")
        for case in loads:
            each_file(side, keys, drop_from_page_cache)
            rig.wipe(side)
            os.sync()
            with without_checksum() if case.startswith("unchecked") else mock.patch.dict({}):
                rig.add(case, move(side, keys, shape, load=True))
            rig.check(side)
        remove(side, keys)


def hot_group(rig: Rig, shape: str, rng: np.random.Generator) -> None:
    side, keys = rig.buffered, new_keys(rng)
    rig.fill(side)
    os.sync()
    rig.add(f"buffered store {shape}", move(side, keys, shape, load=False))
    each_file(side, keys, read_whole)
    rig.wipe(side)
    rig.add(f"buffered hot load {shape}", move(side, keys, shape, load=True))
    rig.check(side)
    remove(side, keys)


def without_checksum() -> mock._patch:
    return mock.patch("vllm_tiered_offload.tiers.fs.block_io.verify")


def remove(side: fs.Side, keys: Sequence[OffloadKey]) -> None:
    for key in keys:
        side.path(key).unlink()


# ---- lookups and memory --------------------------------------------------------------------------------------------


def measure_lookups(scratch: str, repeats: int) -> Samples:
    """Microseconds a key on the scheduler thread until all 10,000 have their answer, by kind."""
    rng, region = np.random.default_rng(3), HostRegion.create(RegionGeometry(1, (4096,), 1))
    took: Samples = {"present": [], "absent, indexed": [], "absent, by stat": []}
    root = tempfile.mkdtemp(prefix="lookups_", dir=scratch)
    present = new_keys(rng, LOOKUP_KEYS)
    for _ in range(repeats):
        side = scanned(root, region, 60.0)
        side.tier.submit_store(JobMetadata(1, tuple(present), (0,) * len(present), False, REQUEST))
        assert side.tier.drain(60)
        took["present"].append(ask(side, present, LookupResult.HIT))
        took["absent, indexed"].append(ask(side, new_keys(rng, LOOKUP_KEYS), LookupResult.MISS))
        side.shutdown()
        side = scanned(root, region, SHORT_REFRESH)
        time.sleep(SHORT_REFRESH)  # now the index is too old to say that a key is nowhere
        took["absent, by stat"].append(ask(side, new_keys(rng, LOOKUP_KEYS), LookupResult.MISS))
        side.shutdown()
    return took


def scanned(root: str, region: HostRegion, share_refresh: float) -> fs.OurFs:
    """A tier that knows what its directory holds."""
    side = fs.OurFs(root, region, share_refresh=share_refresh)
    deadline = time.monotonic() + 60
    while not side.tier._holdings.scanned:
        assert time.monotonic() < deadline, "the directory was never scanned"
        side.tier.on_schedule_end()
        time.sleep(PASS_SECONDS)
    return side


def ask(side: fs.OurFs, keys: Sequence[OffloadKey], wanted: LookupResult) -> float:
    """Microseconds a key of all calls until nothing is unknown."""
    spent = 0.0
    while True:
        begin = time.perf_counter()
        answers = side.tier.lookup(keys, REQUEST)
        side.tier.on_schedule_end()
        spent += time.perf_counter() - begin
        if LookupResult.RETRY not in answers:
            break
        time.sleep(PASS_SECONDS)
    assert set(answers) == {wanted}
    return spent * 1e6 / len(keys)


def index_bytes_per_key() -> float:
    """With the default eviction policy, filled as by a scan and by requests of 256 chunks, half and half."""
    rng, policy = np.random.default_rng(4), load_eviction_policy(FsTierSettings(root="/").eviction_policy)
    tracemalloc.start()
    index = KeyIndex(None, MIB, policy(INDEX_KEYS))
    for number in range(INDEX_KEYS // 512):
        index.add([(key, MIB) for key in new_keys(rng, 256)])
        index.add([(key, MIB) for key in new_keys(rng, 256)], f"r{number}")
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / len(index.present)


# ---- telling -------------------------------------------------------------------------------------------------------


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Speed of the second measured in the first, turn by turn: seconds are divided the other way round."""
    return [y / x for x, y in zip(over, under, strict=True)]


def best_fio(seconds: Samples, rw: str) -> list[float]:
    """Turn by turn with the job count that is best in the whole run; the best of each turn would be its luckiest."""
    return min((seconds[f"fio {rw} j{jobs}"] for jobs in FIO_JOBS), key=statistics.median)


@dataclass
class Found:
    """Ratios of one size of rows, by case: (size, direction, shape)."""

    vs_fio: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    vs_intree: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    checksum: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, size: str, seconds: Samples) -> None:
        for shape in SHAPES:
            for direction, rw in (("store", "write"), ("load", "read")):
                ours = seconds[f"ours {direction} {shape}"]
                self.vs_fio[size, direction, shape] = ratios(ours, best_fio(seconds, rw))
                self.vs_intree[size, direction, shape] = ratios(ours, seconds[f"in-tree {direction} {shape}"])
            pairs = zip(seconds[f"ours load {shape}"], seconds[f"unchecked load {shape}"], strict=True)
            self.checksum[size, shape] = [x / y - 1 for x, y in pairs]

    def summary(self) -> dict[str, float]:
        fio = {case: statistics.median(values) for case, values in self.vs_fio.items()}
        intree = {case: statistics.median(values) for case, values in self.vs_intree.items()}
        out = {
            f"{direction}_vs_fio": min(value for (_, one, _), value in fio.items() if one == direction)
            for direction in ("store", "load")
        }
        goal = intree.pop(("1mib", "store", "1x64"), None)
        if goal is not None:
            out["store_vs_intree_1mib"] = goal
        out["others_vs_intree_min"] = min(intree.values())
        out["others_vs_intree_mean"] = statistics.geometric_mean(intree.values())
        out["checksum_share"] = max(map(statistics.median, self.checksum.values()))
        return out


def spread(values: Sequence[float]) -> list[str]:
    return [f"{one:.3f}" for one in (min(values), statistics.median(values), max(values))]


def show_speed(size: str, seconds: Samples) -> None:
    total = NUM_ROWS * SIZES[size]
    rows = [[case, *spread([total / one / 1e9 for one in took])] for case, took in sorted(seconds.items())]
    table((f"{size} rows, GB/s", "min", "median", "max"), rows)


def show_ratios(found: Found) -> None:
    rows = [[f"{' '.join(case)}: ours ÷ best fio", *spread(values)] for case, values in found.vs_fio.items()]
    rows += [[f"{' '.join(case)}: ours ÷ in-tree", *spread(values)] for case, values in found.vs_intree.items()]
    rows += [[f"{' '.join(case)}: checksum share", *spread(values)] for case, values in found.checksum.items()]
    table(("ratios of one turn", "min", "median", "max"), rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--quick", action="store_true", help="three turns")
    parser.add_argument("--turns", type=int, help="how many, instead of 15")
    parser.add_argument("--only", nargs="+", choices=(*SIZES, "lookup", "index"), default=(*SIZES, "lookup", "index"))
    parser.add_argument("--intree-at-its-best", action="store_true", help="its region in few pieces of memory")
    parser.add_argument("--scratch", help="folder for the files, on the disk to measure")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    turns = args.turns or (3 if args.quick else 15)
    found, out = Found(), {}
    with tempfile.TemporaryDirectory(prefix="bench_fs_", dir=args.scratch) as scratch:
        for size in [size for size in SIZES if size in args.only]:
            with rig(size, b.model_folder(), Path(scratch), args.intree_at_its_best) as one:
                for index in range(turns + 1):
                    turn(one, index)
                    log(f"  {size} turn {index}{'' if index else ' (warms up, not counted)'}")
                seconds = {case: took[1:] for case, took in one.seconds.items()}
            show_speed(size, seconds)
            found.add(size, seconds)
        if found.vs_fio:
            show_ratios(found)
            out |= found.summary()
        if "lookup" in args.only:
            lookups = measure_lookups(scratch, 3 if args.quick else 9)
            table(("10,000 lookups, us a key", "min", "median", "max"), [[k, *spread(v)] for k, v in lookups.items()])
            out["lookup_us"] = max(map(statistics.median, lookups.values()))
    if "index" in args.only:
        out["index_bytes_per_key"] = index_bytes_per_key()
    write_results(out, args.json)


if __name__ == "__main__":
    main()
