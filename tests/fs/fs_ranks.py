"""One data-parallel engine whose rows are shared by four ranks: `python fs_ranks.py ROOT NAME`.

Each rank's slot of a row has bytes of its own. Prints the names that it made, and what each rank found, as JSON.
"""

import json
import os
import sys
from itertools import accumulate, pairwise
from pathlib import Path

from fs_kit import Bench, content, fingerprint, keys_of, make_rows

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.fs.files import Files

GEOMETRY = RegionGeometry(16, (3000, 5000, 3000, 5000), 1)  # tensor parallel 2, in two stages of unequal size
MODEL = fingerprint(tensor_parallel=2, pipeline_parallel=2)
KEYS = keys_of("shared", GEOMETRY.num_rows)


class NotesNames(Files):
    """Remembers what it created."""

    def __init__(self) -> None:
        self.created: list[str] = []

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        if flags & os.O_CREAT:
            self.created.append(path)
        return fd


def slots(row: memoryview) -> list[memoryview]:
    ends = list(accumulate(GEOMETRY.slot_bytes, initial=0))
    return [row[start:end] for start, end in pairwise(ends)]


def bytes_of(key: OffloadKey, rank: int) -> bytes:
    return content(OffloadKey(key + bytes([rank])), GEOMETRY.slot_bytes[rank])


def fill(bench: Bench) -> None:
    for row, key in zip(bench.rows, KEYS, strict=True):
        for rank, slot in enumerate(slots(row)):
            slot[:] = bytes_of(key, rank)


def read(bench: Bench) -> tuple[int, list[int]]:
    """How many rows could be loaded, and the ranks all of whose slots in these hold what they had stored."""
    bench.wipe()
    loaded = set(bench.load(KEYS).successful_keys)
    parts = [(key, slots(row)) for row, key in zip(bench.rows, KEYS, strict=True) if key in loaded]
    ranks = range(GEOMETRY.num_ranks)
    return len(parts), [rank for rank in ranks if all(part[rank] == bytes_of(key, rank) for key, part in parts)]


def open_bench(root: str | Path, name: str, files: Files) -> Bench:
    rows = make_rows(GEOMETRY.num_rows, GEOMETRY.row_bytes)
    return Bench(root, rows=rows, real_lanes=True, files=files, model=MODEL, engine_id=name)


def main(root: str, name: str) -> None:
    files = NotesNames()
    bench = open_bench(root, name, files)
    fill(bench)
    print("ready", flush=True)
    sys.stdin.readline()
    answers = []
    for _ in range(8):
        assert bench.store(KEYS).success
        answers.append(read(bench))
        for key in KEYS[::2]:
            bench.path(key).unlink(missing_ok=True)
        bench.load(KEYS)  # notices what is gone
        fill(bench)
    assert bench.store(KEYS).success
    bench.tier.shutdown()
    print(json.dumps({"created": files.created, "answers": answers}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
