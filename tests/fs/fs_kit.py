"""Short hands for tests of the filesystem tier: rows, lanes that run when told, files that fail when told."""

import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_tiered_offload.contract.fingerprint import FIELDS, Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import JobMetadata, JobResult, LookupResult, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey, make_offload_key
from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.lanes import Lanes
from vllm_tiered_offload.tiers.fs.tier import FsTier

ROW = 4096
FRAME = ROW + 4096
REQ = ReqContext("req")
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


def fingerprint(**changes: object) -> Fingerprint:
    return Fingerprint.of({**dict.fromkeys(FIELDS, None), "model": "tiny", **changes})


def keys_of(name: str, count: int, start: int = 0) -> list[OffloadKey]:
    """Keys that look like real ones."""
    return [
        make_offload_key(hashlib.sha256(f"{name}{index}".encode()).digest(), 0) for index in range(start, start + count)
    ]


def make_rows(count: int, row_bytes: int = ROW, shift: int = 0) -> list[memoryview]:
    """Rows of a page-aligned mapping; `shift` moves them off the alignment."""
    whole = memoryview(mmap.mmap(-1, count * row_bytes + shift or 1))
    return [whole[shift + i * row_bytes : shift + (i + 1) * row_bytes] for i in range(count)]


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class InlineLane:
    """Runs a job at once, on the caller's thread."""

    def submit(self, job: Callable[[], None], /) -> None:
        job()

    def shutdown(self, wait: bool = True) -> None:
        pass


class HandLane:
    """Keeps jobs until the test runs them, in any order."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None], /) -> None:
        self.jobs.append(job)

    def run(self, index: int = 0) -> None:
        self.jobs.pop(index)()

    def run_all(self) -> None:
        while self.jobs:
            self.run()

    def shutdown(self, wait: bool = True) -> None:
        pass


def inline_lanes(**lanes: Any) -> Lanes:
    inline = InlineLane()
    return Lanes(**{name: lanes.get(name, inline) for name in ("read", "write", "lookup", "background")})


class FaultyFiles(Files):
    """`rules[operation](path or descriptor)` may raise, or return something that replaces the real call's result."""

    def __init__(self) -> None:
        self.rules: dict[str, Callable[[Any], object]] = {}
        self.calls: list[str] = []

    def fail(self, operation: str, number: int, times: int = 1 << 30, match: str = "") -> None:
        """Raise OSError(number) the next `times` times for targets whose name contains `match`."""
        left = [times]

        def rule(target: object) -> None:
            if left[0] and match in str(target):
                left[0] -= 1
                raise OSError(number, os.strerror(number))

        self.rules[operation] = rule

    def _apply(self, operation: str, target: object) -> None:
        self.calls.append(operation)
        if operation in self.rules:
            self.rules[operation](target)


def _intercepted(operation: str) -> Callable[..., object]:
    real = getattr(Files, operation)

    def call(self: FaultyFiles, target: Any, *rest: Any) -> object:
        self._apply(operation, target)
        return real(self, target, *rest)

    return call


OPERATIONS = [
    "open", "close", "size", "info", "chmod", "preadv", "pwritev", "fdatasync", "rename", "unlink", "mkdir", "rmdir",
    "listdir", "scandir", "free_bytes",
]  # fmt: skip
for _operation in OPERATIONS:
    setattr(FaultyFiles, _operation, _intercepted(_operation))


class Bench:
    """A tier, its rows, and numbered jobs."""

    def __init__(
        self,
        root: str | Path,
        *,
        rows: Sequence[memoryview] | None = None,
        num_rows: int = 8,
        lanes: Lanes | None = None,
        real_lanes: bool = False,
        files: Files | None = None,
        model: Fingerprint | None = None,
        engine_id: str = "engine",
        events: bool = False,
        **settings: object,
    ) -> None:
        self.rows = list(rows) if rows is not None else make_rows(num_rows)
        self.clock = Clock()
        self.files = files or FaultyFiles()
        self.tier = FsTier.from_settings(
            {"root": str(root), **settings},
            "tiers[0]",
            engine_id=engine_id,
            events=events,
            lanes=None if real_lanes else lanes or inline_lanes(),
            files=self.files,
            clock=self.clock,
        )
        size = self.rows[0].nbytes
        self.tier.bind_region(self.rows, RegionGeometry(len(self.rows), (size,), 1), model or fingerprint())
        self.tier.on_schedule_end()
        self._next_job = 0

    def submit(self, keys: Sequence[OffloadKey], rows: Sequence[int] | None = None, *, load: bool) -> int:
        self._next_job += 1
        block_ids = tuple(rows if rows is not None else range(len(keys)))
        job = JobMetadata(self._next_job, tuple(keys), block_ids, load, REQ)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self._next_job

    def store(self, keys: Sequence[OffloadKey], rows: Sequence[int] | None = None) -> JobResult:
        return self._await(self.submit(keys, rows, load=False))

    def load(self, keys: Sequence[OffloadKey], rows: Sequence[int] | None = None) -> JobResult:
        return self._await(self.submit(keys, rows, load=True))

    def _await(self, job_id: int) -> JobResult:
        assert self.tier.drain(20)
        [result] = self.tier.get_finished_jobs()
        assert result.job_id == job_id
        return result

    def lookup(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """The answers once they are known (two passes with inline lanes)."""
        self.tier.lookup(keys, REQ)
        self.tier.on_schedule_end()
        answers = self.tier.lookup(keys, REQ)
        self.tier.on_schedule_end()
        return answers

    def fill(self, keys: Sequence[OffloadKey]) -> None:
        """Each key's own bytes into row i."""
        for row, key in zip(self.rows, keys, strict=False):
            row[:] = content(key, row.nbytes)

    def wipe(self) -> None:
        for row in self.rows:
            row[:] = b"\xee" * row.nbytes

    def stat(self, name: str) -> int | float:
        return self.tier.get_stats().get(name, 0)

    def failures(self, direction: str) -> dict[str, int]:
        prefix = f"tier_failures_total|tier=fs|direction={direction}|kind="
        return {
            name.removeprefix(prefix): value for name, value in self.tier.get_stats().items() if name.startswith(prefix)
        }

    def path(self, key: OffloadKey) -> Path:
        return Path(self.tier._holdings.namespace.file_path(key))

    def assert_idle(self) -> None:
        self.tier.check()
        assert not any(self.tier.leftovers().values()), self.tier.leftovers()


def content(key: OffloadKey, size: int) -> bytes:
    """Bytes that belong to a key and to no other."""
    return hashlib.shake_128(key).digest(size)


def chunk_files(root: str | Path) -> list[Path]:
    """Every chunk below `root`, temporaries and manifests left out."""
    return sorted(path for path in Path(root).rglob("*") if path.is_file() and len(path.name) > 20 and path.suffix == ""
                  and not path.name.startswith(".tmp-"))  # fmt: skip


def temporaries(root: str | Path) -> list[str]:
    return sorted(path.name for path in Path(root).rglob(".tmp-*"))
