"""Ranks and replicas in one directory."""

import json
import subprocess
import sys
from pathlib import Path

import fs_ranks
from fs_kit import MISS, Bench, fingerprint, make_rows, temporaries

from vllm_tiered_offload.tiers.fs.files import Files


def test_case_52_two_replicas_of_four_ranks_in_one_directory(tmp_path: Path) -> None:
    """Tensor parallel 2, pipeline parallel 2, data parallel 2, all with one engine id, as people configure it.

    A rank has no file: a chunk is one row, in which each rank has its slot. The replicas have the same bytes and
    share them; no name that one makes is ever made by the other. Mutation: leaving the process id out of a temporary's
    name.
    """
    command = [sys.executable, fs_ranks.__file__, str(tmp_path), "same id"]
    pipe = subprocess.PIPE
    engines = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for engine in engines:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write("go\n")
        engine.stdin.flush()
    told = [json.loads(engine.communicate(timeout=120)[0]) for engine in engines]
    for one in told:
        # The other one removes files all the time, so not every row is there; what is there is right.
        assert all(ranks == [0, 1, 2, 3] for _, ranks in one["answers"])
        assert sum(rows for rows, _ in one["answers"])
    names = [name for one in told for name in one["created"]]
    assert len(names) == len(set(names))
    assert sum(one["created"] != [] for one in told) == 2, "both have written"
    assert not temporaries(tmp_path)
    third = fs_ranks.open_bench(tmp_path, "third", Files())
    rows, ranks = fs_ranks.read(third)
    assert rows >= len(fs_ranks.KEYS) // 2
    assert ranks == [0, 1, 2, 3]
    third.tier.shutdown()


def test_case_52_the_same_number_of_ranks_cut_otherwise_is_another_namespace(tmp_path: Path) -> None:
    """Four ranks as 4 x 1 have rows of the same size, with other bytes in them."""
    first = fs_ranks.open_bench(tmp_path, "first", Files())
    fs_ranks.fill(first)
    assert first.store(fs_ranks.KEYS).success
    first.tier.shutdown()
    rows = make_rows(fs_ranks.GEOMETRY.num_rows, fs_ranks.GEOMETRY.row_bytes)
    other = Bench(tmp_path, rows=rows, model=fingerprint(tensor_parallel=4, pipeline_parallel=1))
    assert other.lookup(fs_ranks.KEYS) == [MISS] * len(fs_ranks.KEYS)
    assert other.load(fs_ranks.KEYS).successful_keys == ()
