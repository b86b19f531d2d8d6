"""`python -m vllm_tiered_offload.testing.simulator`: random runs, a JSON report, exit code 1 on a broken invariant."""

import argparse
import atexit
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from vllm_tiered_offload.testing.simulator.config import OURS
from vllm_tiered_offload.testing.simulator.episodes import Failure, run_seed
from vllm_tiered_offload.testing.simulator.report import Totals


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m vllm_tiered_offload.testing.simulator", description=__doc__)
    made.add_argument("--steps", type=int, default=20_000, help="steps with tokens or jobs, all seeds together")
    made.add_argument("--seed", type=int, default=1, help="first seed")
    made.add_argument("--seeds", type=int, default=1, help="how many seeds; more than one run in parallel processes")
    made.add_argument("--jobs", type=int, default=2, help="processes at a time when there are several seeds")
    made.add_argument("--episode", type=int, help="run this one episode of the seed and nothing else")
    made.add_argument("--shrink", type=float, default=60.0, help="seconds to look for a shorter way to a violation")
    made.add_argument("--report", type=Path, help="where to write the JSON report")
    made.add_argument("--no-connector", action="store_true", help="vLLM alone, to see what the simulation costs")
    made.add_argument("--quiet", action="store_true", help="no progress lines")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if every invariant held."""
    options = parser().parse_args(argv)
    began = time.perf_counter()
    totals, failures = Totals(), []
    for part, failed in _run_all(options):
        totals.add(part)
        failures += failed
    report = totals.as_json(time.perf_counter() - began)
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    for failure in failures:
        print(f"VIOLATION {failure}", file=sys.stderr)
    if options.episode is None and not options.no_connector:
        for line in totals.shortfalls():
            print(f"too tame: {line}", file=sys.stderr)
    return 1 if failures else 0


def _run_all(options: argparse.Namespace) -> list[tuple[Totals, list[Failure]]]:
    connector = None if options.no_connector else OURS
    seeds = range(options.seed, options.seed + options.seeds)
    steps = -(-options.steps // options.seeds)
    work = [(seed, steps, connector, options) for seed in seeds]
    if len(work) == 1:
        return [_run_one(work[0])]
    # Spawned, not forked: a forked child would share vLLM's and torch's threads.
    with ProcessPoolExecutor(max_workers=options.jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_run_one, work))


def _run_one(work: tuple[int, int, tuple[str, str] | None, argparse.Namespace]) -> tuple[Totals, list[Failure]]:
    seed, steps, connector, options = work
    # Failing copies, refused resets and tiers that are switched off are the point here: not worth a line each.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.getLogger("vllm_tiered_offload").setLevel(logging.CRITICAL)
    _keep_imports_out_of_collections()
    say = _silent if options.quiet else _say
    return run_seed(seed, steps, connector, say, options.episode, options.shrink)


def _keep_imports_out_of_collections() -> None:
    """As vLLM's engine does: what torch and vLLM made when they were imported is not looked at again."""
    from vllm_tiered_offload.testing.simulator import engine  # noqa: F401

    gc.freeze()
    atexit.register(gc.unfreeze)  # some of it wants to be collected at the end


def _say(line: str) -> None:
    print(line, flush=True)


def _silent(_line: str) -> None:
    pass
