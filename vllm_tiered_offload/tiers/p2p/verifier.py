"""Whether rows that came from peers are the chunks that were asked for."""

from collections.abc import Sequence

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.block_frame import FrameError, RunningChecksum, decode_header, expect, verify
from vllm_tiered_offload.tiers.p2p.bounded_log import BoundedLog
from vllm_tiered_offload.tiers.p2p.instructions import Wanted
from vllm_tiered_offload.tiers.p2p.messages import Buffer


class RowVerifier:
    """Knows our rows, and the fingerprint that every frame header has to have."""

    def __init__(self, fingerprint: bytes, rows: Sequence[memoryview], log: BoundedLog) -> None:
        self._fingerprint = fingerprint
        self._rows = rows
        self._log = log

    def accept(self, wanted: Wanted, header: Buffer, payload: Buffer) -> bool:
        """Verified first, then copied: no byte that is not right ever gets into the row."""
        row = self._rows[wanted.row]
        right = self._is_right(wanted.key, header, payload, len(row))
        if right:
            row[:] = payload
        return right

    def is_right(self, wanted: Wanted, header: Buffer, checksum: RunningChecksum) -> bool:
        """Of a row that was read for its checksum as it came: there is next to nothing left to do."""
        row = self._rows[wanted.row]
        return self._is_right(wanted.key, header, row, len(row), checksum)

    def _is_right(
        self, key: OffloadKey, header: Buffer, payload: Buffer, size: int, checksum: RunningChecksum | None = None
    ) -> bool:
        try:
            frame = decode_header(header)
            expect(frame, key, self._fingerprint, size)
            verify(frame, payload, checksum)
        except FrameError as error:
            self._log.warning("corrupt", f"what a peer sent is not the chunk that was asked for: {error}")
            return False
        return True

    def close(self) -> None:
        """No row is touched any more."""
        self._rows = ()
