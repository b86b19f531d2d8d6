"""How fast rows are pulled from another process on loopback, against what moves the bytes.

    python ci/bench/p2p.py --json build/bench_p2p.json     # about three minutes
    python ci/bench/p2p.py --quick --only nixl_1mib        # while working on it

Rows of 1 MiB and of 8 MiB, 128 MiB of them a pull. Ours is timed from the load to its result, with leases and
checksums; the rate beside it is that of

    nixl        raw NIXL READs of the same rows, one READ for all or several small ones at a time, whichever is faster,
                by the transport that UCX chooses: on one machine, a system call that reads another process's memory.
                One agent posts them and checks nothing; ours has two agents where READs are such calls, and makes the
                checksums of what was read on the cores that read. The owner's were made when the rows were pulled first
    nixl_anew   the same, of rows that nobody has pulled since they were stored: the owner makes its checksums, too
    nixl_tcp    the same with UCX_TLS=tcp, as between machines
    sockets     sendall and recv_into between two processes
    curve       the same sockets, against our encrypted ones; shown, and nobody's target

Every turn measures each side once, in a new order. What counts are medians of the ratios of one turn; where the others
are two, of the one with the better median.
"""

import argparse
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from _output import log, table, write_results
from _p2p_sides import Puller, Rows, SocketPuller, TierPuller, keyed, raw_nixl

MIB = 1 << 20
PULL_BYTES = 128 * MIB
SIZES = {"1mib": MIB, "8mib": 8 * MIB}
TURNS, QUICK_TURNS = 41, 7
GOALS = {"nixl": 0.9, "nixl_tcp": 0.9, "sockets": 0.8}

MakeSides = Callable[[Rows], list[Puller]]  # ours, then theirs


@contextmanager
def ucx_over_tcp() -> Iterator[None]:
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = "tcp"
    try:
        yield
    finally:
        os.environ.pop("UCX_TLS")
        if before is not None:
            os.environ["UCX_TLS"] = before


def nixl(region: Rows) -> list[Puller]:
    return [TierPuller(region, "nixl", {}, {}), *raw_nixl(region)]


def nixl_anew(region: Rows) -> list[Puller]:
    return [TierPuller(region, "nixl", {}, {}, anew=True), *raw_nixl(region)]


def nixl_tcp(region: Rows) -> list[Puller]:
    with ucx_over_tcp():
        return nixl(region)


def sockets(region: Rows) -> list[Puller]:
    return [TierPuller(region, "sockets", {}, {}), SocketPuller(region)]


def curve(region: Rows) -> list[Puller]:
    with tempfile.TemporaryDirectory() as directory:
        owner, puller = keyed(Path(directory))
        return [TierPuller(region, "sockets", owner, puller), SocketPuller(region)]


CASES: dict[str, MakeSides] = {
    "nixl": nixl,
    "nixl_anew": nixl_anew,
    "nixl_tcp": nixl_tcp,
    "sockets": sockets,
    "curve": curve,
}


def measure(make_sides: MakeSides, row_bytes: int, turns: int) -> tuple[list[float], list[float]]:
    """Seconds of ours and of the best of theirs, one of each turn."""
    region = Rows(PULL_BYTES // row_bytes, row_bytes)
    sides = make_sides(region)
    seconds: list[list[float]] = [[] for _ in sides]
    order = list(range(len(sides)))
    try:
        for turn in range(-2, turns):
            random.shuffle(order)
            for side in order:
                spent = sides[side].pull()
                if turn >= 0:
                    seconds[side].append(spent)
    finally:
        for puller in sides:
            puller.close()
    return seconds[0], min(seconds[1:], key=statistics.median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--only", help="one case, such as sockets_8mib")
    arguments = parser.parse_args()
    turns = QUICK_TURNS if arguments.quick else TURNS
    figures: dict[str, float] = {}
    rows: list[list[str]] = []
    for case, make_sides in CASES.items():
        if case.startswith("nixl") and find_spec("nixl") is None:
            log(f"{case} is left out: nixl is not installed")
            continue
        for size, row_bytes in SIZES.items():
            name = f"{case}_{size}"
            if arguments.only in (None, name):
                ours, theirs = measure(make_sides, row_bytes, turns)
                ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
                figures[f"{name}_ratio"] = statistics.median(ratios)
                speeds = [PULL_BYTES / statistics.median(side) / 1e9 for side in (ours, theirs)]
                figures[f"{name}_gbps"] = speeds[0]
                spread = [min(ratios), statistics.median(ratios), max(ratios)]
                rows.append([name, *(f"{speed:.2f}" for speed in speeds), *(f"{ratio:.2f}" for ratio in spread)])
                rows[-1].append(f"{GOALS[case]:.1f}" if case in GOALS else "-")
                log(" ".join(rows[-1]))
    table(["rows", "ours GB/s", "theirs GB/s", "ratio min", "median", "max", "goal"], rows)
    write_results(figures, arguments.json)


if __name__ == "__main__":
    main()
