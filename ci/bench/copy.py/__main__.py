"""What the host copy engine reaches of the memory, and what it costs the model beside it.

    python ci/bench/copy.py --json build/bench_copy.json     # about three minutes
    python ci/bench/copy.py --sizes 16384 --turns 3          # while working on it
    python ci/bench/copy.py --small-pages                    # a kernel that has no huge pages to give

A KV cache of 8 layers and a host region; each job moves 256 MiB between them, as blocks in random order and rows in
random order. Each turn measures everything once, in a new order; what counts are medians of the ratios of one turn, of
the worse direction.

    ratio           ours ÷ the fastest ready-made way to gather (store) or scatter (load) the same fragments in the same
                    run, all with two threads: numpy's take and assignment, torch's index_select and index_copy_, a loop
                    of memcpy. They need not put the result into random rows, only side by side.
    of_memcpy       ours ÷ one memcpy of as many bytes between the same memories, a half for each of two threads
    model_slowdown  time of a model's forward passes (one torch thread that has a core to itself, as vLLM's CPU backend
                    gives it) while one copy thread stores and loads, divided by the time without, minus one. The copies
                    move what such a model writes, each token's KV stored and loaded once: `--model-bytes` a pass.
    model_slowdown_flat_out   the same while the copy thread never rests (not counted)

Needs torch, numpy and this package; numba where it is there. A folder because a file called copy.py would be what
everything in ci/bench gets for `import copy`.
"""

import argparse
import ctypes
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _output import log, table, write_results

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.seams import thread_executor
from vllm_tiered_offload.region import HostRegion
from vllm_tiered_offload.worker.copy_engines.base import Direction
from vllm_tiered_offload.worker.copy_engines.host import HostCopyEngine
from vllm_tiered_offload.worker.copy_plan import CopyPlan
from vllm_tiered_offload.worker.layout import build_group_layout

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 16 * KIB, 24 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB]
LAYERS = 8
JOB_BYTES = 256 * MIB
THREADS = 2
PASSES = 3  # forward passes of one figure, with and without copies in turns
FASTEST_COPIES = 15e9  # bytes a second of one thread
LIBC = ctypes.CDLL(None)
LIBC.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

Way = Callable[[], None]


class Bench:
    """One fragment size: the memories, and every way to move the fragments."""

    def __init__(self, fragment: int, seed: int, small_pages: bool) -> None:
        rng = np.random.default_rng(seed)
        self.fragment = fragment
        block_bytes = LAYERS * fragment
        self.blocks = JOB_BYTES // block_bytes
        self.num_bytes = self.blocks * block_bytes
        all_blocks = 2 * self.blocks
        self.kv = torch.randint(0, 255, (LAYERS, all_blocks, fragment), dtype=torch.uint8)
        layers = {f"layer.{i}": self.kv[i] for i in range(LAYERS)}
        # Nothing but populating asks for huge pages; otherwise the first turn, which does not count, takes the pages.
        self.region = HostRegion.create(RegionGeometry(self.blocks, (block_bytes,), 1), populate=not small_pages)
        self.slots = self.region.rank_view(0)
        layout = build_group_layout(0, layers, all_blocks, 16)
        self.engine = HostCopyEngine([layout], self.slots, 1, THREADS, thread_executor(THREADS, "bench-copy"))
        blocks = rng.permutation(all_blocks)[: self.blocks]
        self.plan = CopyPlan(0, rng.permutation(self.blocks), np.zeros(self.blocks, np.int64), blocks)
        self.flat_kv = self.kv.view(-1, fragment)
        self.flat_region = np.ndarray((self.blocks * LAYERS, fragment), np.uint8, self.slots)
        self.index = (blocks[:, None] + np.arange(LAYERS) * all_blocks).ravel()  # of flat_kv, in packed order
        self.job = 0
        self.pool = ThreadPoolExecutor(THREADS)

    def close(self) -> None:
        assert self.engine.shutdown(60)
        self.pool.shutdown()
        del self.slots, self.flat_region, self.engine
        self.region.close()

    def ours(self, direction: Direction) -> None:
        self.job += 1
        self.engine.submit(self.job, direction, [self.plan])
        assert self.engine.wait(60)
        (result,) = self.engine.poll()
        assert result.error is None
        assert result.num_bytes == self.num_bytes

    def check(self) -> None:
        """Ours moved the right bytes."""
        self.ours(Direction.STORE)
        expected = self.kv[:, self.plan.device_blocks].permute(1, 0, 2).reshape(self.blocks, -1)
        assert np.array_equal(self.slots[self.plan.rows], expected.numpy())

    def ways(self, direction: Direction) -> dict[str, Way]:
        store = direction is Direction.STORE
        return {
            "ours": lambda: self.ours(direction),
            "numpy": self.halves(self.numpy_store if store else self.numpy_load),
            "torch": self.torch_store if store else self.torch_load,
            "loop": self.halves(self.loop_store if store else self.loop_load),
            "memcpy": self.halves(self.one_store if store else self.one_load),
        }

    def halves(self, work: Callable[[int, int], None]) -> Way:
        """`work(start, stop)` over all fragments, one half on each thread."""
        count = len(self.index)
        cuts = [count * i // THREADS for i in range(THREADS + 1)]
        return lambda: any(self.pool.map(work, cuts[:-1], cuts[1:]))

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """(KV, region) as one numpy item a fragment, which numpy moves fastest."""
        item = f"V{self.fragment}"
        return self.flat_kv.numpy().view(item).ravel(), self.flat_region.view(item).ravel()

    def numpy_store(self, start: int, stop: int) -> None:
        kv, region = self.items()
        np.take(kv, self.index[start:stop], out=region[start:stop], mode="clip")

    def numpy_load(self, start: int, stop: int) -> None:
        kv, region = self.items()
        kv[self.index[start:stop]] = region[start:stop]

    def torch_store(self) -> None:
        torch.index_select(self.flat_kv, 0, torch.from_numpy(self.index), out=torch.from_numpy(self.flat_region))

    def torch_load(self) -> None:
        self.flat_kv.index_copy_(0, torch.from_numpy(self.index), torch.from_numpy(self.flat_region))

    def addresses(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        kv = self.index[start:stop] * self.fragment + self.flat_kv.data_ptr()
        region = np.arange(start, stop) * self.fragment + self.flat_region.ctypes.data
        return kv.tolist(), region.tolist()

    def loop_store(self, start: int, stop: int) -> None:
        for kv, region in zip(*self.addresses(start, stop), strict=True):
            LIBC.memcpy(region, kv, self.fragment)

    def loop_load(self, start: int, stop: int) -> None:
        for kv, region in zip(*self.addresses(start, stop), strict=True):
            LIBC.memcpy(kv, region, self.fragment)

    def one_store(self, start: int, stop: int) -> None:
        at, count = start * self.fragment, (stop - start) * self.fragment
        LIBC.memcpy(self.flat_region.ctypes.data + at, self.flat_kv.data_ptr() + at, count)

    def one_load(self, start: int, stop: int) -> None:
        at, count = start * self.fragment, (stop - start) * self.fragment
        LIBC.memcpy(self.flat_kv.data_ptr() + at, self.flat_region.ctypes.data + at, count)


def measure(fragment: int, turns: int, seed: int, small_pages: bool) -> tuple[float, float]:
    """(ratio, of_memcpy) of the worse direction."""
    bench = Bench(fragment, seed, small_pages)
    log(f"  {fragment // KIB:>5} KiB, {bench.region.huge_page_bytes / bench.num_bytes:.0%} of the region in huge pages")
    bench.check()
    found = []
    for direction in Direction:
        took = alternate(bench.ways(direction), turns)
        rates = {name: bench.num_bytes / statistics.median(times) / 1e9 for name, times in took.items()}
        rivals = [name for name in took if name not in ("ours", "memcpy")]
        fastest = min(rivals, key=lambda name: statistics.median(took[name]))
        found.append((paired(took, fastest), paired(took, "memcpy")))
        row = "  ".join(f"{name} {rate:5.1f}" for name, rate in rates.items())
        log(f"  {fragment // KIB:>5} KiB {direction.value:<5}  {row}  GB/s   {spread(took, fastest)} of {fastest}")
    bench.close()
    return min(ratio for ratio, _ in found), min(ratio for _, ratio in found)


def alternate(ways: dict[str, Way], turns: int) -> dict[str, list[float]]:
    """Seconds of each way in each turn; the first turn warms up."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for turn in range(turns + 1):
        random.shuffle(order)
        for name in order:
            begin = time.perf_counter()
            ways[name]()
            if turn:
                took[name].append(time.perf_counter() - begin)
    return took


def ratios(took: dict[str, list[float]], rival: str) -> list[float]:
    return [theirs / ours for ours, theirs in zip(took["ours"], took[rival], strict=True)]


def paired(took: dict[str, list[float]], rival: str) -> float:
    return statistics.median(ratios(took, rival))


def spread(took: dict[str, list[float]], rival: str) -> str:
    found = ratios(took, rival)
    return f"{min(found):.2f} {statistics.median(found):.2f} {max(found):.2f}"


# ---- beside a model ------------------------------------------------------------------------------------------------


class Model:
    """Forward passes of a small transformer's linear layers in bf16: a prefill of 512 tokens, then a few decodes."""

    WIDTH, INNER, DEPTH, TOKENS, DECODES = 576, 1536, 30, 512, 8

    def __init__(self) -> None:
        def weight(out: int, into: int) -> torch.Tensor:
            return torch.randn(out, into, dtype=torch.bfloat16) / into**0.5

        width, inner = self.WIDTH, self.INNER
        self.layers = [(weight(width, width), weight(inner, width), weight(width, inner)) for _ in range(self.DEPTH)]
        self.prompt = torch.randn(self.TOKENS, width, dtype=torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> None:
        for attention, up, down in self.layers:
            tokens = tokens + torch.nn.functional.linear(tokens, attention)
            hidden = torch.nn.functional.silu(torch.nn.functional.linear(tokens, up))
            tokens = torch.nn.functional.layer_norm(tokens + torch.nn.functional.linear(hidden, down), (self.WIDTH,))

    def run(self) -> None:
        self.forward(self.prompt)
        for i in range(self.DECODES):
            self.forward(self.prompt[i : i + 1])


class Beside:
    """A model on this thread and a copy engine with the one thread that it has by default."""

    def __init__(self, model_bytes: int) -> None:
        block = 32 * 720  # 30 layers of 24 KiB a block of 32 tokens: what SmolLM2 has
        self.blocks = model_bytes // (30 * block)
        self.kv = torch.zeros(30, 2 * self.blocks, block, dtype=torch.uint8)
        self.slots = np.zeros((2 * self.blocks, 30 * block), np.uint8)
        layout = build_group_layout(0, {f"layer.{i}": self.kv[i] for i in range(30)}, 2 * self.blocks, 32)
        self.engine = HostCopyEngine([layout], self.slots, 1)
        self.rng = np.random.default_rng(0)
        self.model = Model()
        self.submitted = 0

    def submit(self) -> None:
        """One pass's KV: stored, and as much loaded from other rows into other blocks."""
        rows, blocks = self.rng.permutation(2 * self.blocks), self.rng.permutation(2 * self.blocks)
        zero = np.zeros(self.blocks, np.int64)
        for direction, half in zip(Direction, (slice(None, self.blocks), slice(self.blocks, None)), strict=True):
            self.submitted += 1
            self.engine.submit(self.submitted, direction, [CopyPlan(0, rows[half], zero, blocks[half])])

    def seconds(self, rounds: int) -> float:
        """Of one forward pass after `rounds` submissions, until the model is done with it."""
        begin = time.perf_counter()
        for _ in range(rounds):
            self.submit()
        self.model.run()
        self.engine.poll()
        took = time.perf_counter() - begin
        assert self.engine.wait(60)
        return took


def model_slowdown(turns: int, model_bytes: int) -> tuple[float, float]:
    """(with the copies of such a model, with copies all the time)"""
    allowed = os.sched_getaffinity(0)
    torch.set_num_threads(1)
    beside = Beside(model_bytes)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        alone = min(beside.seconds(0) for _ in range(5))
        # More copies than fit beside a pass; the rest is waited for outside of the time that counts.
        rounds = {"steady": 1, "flat out": 1 + int(alone * FASTEST_COPIES / (2 * model_bytes))}
        found: dict[str, list[float]] = {name: [] for name in rounds}
        for turn in range(turns):
            for name, slowdowns in found.items():
                took = {False: 0.0, True: 0.0}
                for i in range(2 * PASSES):
                    copies = (i + turn) % 2 == 0
                    took[copies] += beside.seconds(rounds[name] if copies else 0)
                slowdowns.append(took[True] / took[False] - 1)
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(THREADS)
    assert beside.engine.shutdown(60)
    for name, slowdowns in found.items():
        middle = statistics.median(slowdowns)
        log(
            f"  model beside {2 * rounds[name] * model_bytes / MIB:.0f} MiB of copies in {alone * 1e3:.0f} ms:"
            f"  {min(slowdowns):+.1%} {middle:+.1%} {max(slowdowns):+.1%}"
        )
    return statistics.median(found["steady"]), statistics.median(found["flat out"])


def main() -> int:
    args = parse_args()
    torch.set_num_threads(THREADS)
    ratio: dict[str, float] = {}
    of_memcpy: dict[str, float] = {}
    for size in args.sizes:
        ratio[str(size)], of_memcpy[str(size)] = measure(size, args.turns, size, args.small_pages)
    slowdown, flat_out = model_slowdown(args.turns, args.model_bytes)
    table(
        ["fragment bytes", "of the fastest ready-made", "of one memcpy"],
        [[size, f"{ratio[size]:.2f}", f"{of_memcpy[size]:.2f}"] for size in ratio],
    )
    write_results(
        {"ratio": ratio, "of_memcpy": of_memcpy, "model_slowdown": slowdown, "model_slowdown_flat_out": flat_out},
        args.json,
    )
    return 0


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="fragment bytes")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--small-pages", action="store_true", help="give the region no huge pages")
    parser.add_argument("--model-bytes", type=int, default=512 * 23040, help="KV that one forward pass writes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
