"""What `Pulling` is told and tells: where a peer is, what is wanted of it, and what its thread has to do."""

from typing import NamedTuple, Protocol, TypeAlias

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.block_frame import PayloadChecksum
from vllm_tiered_offload.tiers.p2p.messages import Buffer, Memory, Proof, Question

RoundId: TypeAlias = tuple[int, int]
"""(request, round)."""

PartId: TypeAlias = tuple[int, int, int]
"""(request, round, part)."""


class Address(NamedTuple):
    """Where a peer listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Source(NamedTuple):
    """Where a key can be fetched: one part of what a peer has promised, until `expires` (clock)."""

    address: Address
    request: int
    round: int
    part: int
    epoch: bytes
    expires: float
    row: int | None = None  # of the peer's region


class Wanted(NamedTuple):
    """One row of a job."""

    key: OffloadKey
    row: int
    source: Source

    @property
    def part_id(self) -> PartId:
        """What the row is called on the wire."""
        return self.source.request, self.source.round, self.source.part


class LandedRow(NamedTuple):
    """A part that was read out of the peer's memory into its row, and what is there now."""

    part_id: PartId
    checksum: PayloadChecksum


class Connect(NamedTuple):
    """Make a fresh connection to the peer."""

    address: Address


class Disconnect(NamedTuple):
    """Drop the connection, and what is queued for it. When that is done nothing of the peer gets into a row."""

    address: Address


class Say(NamedTuple):
    """Send this to the peer."""

    address: Address
    message: Question


class Attach(NamedTuple):
    """Prepare for reading the peer's memory, if that can be done: then tell `Pulling.can_read`."""

    address: Address
    memory: Memory


class Read(NamedTuple):
    """Read these rows out of the peer's memory into our rows, and ours for their checksums; tell `Pulling.landed`."""

    address: Address
    rows: tuple[Wanted, ...]


class Answered(NamedTuple):
    """The question (request, round) is answered: where each key is that somebody has."""

    request: int
    round: int
    found: dict[OffloadKey, Source]


class JobEnded(NamedTuple):
    """The job's one result. `corrupt` are keys whose bytes were wrong."""

    job_id: int
    good: tuple[OffloadKey, ...]
    corrupt: tuple[OffloadKey, ...]


Instruction: TypeAlias = Connect | Disconnect | Say | Attach | Read | Answered | JobEnded


class Verifier(Protocol):
    """Judges what has come."""

    def accept(self, wanted: Wanted, header: Buffer, payload: Buffer) -> bool:
        """Whether the payload is what the frame header was made for; then, and only then, it is in the row."""

    def is_right(self, wanted: Wanted, proof: Buffer | Proof, checksum: PayloadChecksum) -> bool:
        """Whether the row, whose checksum this is, holds what its proof, or the frame header it came with, says."""
