"""What rows that peers get have to hold: each is read for its checksum once, for as long as it stays the same.

A prefix that many engines share is pulled by each of them, and proved once.
"""

from array import array

from vllm_tiered_offload.tiers.block_frame import (
    CHECKSUM_BYTES,
    Buffer,
    PayloadChecksum,
    checksum_of,
    preferred_checksum,
)
from vllm_tiered_offload.tiers.p2p.leases import PromisedRow
from vllm_tiered_offload.tiers.p2p.messages import Proof

_NEVER = -1


class RowProofs:
    """Of `num_rows` rows of `row_bytes`. 24 bytes a row, and nothing that a garbage collection would follow."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self._algorithm, self._row_bytes = preferred_checksum(row_bytes), row_bytes
        # By row: its version (`Lease.versions`) when its checksum was worked out.
        self._versions = array("q", [_NEVER]) * num_rows
        self._checksums = bytearray(CHECKSUM_BYTES * num_rows)

    def has(self, row: PromisedRow) -> bool:
        """Whether the row need not be read for it."""
        return self._versions[row.row] == row.version

    def checksum(self, row: PromisedRow) -> PayloadChecksum | None:
        """What the row was found to hold."""
        if not self.has(row):
            return None
        start = row.row * CHECKSUM_BYTES
        return PayloadChecksum(self._algorithm, self._row_bytes, bytes(self._checksums[start : start + CHECKSUM_BYTES]))

    def keep(self, row: PromisedRow, found: PayloadChecksum) -> None:
        """The row was read, and found to hold this."""
        start = row.row * CHECKSUM_BYTES
        self._checksums[start : start + CHECKSUM_BYTES] = found.digest
        self._versions[row.row] = row.version

    def of(self, row: PromisedRow, payload: Buffer) -> Proof:
        """For the row, which holds `payload`."""
        found = self.checksum(row)
        if found is None:
            found = checksum_of(payload, self._algorithm)
            self.keep(row, found)
        return Proof(row.key, found.algorithm.value, found.digest)
