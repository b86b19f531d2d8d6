"""What rows that peers read have to hold: each is read for its checksum once, for as long as it stays the same.

A prefix that many engines share is pulled by each of them, and proved once.
"""

from array import array

from vllm_tiered_offload.tiers.block_frame import CHECKSUM_BYTES, Buffer, checksum_of, preferred_checksum
from vllm_tiered_offload.tiers.p2p.leases import PromisedRow
from vllm_tiered_offload.tiers.p2p.messages import Proof

_NEVER = -1


class RowProofs:
    """Of `num_rows` rows of `row_bytes`. 24 bytes a row, and nothing that a garbage collection would follow."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self._algorithm = preferred_checksum(row_bytes)
        # By row: its version (`Lease.versions`) when its checksum was worked out.
        self._versions = array("q", [_NEVER]) * num_rows
        self._checksums = bytearray(CHECKSUM_BYTES * num_rows)

    def has(self, row: PromisedRow) -> bool:
        """Whether the row need not be read for it."""
        return self._versions[row.row] == row.version

    def of(self, row: PromisedRow, payload: Buffer) -> Proof:
        """For the row, which holds `payload`."""
        start = row.row * CHECKSUM_BYTES
        place = slice(start, start + CHECKSUM_BYTES)
        if not self.has(row):
            self._checksums[place] = checksum_of(payload, self._algorithm).digest
            self._versions[row.row] = row.version
        return Proof(row.key, self._algorithm.value, bytes(self._checksums[place]))
