"""How a puller reaches its peers. Behind it are plain TCP (tcp_transport.py) and CURVE (curve_transport.py)."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from vllm_tiered_offload.tiers.block_frame import PayloadChecksum
from vllm_tiered_offload.tiers.p2p.instructions import Address, PartId
from vllm_tiered_offload.tiers.p2p.messages import Answer, Buffer


@dataclass(frozen=True, slots=True)
class Heard:
    """A message of a peer. Data is told part by part.

    Behind it: its header, and its payload unless that is in the row that it belongs to. In that case it was read as it
    came, for its `checksum`.
    """

    address: Address
    answer: Answer
    behind: Sequence[Buffer] = ()
    checksum: PayloadChecksum | None = None


@dataclass(frozen=True, slots=True)
class Garbled:
    """What a peer said is no message."""

    address: Address


@dataclass(frozen=True, slots=True)
class Moving:
    """A large message is on its way."""

    address: Address


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to a peer is gone, or could not be made."""

    address: Address


Event: TypeAlias = Heard | Garbled | Moving | Lost

PlaceRow: TypeAlias = Callable[[Address, PartId], memoryview | None]
"""Where the payload of a part goes as it comes; None where it is not wanted."""


class Transport(Protocol):
    """One thread owns it. No call blocks."""

    def connect(self, address: Address) -> None:
        """Begin a fresh connection."""

    def disconnect(self, address: Address) -> None:
        """Drop the connection and whatever is queued for it; nothing more is heard of it or gets into a row."""

    def say(self, address: Address, message: bytes) -> bool:
        """Queue a message; whether there was room for it."""

    def events(self, ready: Collection[object]) -> Iterator[Event]:
        """What has happened on the sockets that are ready."""

    def close(self) -> None:
        """Drop all connections."""
