"""Verifies rows where they are, on a thread of its own: checksums let go of the interpreter lock."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.block_frame import FrameError, decode_header, expect, verify
from vllm_tiered_offload.tiers.p2p.instructions import Address, Check, PartId
from vllm_tiered_offload.tiers.p2p.messages import Buffer


class Checked(NamedTuple):
    """`num_bytes` were right, frame included; or they were not, and `error` says why."""

    address: Address
    part_id: PartId
    num_bytes: int
    error: str | None


class RowChecker:
    """`ring` is called on the other thread when there is something for `results`."""

    def __init__(self, fingerprint: bytes, ring: Callable[[], None]) -> None:
        self._fingerprint = fingerprint
        self._ring = ring
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="p2p-tier-checker")
        self._results: deque[Checked] = deque()

    def submit(self, check: Check, row: memoryview) -> None:
        """Ends in one Checked."""
        self._thread.submit(self._check, check, row)

    def _check(self, check: Check, row: memoryview) -> None:
        error = find_fault(check.wanted.key, check.header, row, self._fingerprint)
        self._results.append(Checked(check.address, check.wanted.part_id, len(check.header) + len(row), error))
        self._ring()

    def results(self) -> Iterator[Checked]:
        """Those that are there."""
        while self._results:
            yield self._results.popleft()

    def close(self) -> None:
        """When this returns no row is read any more."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def find_fault(key: OffloadKey, header: Buffer, payload: Buffer, fingerprint: bytes) -> str | None:
    """Why the payload is not the chunk, or None."""
    try:
        frame = decode_header(header)
        expect(frame, key, fingerprint, len(payload))
        verify(frame, payload)
    except FrameError as error:
        return str(error)
    return None
