"""Where peers reach an owner. Behind it are plain TCP (tcp_listener.py) and CURVE (curve_listener.py)."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_tiered_offload.tiers.block_frame import PayloadChecksum
from vllm_tiered_offload.tiers.p2p.leases import PeerId
from vllm_tiered_offload.tiers.p2p.messages import Buffer
from vllm_tiered_offload.tiers.p2p.serving import UserId


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message of a peer, or what is no message: None where that is known already."""

    peer: PeerId
    user: UserId
    message: Buffer | None


@dataclass(frozen=True, slots=True)
class Gone:
    """The connection has ended. `stuck` if that was because the peer does not take what it asked for."""

    peer: PeerId
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class RowToSend:
    """A row. It may be read while `holds()`, and `done()` is called after that.

    `prove` makes the header, which goes behind it, of its checksum. Where that is not `known` the row is read for it,
    piece by piece as it is sent, so that its bytes are in the cache.
    """

    part: int
    row: memoryview
    known: PayloadChecksum | None
    prove: Callable[[PayloadChecksum], bytes]
    holds: Callable[[], bool]
    done: Callable[[], None]


class Listener(Protocol):
    """One thread owns it. No call blocks, and none raises because of what a peer does."""

    port: int

    def begin(self) -> None:
        """From now on messages are taken; before that they wait."""

    def arrivals(self, ready: Collection[object]) -> Iterator[Arrived | Gone]:
        """What has come on the sockets that are ready, and what time has ended."""

    def say(self, peer: PeerId, message: bytes) -> bool:
        """Send a message; whether there was room for it."""

    def send_rows(self, peer: PeerId, request: int, round_: int, rows: Sequence[RowToSend]) -> bool:
        """Send Data with these rows; whether there was room for it."""

    def welcome(self, peer: PeerId) -> None:
        """The peer is no stranger any more."""

    def drop(self, peer: PeerId) -> None:
        """Nothing more is said to the peer."""

    @property
    def next_timer(self) -> float | None:
        """When (clock) `arrivals` has something to do although nothing has come."""

    def close(self) -> None:
        """Nobody is listened to any more."""
