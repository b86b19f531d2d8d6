"""Checking a whole root with several threads."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from vllm_tiered_offload.tiers.fs.faults import Fault
from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.inspect import BadFile, Entry, Kind, OnTrouble, RootSurvey, check_chunk, walk


@dataclass(slots=True)
class Verification:
    """`unchecked` are files of which nothing can be said: not readable, or of a kind that this process cannot check."""

    chunks: int = 0
    bytes: int = 0
    bad: list[BadFile] = field(default_factory=list)
    unchecked: list[BadFile] = field(default_factory=list)

    def add(self, file: BadFile | None) -> None:
        if file is not None and file.fault is not Fault.GONE:
            (self.bad if file.fault.condemns_file else self.unchecked).append(file)


def verify_root(
    found: RootSurvey, files: Files, on_trouble: OnTrouble, threads: int, advance: Callable[[int], None]
) -> Verification:
    """Check the manifests of a survey and every chunk that is there by now. `advance` is told of bytes read."""
    result = Verification()
    for namespace in found.namespaces.values():
        # One that is missing is no fault: chunks say themselves whose they are, and the next store makes a new one.
        result.add(namespace.problem)
    for entry, bad in _check_all(found.root, files, on_trouble, threads):
        advance(entry.size)
        if bad is None or bad.fault is not Fault.GONE:
            result.chunks += 1
            result.bytes += entry.size
        result.add(bad)
    return result


def _check_all(root: str, files: Files, on_trouble: OnTrouble, threads: int) -> Iterator[tuple[Entry, BadFile | None]]:
    """In the order of the walk, a few files ahead of the reader."""
    ahead: deque[tuple[Entry, Future[BadFile | None]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for entry in walk(root, on_trouble):
            if entry.kind is Kind.CHUNK:
                ahead.append((entry, pool.submit(check_chunk, files, entry)))
            if len(ahead) > 4 * threads:
                entry, bad = ahead.popleft()
                yield entry, bad.result()
        for entry, bad in ahead:
            yield entry, bad.result()
