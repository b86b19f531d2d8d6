"""What our hooks cost on vLLM's scheduler thread, against vLLM's in-tree offloading connector.

    python ci/bench/scheduler.py --json build/bench_scheduler.json        # about 7 minutes
    python ci/bench/scheduler.py --quick --only hit store                 # while working on one of them

Both scheduler halves live in this process and take turns at every sample, each with a small and a large CPU tier, so
that a machine whose speed drifts slows all of them alike; what counts are medians of ratios of one turn. Everything is
the real class, only the worker is missing: every transfer is acknowledged at once. Cases:

    hit       a 1,000-chunk prompt that is in the CPU tier: its lookup, and all hooks until it has finished
    store     all hooks of a step in which 256 running requests complete a chunk each; tier with room, full tier
    miss      the lookup calls of 1,000 new requests of 100 chunks that nobody has
    fs_miss   the same with a directory behind: hooks of all scheduling passes until every request has its answer
    fs_hit    a 1,000-chunk prompt that only the directory has: the same until it is a hit
    worst     the longest single hook call, while as many keys are used again as make the in-tree heap rebuild twice
    step      vLLM's whole Scheduler step of 64 requests, divided by that step without a connector

A ratio is ours divided by in-tree, the worse of the small and the large tier (and of room and full).
"""

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _intree as b
import numpy as np
from _output import log, table, write_results
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

CHUNKS = 1000  # of a prompt that hits
MISS_CHUNKS = 100
RUNNING = 256
PASS_SECONDS = 0.01  # between two scheduling passes: the forward pass, while other threads work
CASES = ("hit", "store", "miss", "fs_hit", "fs_miss", "worst", "step")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    keys: tuple[int, int] = (10_000, 1_000_000)
    hits: int = 40
    steps: int = 40
    misses: int = 12
    waiting: int = 1000  # requests that miss
    fs_hits: int = 15
    fs_misses: int = 7
    repeats: int = 5  # of the whole-step case
    prefill: int = 60  # steps
    decode: int = 160
    reuse: float = 2.2  # times that every key is used again while the longest call is looked for


QUICK = Sizes((10_000, 100_000), 8, 10, 3, 200, 3, 2, 1, 30, 60, 2.2)


# ---- driving one half ----------------------------------------------------------------------------------------------


class Meter:
    """Times hook calls, one by one. Microseconds."""

    def __init__(self) -> None:
        self.us: Counter[str] = Counter()  # by hook
        self.worst = (0.0, "")

    def __call__(self, hook: str, call: Callable[..., Any], *args: Any) -> Any:
        begin = time.perf_counter_ns()
        answer = call(*args)
        us = (time.perf_counter_ns() - begin) / 1e3
        self.us[hook] += us
        if us > self.worst[0]:
            self.worst = (us, hook)
        return answer

    @property
    def total(self) -> float:
        """Of all hooks."""
        return sum(self.us.values())


def schedule(meter: Meter, half: b.Half, output: SchedulerOutput) -> Any:
    """The end of schedule()."""
    return meter("build_connector_meta", half.connector.build_connector_meta, output)


def update(meter: Meter, half: b.Half, meta: Any) -> None:
    """The connector's part of update_from_output(): acknowledgements, stats, events."""
    ack = half.ack(meta)
    if ack is not None:
        meter("update_connector_output", half.connector.update_connector_output, ack)
    meter("get_kv_connector_stats", _read_stats, half.connector)
    meter("take_events", lambda: list(half.connector.take_events() or ()))


def _read_stats(connector: Any) -> bool:
    stats = connector.get_kv_connector_stats()
    return stats is None or stats.is_empty()


def step_output(
    new: Sequence[NewRequestData] = (),
    cached: CachedRequestData | None = None,
    scheduled: dict[str, int] | None = None,
    finished: Sequence[Request] = (),
) -> SchedulerOutput:
    """What the scheduler decided."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = list(new)
    if cached is not None:
        output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = scheduled or {}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.finished_req_ids = {request.request_id for request in finished}
    return output


def starting(request: Request, block_ids: list[int]) -> NewRequestData:
    """A request that runs for the first time."""
    return NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=request.sampling_params,
        pooling_params=None,
        block_ids=(block_ids,),
        num_computed_tokens=request.num_computed_tokens,
        lora_request=None,
    )


def going_on(requests: Sequence[Request], new_blocks: Sequence[list[int]]) -> CachedRequestData:
    """Requests that run on, each with more device blocks."""
    return CachedRequestData(
        req_ids=[request.request_id for request in requests],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[(blocks,) for blocks in new_blocks],
        num_computed_tokens=[request.num_computed_tokens for request in requests],
        num_output_tokens=[request.num_output_tokens for request in requests],
    )


def blocks_of(half: b.Half, request: Request) -> KVCacheBlocks:
    """As vLLM hands them to update_state_after_alloc."""
    return half.device.get_blocks(request.request_id)


def end(meter: Meter, half: b.Half, requests: Sequence[Request], status: RequestStatus) -> None:
    """vLLM finishes these requests, and the step after reports it."""
    for request in requests:
        request.status = status
        table = half.table(request)
        meter("request_finished", half.connector.request_finished_all_groups, request, (table,))
        half.free(request)
    update(meter, half, schedule(meter, half, step_output(finished=requests)))


def ask(meter: Meter, half: b.Half, requests: Sequence[Request]) -> list[Request]:
    """One scheduling pass over waiting requests; those without an answer, which it will ask again."""
    lookup = half.connector.get_num_new_matched_tokens
    return [request for request in requests if meter("lookup", lookup, request, 0)[0] is None]


def ask_until_answered(half: b.Half, requests: Sequence[Request]) -> tuple[Meter, int]:
    """Passes until every request has its answer: what the hooks took, and how many passes."""
    meter, passes = Meter(), 1
    waiting = ask(meter, half, requests)
    while waiting:
        schedule(meter, half, step_output())
        time.sleep(PASS_SECONDS)
        waiting = ask(meter, half, waiting)
        passes += 1
    return meter, passes


# ---- cases ---------------------------------------------------------------------------------------------------------


class Prompts:
    """The chunks that are in the CPU tiers: `count` prompts."""

    def __init__(self, seed: int, count: int) -> None:
        rng = np.random.default_rng(seed)
        self.hashes = [b.random_hashes(rng, CHUNKS) for _ in range(count)]
        self._tokens = [7] * (CHUNKS * b.BLOCK + 1)

    def keys(self) -> list[list[bytes]]:
        return [b.keys_of(hashes) for hashes in self.hashes]

    def request(self, index: int) -> Request:
        return b.new_request(self._tokens, self.hashes[index % len(self.hashes)])


def hit(half: b.Half, request: Request, meter: Meter) -> None:
    """Every hook of a request whose whole prompt is loaded, in vLLM's order."""
    hooks = half.connector
    meter("on_new_request", hooks.on_new_request, request)
    tokens, is_async = meter("lookup", hooks.get_num_new_matched_tokens, request, 0)
    assert (tokens, is_async) == (CHUNKS * b.BLOCK, True), tokens
    half.allocate(request, CHUNKS)
    meter("update_state_after_alloc", hooks.update_state_after_alloc, request, blocks_of(half, request), tokens)
    sources = meter("hit_sources", hooks.get_external_cache_hit_sources, request, tokens)
    assert sum(sources.values()) == tokens
    meter("loaded_groups", hooks.get_loaded_kv_cache_group_ids, request)
    meta = schedule(meter, half, step_output())
    assert half.num_jobs(meta) == 1
    update(meter, half, meta)
    # The load has ended: the request is admitted and computes its last token.
    request.num_computed_tokens = tokens
    request.status = RequestStatus.RUNNING
    half.allocate(request, 1)
    meter("update_state_after_alloc", hooks.update_state_after_alloc, request, blocks_of(half, request), 0)
    new = starting(request, half.table(request))
    update(meter, half, schedule(meter, half, step_output(new=[new], scheduled={request.request_id: 1})))
    request.num_computed_tokens += 1
    request.append_output_token_ids([7])
    end(meter, half, [request], RequestStatus.FINISHED_STOPPED)


class Stores:
    """256 running requests, each of which completes one chunk in every step."""

    def __init__(self, half: b.Half, seed: int, steps: int) -> None:
        self._half = half
        rng = np.random.default_rng(seed)
        tokens = [7] * (steps * b.BLOCK + 1)
        self.requests = [b.new_request(tokens, b.random_hashes(rng, steps)) for _ in range(RUNNING)]
        for request in self.requests:
            half.connector.on_new_request(request)
        ask_until_answered(half, self.requests)
        self._is_first = True

    def step(self, meter: Meter) -> None:
        """One step of all requests."""
        half, requests = self._half, self.requests
        blocks = [half.allocate(request, 1) for request in requests]
        scheduled = {request.request_id: b.BLOCK for request in requests}
        if self._is_first:
            for request in requests:
                half.connector.update_state_after_alloc(request, blocks_of(half, request), 0)
            output = step_output(new=list(map(starting, requests, blocks)), scheduled=scheduled)
            self._is_first = False
        else:
            output = step_output(cached=going_on(requests, blocks), scheduled=scheduled)
        meta = schedule(meter, half, output)
        assert half.num_rows(meta) == RUNNING, half.num_rows(meta)
        for request in requests:
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens += b.BLOCK
        update(meter, half, meta)

    def finish(self, meter: Meter) -> None:
        """All of them at once."""
        end(meter, self._half, self.requests, RequestStatus.FINISHED_STOPPED)


def missing_requests(half: b.Half, rng: np.random.Generator, count: int) -> list[Request]:
    """Announced requests whose chunks nobody has."""
    tokens = [7] * (MISS_CHUNKS * b.BLOCK + 1)
    requests = [b.new_request(tokens, b.random_hashes(rng, MISS_CHUNKS)) for _ in range(count)]
    for request in requests:
        half.connector.on_new_request(request)
    return requests


def drop(half: b.Half, requests: Sequence[Request], meter: Meter | None = None) -> None:
    """The clients are gone."""
    for request in requests:
        half.allocate(request, 0)
    end(meter or Meter(), half, requests, RequestStatus.FINISHED_ABORTED)


# ---- taking turns --------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """Samples of one case: by (half's name, keys), as many for each, those of one turn at one index. Microseconds."""

    title: str
    samples: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def add(self, name: str, keys: int, us: float) -> None:
        self.samples.setdefault((name, keys), []).append(us)

    def ratios(self, keys: int) -> list[float]:
        """Ours ÷ in-tree, turn by turn."""
        return [x / y for x, y in zip(self.samples["ours", keys], self.samples["in-tree", keys], strict=True)]

    def growth(self, small: int, large: int) -> float:
        """Ours with the large tier ÷ ours with the small one, median."""
        pairs = zip(self.samples["ours", large], self.samples["ours", small], strict=True)
        return statistics.median(x / y for x, y in pairs)

    def worse(self, sizes: Sequence[int]) -> float:
        return max(statistics.median(self.ratios(keys)) for keys in sizes)

    def rows(self, sizes: Sequence[int]) -> Iterator[list[str]]:
        for keys in sizes:
            ours, theirs = (statistics.median(self.samples[name, keys]) for name in ("ours", "in-tree"))
            ratios = self.ratios(keys)
            spread = (min(ratios), statistics.median(ratios), max(ratios))
            yield [self.title, f"{keys:,}", f"{ours:,.0f}", f"{theirs:,.0f}", *(f"{ratio:.3f}" for ratio in spread)]


Halves = dict[tuple[str, int], b.Half]  # by (half's name, keys)


def turns(halves: Halves, count: int) -> Iterator[tuple[int, str, int, b.Half]]:
    """Every half once a turn; whoever began is last in the next turn."""
    for index in range(count):
        for (name, keys), half in list(halves.items())[:: -1 if index % 2 else 1]:
            yield index, name, keys, half


@contextmanager
def four_halves(model: str, sizes: Sequence[int], room: int, scratch: str | None, behind: bool) -> Iterator[Halves]:
    """Ours and in-tree, each with a small and a large CPU tier in which `room` more rows are free."""
    with ExitStack() as stack:
        halves: Halves = {}
        prompts = {keys: Prompts(keys, keys // CHUNKS) for keys in sizes}
        for keys in sizes:
            for kind in (b.Ours, b.InTree):
                root = tempfile.mkdtemp(prefix="bench_fs_", dir=scratch) if behind else None
                if root is not None:
                    stack.callback(shutil.rmtree, root, ignore_errors=True)
                halves[kind.name, keys] = half = kind(model, keys + room, root)
                half.prompts = prompts[keys]
                stack.callback(half.shutdown)
        # As EngineCore does once it is up. The keys come later, as they do in service.
        freeze_gc_heap()
        stack.callback(gc.unfreeze)
        for (_, keys), half in halves.items():
            half.fill(prompts[keys].keys())
        yield halves


def measure_cpu(model: str, sizes: Sizes, wanted: set[str]) -> dict[str, Case]:
    """hit, store, miss."""
    room = RUNNING * (sizes.steps + 2)
    titles = {"lookup": "lookup, 1,000 chunks hit", "hit": "whole hit, all hooks"}
    titles |= {"store_room": "store step, 256 requests, room", "store_full": "store step, 256 requests, full"}
    titles |= {"miss": f"{sizes.waiting:,} lookups x 100 chunks, miss"}
    cases = {name: Case(title) for name, title in titles.items()}
    with four_halves(model, sizes.keys, room, None, behind=False) as halves:
        if "hit" in wanted:
            hits(halves, sizes, cases)
        if "miss" in wanted:
            misses(halves, sizes, cases["miss"])
        if "store" in wanted:
            stores(halves, sizes, cases["store_room"], seed=1)
            for half in halves.values():
                filler = b.random_hashes(np.random.default_rng(2), 2 * room)
                half.fill([b.keys_of(filler[begin : begin + CHUNKS]) for begin in range(0, len(filler), CHUNKS)])
            stores(halves, sizes, cases["store_full"], seed=3)
    return {name: case for name, case in cases.items() if case.samples}


def hits(halves: Halves, sizes: Sizes, cases: dict[str, Case]) -> None:
    for index, name, keys, half in turns(halves, sizes.hits):
        meter = Meter()
        hit(half, half.prompts.request(index), meter)
        cases["lookup"].add(name, keys, meter.us["lookup"])
        cases["hit"].add(name, keys, meter.total)


def misses(halves: Halves, sizes: Sizes, case: Case) -> None:
    rng = np.random.default_rng(5)
    for _, name, keys, half in turns(halves, sizes.misses):
        requests = missing_requests(half, rng, sizes.waiting)
        meter = Meter()
        assert not ask(meter, half, requests)
        case.add(name, keys, meter.total)
        drop(half, requests)


def stores(halves: Halves, sizes: Sizes, case: Case, seed: int) -> None:
    running = {which: Stores(half, seed, sizes.steps + 1) for which, half in halves.items()}
    for stepping in running.values():
        stepping.step(Meter())
    for _, name, keys, _half in turns(halves, sizes.steps):
        meter = Meter()
        running[name, keys].step(meter)
        case.add(name, keys, meter.total)
    for stepping in running.values():
        stepping.finish(Meter())


def measure_fs(model: str, sizes: Sizes, wanted: set[str], scratch: str | None) -> dict[str, Case]:
    """fs_hit, fs_miss: what the scheduler thread does until the answer is there."""
    cases = {
        "fs_hit": Case("1,000 chunks on disk only, until hit"),
        "fs_miss": Case(f"{sizes.waiting:,} x 100 chunks, until missed"),
    }
    rng = np.random.default_rng(7)
    with four_halves(model, sizes.keys, CHUNKS * (sizes.fs_hits + 1) + 4096, scratch, behind=True) as halves:
        for _, name, keys, half in turns(halves, sizes.fs_hits if "fs_hit" in wanted else 0):
            cases["fs_hit"].add(name, keys, until_disk_hit(half, rng))
        for _, name, keys, half in turns(halves, sizes.fs_misses if "fs_miss" in wanted else 0):
            requests = missing_requests(half, rng, sizes.waiting)
            meter, passes = ask_until_answered(half, requests)
            cases["fs_miss"].add(name, keys, meter.total)
            log(f"  fs_miss {name} {keys:,}: {meter.total / 1e3:,.0f} ms in {passes} passes")
            drop(half, requests)
            half.settle()
    return {name: case for name, case in cases.items() if case.samples}


def until_disk_hit(half: b.Half, rng: np.random.Generator) -> float:
    hashes = b.random_hashes(rng, CHUNKS)
    half.put_on_disk(b.keys_of(hashes))
    request = b.new_request([7] * (CHUNKS * b.BLOCK + 1), hashes)
    half.connector.on_new_request(request)
    meter, passes = ask_until_answered(half, [request])
    log(f"  fs_hit {half.name}: {meter.total / 1e3:,.1f} ms in {passes} passes")
    # Asked once more in the same pass: it must have been a hit.
    assert half.connector.get_num_new_matched_tokens(request, 0)[0] == CHUNKS * b.BLOCK
    drop(half, [request])
    half.settle()
    return meter.total


# ---- the longest call ----------------------------------------------------------------------------------------------


def measure_worst(model: str, sizes: Sizes) -> dict[str, tuple[float, str]]:
    """The longest hook call by half, one half after the other: neither collects the other's garbage in a call.

    The tier is full. A fifth of the prompts is never used, so that stores evict these and not those that are.
    """
    worst = {}
    for kind in (b.Ours, b.InTree):
        half = kind(model, sizes.keys[1])
        prompts = Prompts(11, sizes.keys[1] // CHUNKS)
        freeze_gc_heap()
        half.fill(prompts.keys())
        gc.collect()
        meter, rebuilds, unused = Meter(), 0, len(prompts.hashes) // 5
        for index in range(int(len(prompts.hashes) * sizes.reuse)):
            before = heap_entries(half)
            hit(half, prompts.request(unused + index % (len(prompts.hashes) - unused)), meter)
            if index % 100 == 99:
                mixed_load(half, index, meter)
            rebuilds += heap_entries(half) < before / 1.5
        worst[half.name] = meter.worst
        seen = f", {rebuilds} heap rebuilds" if kind is b.InTree else ""
        log(f"  longest call of {half.name}: {meter.worst[0] / 1e3:.2f} ms in {meter.worst[1]}{seen}")
        half.shutdown()
        del half
        gc.unfreeze()
        gc.collect()
    return worst


def heap_entries(half: b.Half) -> int:
    return half.heap_entries if isinstance(half, b.InTree) else 0


def mixed_load(half: b.Half, seed: int, meter: Meter) -> None:
    """Stores into the full tier, 256 requests that finish in one step, and misses."""
    running = Stores(half, seed, 5)
    for _ in range(5):
        running.step(meter)
    running.finish(meter)
    requests = missing_requests(half, np.random.default_rng([seed, 1]), 100)
    ask(meter, half, requests)
    drop(half, requests, meter)


# ---- vLLM's whole step ---------------------------------------------------------------------------------------------

REQUESTS = 64


def build_scheduler(model: str, name: str, blocks: int) -> Scheduler:
    """vLLM's Scheduler with the connector of that name. Each request computes one chunk of its prompt a step."""
    transfer = {
        "none": None,
        "no-op": b.noop_transfer(),
        "ours": b.our_transfer(blocks, offload_prompt_only=False),
        "in-tree": b.intree_transfer(blocks, offload_prompt_only=False),
    }[name]
    config = b.vllm_config(model, transfer, max_tokens=8192)
    config.scheduler_config.long_prefill_token_threshold = b.BLOCK
    config.cache_config.num_gpu_blocks = blocks
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=b.kv_cache_config(blocks),
        structured_output_manager=StructuredOutputManager(config),
        block_size=b.BLOCK,
        log_stats=True,
    )
    if name == "ours":
        scheduler.connector.connector_scheduler.bind_region(b.announcement(blocks))
    return scheduler


def whole_step(scheduler: Scheduler) -> tuple[float, int]:
    """schedule() and update_from_output(), in microseconds, and the tokens that were scheduled."""
    begin = time.perf_counter_ns()
    output = scheduler.schedule()
    scheduled = time.perf_counter_ns() - begin
    result = computed(scheduler, output)
    begin = time.perf_counter_ns()
    scheduler.update_from_output(output, result)
    return (scheduled + time.perf_counter_ns() - begin) / 1e3, output.total_num_scheduled_tokens


def computed(scheduler: Scheduler, output: SchedulerOutput) -> ModelRunnerOutput:
    """A model that always says 7."""
    ids = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[req_id] for req_id in ids]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(ids)},
        sampled_token_ids=[[7] if one.num_computed_tokens >= one.num_tokens else [] for one in requests],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=b.step_ack(output.kv_connector_metadata),
    )


def measure_steps(model: str, sizes: Sizes) -> dict[str, dict[str, list[float]]]:
    """Microseconds of each step, by phase and connector; steps of one turn have one index."""
    names = ("none", "no-op", "ours", "in-tree")
    took: dict[str, dict[str, list[float]]] = {phase: {name: [] for name in names} for phase in ("prefill", "decode")}
    blocks = REQUESTS * (sizes.prefill + sizes.decode // b.BLOCK + 8) * 2
    for repeat in range(sizes.repeats):
        schedulers = {name: build_scheduler(model, name, blocks) for name in names}
        freeze_gc_heap()
        for scheduler in schedulers.values():
            admit(scheduler, repeat, sizes.prefill + 1)
        for phase, count in (("prefill", sizes.prefill - 8), ("decode", sizes.decode)):
            for scheduler in schedulers.values():
                while phase == "decode" and any(not request.num_output_tokens for request in scheduler.running):
                    whole_step(scheduler)
            for index in range(count):
                for name in names[:: -1 if index % 2 else 1]:
                    us, tokens = whole_step(schedulers[name])
                    assert tokens == REQUESTS * (b.BLOCK if phase == "prefill" else 1), (name, phase, tokens)
                    took[phase][name].append(us)
        for scheduler in schedulers.values():
            scheduler.shutdown()
        gc.unfreeze()
    return took


def admit(scheduler: Scheduler, seed: int, chunks: int) -> None:
    """Requests with different prompts; steps until all of them run."""
    rng = np.random.default_rng(seed)
    total = chunks + 1000
    for _ in range(REQUESTS):
        tokens = rng.integers(3, 31999, chunks * b.BLOCK).tolist()
        scheduler.add_request(b.new_request(tokens, b.random_hashes(rng, total)))
    while len(scheduler.running) < REQUESTS:
        whole_step(scheduler)


# ---- telling -------------------------------------------------------------------------------------------------------


def show_cases(cases: dict[str, Case], sizes: Sizes) -> None:
    header = ("case (microseconds)", "keys", "ours", "in-tree", "ratio min", "median", "max")
    table(header, [row for case in cases.values() for row in case.rows(sizes.keys)])
    grown = [[case.title, f"{case.growth(*sizes.keys):.2f}"] for case in cases.values()]
    table((f"growth of ours from {sizes.keys[0]:,} to {sizes.keys[1]:,} keys", "median"), grown)


def show_steps(took: dict[str, dict[str, list[float]]]) -> None:
    rows = []
    for phase, by_name in took.items():
        for name, us in by_name.items():
            ratios = [x / y for x, y in zip(us, by_name["none"], strict=True)]
            spread = [f"{one:.3f}" for one in (min(ratios), statistics.median(ratios), max(ratios))]
            mean = f"{sum(us) / sum(by_name['none']):.3f}"
            rows.append([f"{phase} step, {REQUESTS} requests", name, f"{statistics.median(us):,.0f}", *spread, mean])
    table(("whole step", "connector", "us", "÷ none: min", "median", "max", "of sums"), rows)


def results(cases: dict[str, Case], sizes: Sizes) -> dict[str, float]:
    """Ratios under the names that the JSON has them by."""
    names = {
        "lookup_ratio": ("lookup",),
        "hit_ratio": ("hit",),
        "store_ratio": ("store_room", "store_full"),
        "miss_ratio": ("miss",),
        "fs_hit_ratio": ("fs_hit",),
        "fs_miss_ratio": ("fs_miss",),
    }
    found = {key: [cases[name].worse(sizes.keys) for name in parts if name in cases] for key, parts in names.items()}
    ratios = {key: max(values) for key, values in found.items() if values}
    if cases:
        ratios["growth"] = max(case.growth(*sizes.keys) for case in cases.values())
    return ratios


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the ratios go")
    parser.add_argument("--quick", action="store_true", help="fewer samples and a large tier of 100,000 keys")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="leave the other cases out")
    parser.add_argument("--scratch", help="folder for the fs tier's files, on the disk to measure")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    sizes, wanted = (QUICK if args.quick else Sizes()), set(args.only)
    model = b.model_folder()
    cases: dict[str, Case] = {}
    out: dict[str, float] = {}
    if "step" in wanted:  # first: what frees a million keys leaves a heap behind that no engine has
        took = measure_steps(model, sizes)
        show_steps(took)
        for phase, key in (("decode", "step_decode"), ("prefill", "step_store")):
            pairs = zip(took[phase]["ours"], took[phase]["none"], strict=True)
            out[key] = statistics.median(x / y for x, y in pairs)
    if wanted & {"hit", "store", "miss"}:
        cases |= measure_cpu(model, sizes, wanted)
    if wanted & {"fs_hit", "fs_miss"}:
        cases |= measure_fs(model, sizes, wanted, args.scratch)
    if cases:
        show_cases(cases, sizes)
        out |= results(cases, sizes)
    if "worst" in wanted:
        worst = measure_worst(model, sizes)
        rows = [[name, f"{us / 1e3:,.2f}", hook] for name, (us, hook) in worst.items()]
        table((f"longest hook call, {sizes.keys[1]:,} keys", "ms", "hook"), rows)
        out["worst_hook_ratio"] = worst["ours"][0] / worst["in-tree"][0]
    write_results(out, args.json)


if __name__ == "__main__":
    main()
