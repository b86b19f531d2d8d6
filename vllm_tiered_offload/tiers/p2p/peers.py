"""What the puller knows of each peer. No I/O."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.block_frame import PayloadChecksum
from vllm_tiered_offload.tiers.p2p.instructions import Address, PartId, RoundId, Wanted
from vllm_tiered_offload.tiers.p2p.messages import Proof


class Phase(Enum):
    """How far the conversation with a peer is."""

    CLOSED = "closed"
    GREETING = "greeting"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Job:
    """Rows that end in one result."""

    job_id: int
    deadline: float
    open: int
    good: list[OffloadKey] = field(default_factory=list)
    corrupt: list[OffloadKey] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Row:
    """One row of a job."""

    job: Job
    wanted: Wanted
    part_id: PartId
    is_landing: bool = False  # bytes get into it, until it is told to have landed or the peer is disconnected
    dropped: bool = False  # it has failed, and ends as soon as nothing gets into it any more
    is_read: bool = False  # out of the peer's memory; then
    checksum: PayloadChecksum | None = None  # of what has landed, and
    proof: Proof | None = None  # what is to be there


@dataclass(slots=True)
class Peer:
    """One address."""

    address: Address
    phase: Phase = Phase.CLOSED
    engine_id: str = ""  # what it called itself last
    strikes: int = 0  # failures in a row
    retry_at: float = -inf
    quiet_since: float = inf  # since it owes us something and says nothing; inf while it owes nothing
    pinged: bool = False  # since then
    can_read: bool = False  # its memory is attached
    reads_alone: bool = False  # and was read without its help
    asked: set[RoundId] = field(default_factory=set)  # questions that it has not answered
    owed: dict[PartId, Row] = field(default_factory=dict)  # rows asked for; at most WINDOW
    queue: deque[Row] = field(default_factory=deque)  # rows to be asked for; empty unless READY
    pulling_since: float | None = None  # while it owes us rows
    pulling_seconds: float = 0.0  # before that

    @property
    def owes(self) -> bool:
        """Whether it has to say something."""
        return bool(self.asked or self.owed)

    @property
    def rows(self) -> list[Row]:
        """All that were not ended."""
        return [*self.owed.values(), *self.queue]

    def begin_to_owe(self, now: float) -> None:
        """Call it before something is added to `asked` or `owed`."""
        if not self.owes:
            self.quiet_since, self.pinged = now, False

    def begin_to_owe_rows(self, rows: Sequence[Row], now: float) -> None:
        """They are asked for."""
        self.begin_to_owe(now)
        self.owed.update((row.part_id, row) for row in rows)
        if self.pulling_since is None:
            self.pulling_since = now

    def settle(self, now: float) -> None:
        """Call it after something has left `asked` or `owed`."""
        if not self.owed and self.pulling_since is not None:
            self.pulling_seconds += now - self.pulling_since
            self.pulling_since = None
        if not self.owes:
            self.quiet_since, self.pinged = inf, False

    def is_alive(self, now: float) -> None:
        """Something came from it."""
        if self.owes:
            self.quiet_since, self.pinged = now, False
