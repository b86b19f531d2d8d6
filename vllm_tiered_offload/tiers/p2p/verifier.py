"""Whether rows that came from peers are the chunks that were asked for."""

from collections.abc import Sequence

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.block_frame import (
    FrameError,
    FrameHeader,
    PayloadChecksum,
    decode_header,
    expect,
    proved_header,
    verify,
)
from vllm_tiered_offload.tiers.p2p.bounded_log import BoundedLog
from vllm_tiered_offload.tiers.p2p.instructions import Wanted
from vllm_tiered_offload.tiers.p2p.messages import Buffer, Proof


class RowVerifier:
    """Knows our rows, and the fingerprint that every frame header has to have: peers have shown theirs before."""

    def __init__(self, fingerprint: bytes, rows: Sequence[memoryview], log: BoundedLog) -> None:
        self._fingerprint = fingerprint
        self._rows = rows
        self._log = log

    def accept(self, wanted: Wanted, header: Buffer, payload: Buffer) -> bool:
        """Verified first, then copied: no byte that is not right ever gets into the row."""
        right = self._is_right(wanted, header, payload, None)
        if right:
            self._rows[wanted.row][:] = payload
        return right

    def is_right(self, wanted: Wanted, proof: Buffer | Proof, checksum: PayloadChecksum) -> bool:
        """Of a row that was read already: there is next to nothing left to do, unless something is wrong with it."""
        if proof == Proof(wanted.key, checksum.algorithm.value, checksum.digest):
            return True
        return self._is_right(wanted, proof, self._rows[wanted.row], checksum)

    def _is_right(
        self, wanted: Wanted, proof: Buffer | Proof, payload: Buffer, checksum: PayloadChecksum | None
    ) -> bool:
        size = len(self._rows[wanted.row])
        try:
            header = self._header(proof, size)
            expect(header, wanted.key, self._fingerprint, size)
            verify(header, payload, checksum)
        except FrameError as error:
            self._log.warning("corrupt", f"what a peer sent is not the chunk that was asked for: {error}")
            return False
        return True

    def _header(self, proof: Buffer | Proof, size: int) -> FrameHeader:
        if isinstance(proof, Proof):
            return proved_header(OffloadKey(proof.key), size, self._fingerprint, proof.algorithm, proof.checksum)
        return decode_header(proof)

    def close(self) -> None:
        """No row is touched any more."""
        self._rows = ()
