"""Verifies rows where they are, on a thread of its own: checksums let go of the interpreter lock."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.block_frame import FrameError, RunningChecksum, decode_header, expect, verify
from vllm_tiered_offload.tiers.p2p.instructions import Address, Check, PartId
from vllm_tiered_offload.tiers.p2p.messages import Buffer


class Checked(NamedTuple):
    """`num_bytes` were right, frame included; or they were not, and `error` says why."""

    address: Address
    part_id: PartId
    num_bytes: int
    error: str | None


class RowChecker:
    """`ring` is called on the other thread when there is something for `results`, once for all rows of a Check."""

    def __init__(self, fingerprint: bytes, rows: Sequence[memoryview], ring: Callable[[], None]) -> None:
        self._fingerprint = fingerprint
        self._rows = rows
        self._ring = ring
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="p2p-tier-checker")
        self._results: deque[Checked] = deque()

    def submit(self, check: Check) -> None:
        """Ends in one Checked for each row."""
        self._thread.submit(self._check, check)

    def _check(self, check: Check) -> None:
        for wanted, header in check.rows:
            row = self._rows[wanted.row]
            error = find_fault(wanted.key, header, row, self._fingerprint)
            self._results.append(Checked(check.address, wanted.part_id, len(header) + len(row), error))
        self._ring()

    def results(self) -> Iterator[Checked]:
        """Those that are there."""
        while self._results:
            yield self._results.popleft()

    def close(self) -> None:
        """When this returns no row is read any more."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._rows = ()


def find_fault(
    key: OffloadKey, header: Buffer, payload: Buffer, fingerprint: bytes, running: RunningChecksum | None = None
) -> str | None:
    """Why the payload, which `running` may have read already, is not the chunk; or None."""
    try:
        frame = decode_header(header)
        expect(frame, key, fingerprint, len(payload))
        verify(frame, payload, running)
    except FrameError as error:
        return str(error)
    return None
