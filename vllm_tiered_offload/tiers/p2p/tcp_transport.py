"""The plain connections of a puller: TCP, and rows land where they belong as they come.

A connection is made on a thread of its own, because finding a name's address blocks. What is said before it is there
waits for it.
"""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from vllm_tiered_offload.tiers.block_frame import HEADER_BYTES, RunningChecksum
from vllm_tiered_offload.tiers.p2p.framing import LENGTH, PIECE_BYTES, frame, set_options
from vllm_tiered_offload.tiers.p2p.instructions import Address
from vllm_tiered_offload.tiers.p2p.messages import MAX_MESSAGE_BYTES, Data, MessageError, decode_answer
from vllm_tiered_offload.tiers.p2p.transport import Event, Garbled, Heard, Lost, Moving, PlaceRow

CONNECT_SECONDS = 2.0
BYTES_A_TURN = 4 << 20  # of one connection, before others have theirs
WAKE_BYTES = 256 << 10
MAX_UNSENT = 4 << 20  # bytes said to a peer that does not take them


class _Dialled(NamedTuple):
    connection: "_Connection"
    sock: socket.socket | None  # None: it could not be made


class _Bytes:
    """Bytes to come that are a message, or the length of one."""

    def __init__(self, size: int) -> None:
        self.buffer = memoryview(bytearray(size))
        self.left = size

    def room(self) -> list[memoryview]:
        """Where the next bytes go."""
        return [self.buffer[len(self.buffer) - self.left :]]

    def advance(self, count: int) -> None:
        """So many bytes have come."""
        self.left -= count


class _Landing:
    """One part of Data to come: its row, which is read for its checksum as it comes, and its header."""

    def __init__(self, part: int, row: memoryview | None, unwanted: memoryview) -> None:
        self.part = part
        self.row = unwanted if row is None else row
        self.header = memoryview(bytearray(HEADER_BYTES))
        self.left = len(self.row) + HEADER_BYTES
        self.checksum = None if row is None else RunningChecksum(len(row))

    @property
    def _of_row(self) -> int:
        """Bytes of the row that are there."""
        return min(len(self.row), len(self.row) + HEADER_BYTES - self.left)

    def room(self) -> list[memoryview]:
        """Where the next bytes go: a piece of the row, with the header if that is the last one."""
        start = self._of_row
        if len(self.row) - start > PIECE_BYTES:
            return [self.row[start : start + PIECE_BYTES]]
        header = self.header[HEADER_BYTES - min(self.left, HEADER_BYTES) :]
        return [self.row[start:], header] if start < len(self.row) else [header]

    def advance(self, count: int) -> None:
        """So many bytes have come."""
        start = self._of_row
        self.left -= count
        if self.checksum is not None and self._of_row > start:
            self.checksum.add(self.row[start : self._of_row])


@dataclass(slots=True, eq=False)
class _Connection:
    address: Address
    sock: socket.socket | None = None  # None while it is being made
    dropped: bool = False
    unsent: bytearray = field(default_factory=bytearray)
    # What is being received, and what to do when it is there.
    coming: _Bytes | _Landing = field(default_factory=lambda: _Bytes(LENGTH.size))
    step: Callable[["_Connection"], Event | None] | None = None
    # The last Data whose rows have not all come, and its parts that are behind what is being received.
    data: Data | None = None
    parts: deque[int] = field(default_factory=deque)
    enough: int = 1  # bytes that have to be there to wake us

    def expect(self, coming: _Bytes | _Landing, step: Callable[["_Connection"], Event | None]) -> None:
        self.coming, self.step = coming, step


class TcpTransport:
    """A connection to each peer. `ring` wakes the thread that owns this; `place` says where a row goes."""

    def __init__(self, poller: zmq.Poller, row_bytes: int, place: PlaceRow, ring: Callable[[], None]) -> None:
        self._poller = poller
        self._place = place
        self._ring = ring
        # The connection of each peer, made or being made.
        self._connections: dict[Address, _Connection] = {}
        self._dialled: deque[_Dialled] = deque()  # from their threads
        self._unwanted = memoryview(bytearray(row_bytes))  # where rows go that nobody wants any more

    def connect(self, address: Address) -> None:
        self.disconnect(address)
        connection = self._connections[address] = _Connection(address)
        self._expect_length(connection)
        threading.Thread(target=self._dial, args=[connection], name="p2p-tier-dial", daemon=True).start()

    def _dial(self, connection: _Connection) -> None:
        """On a thread of its own."""
        made: socket.socket | None = None
        with contextlib.suppress(OSError):
            made = socket.create_connection(connection.address, timeout=CONNECT_SECONDS)
            set_options(made)
        self._dialled.append(_Dialled(connection, made))
        self._ring()

    def disconnect(self, address: Address) -> None:
        connection = self._connections.pop(address, None)
        if connection is None:
            return
        connection.dropped = True
        if connection.sock is not None:
            self._poller.unregister(connection.sock.fileno())
            connection.sock.close()

    def say(self, address: Address, message: bytes) -> bool:
        connection = self._connections.get(address)
        if connection is None or len(connection.unsent) > MAX_UNSENT:
            return False
        connection.unsent += frame(message)
        return connection.sock is None or self._send(connection, connection.sock)

    def _send(self, connection: _Connection, to: socket.socket) -> bool:
        """As much as goes; whether the connection lives."""
        try:
            while connection.unsent:
                del connection.unsent[: to.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        self._wait_for(connection, to, 1)  # who was asked something shows by the next byte that it is alive
        self._poller.register(to.fileno(), zmq.POLLIN | (zmq.POLLOUT if connection.unsent else 0))
        return True

    def events(self, ready: Collection[object]) -> Iterator[Event]:
        while self._dialled:
            yield from self._begin(*self._dialled.popleft())
        for connection in list(self._connections.values()):
            if connection.sock is not None and connection.sock.fileno() in ready:
                yield from self._receive(connection, connection.sock)
                if not connection.dropped and connection.unsent and not self._send(connection, connection.sock):
                    yield Lost(connection.address)

    def _begin(self, connection: _Connection, made: socket.socket | None) -> Iterator[Event]:
        if connection.dropped:
            if made is not None:
                made.close()
            return
        if made is not None:
            connection.sock = made
            self._poller.register(made.fileno(), zmq.POLLIN)
            if self._send(connection, made):
                return
        yield Lost(connection.address)

    def _receive(self, connection: _Connection, source: socket.socket) -> Iterator[Event]:
        budget = BYTES_A_TURN
        while budget > 0 and not connection.dropped:
            try:
                count = source.recvmsg_into(connection.coming.room())[0]
            except BlockingIOError:
                break
            except OSError:
                count = 0
            if not count:
                yield Lost(connection.address)
                return
            budget -= count
            connection.coming.advance(count)
            if not connection.coming.left and connection.step is not None:
                event = connection.step(connection)
                if event is not None:
                    yield event
        if connection.dropped:
            return
        self._wait_for(connection, source, min(connection.coming.left, WAKE_BYTES))
        if isinstance(connection.coming, _Landing):
            yield Moving(connection.address)

    def _wait_for(self, connection: _Connection, source: socket.socket, enough: int) -> None:
        """Be woken when so many bytes are there: of a row, more than the next packet, which costs less than waking."""
        if enough != connection.enough:
            connection.enough = enough
            source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)

    # ---- what comes, part by part ------------------------------------------------------------------------------

    def _expect_length(self, connection: _Connection) -> None:
        connection.data = None
        connection.expect(_Bytes(LENGTH.size), self._on_length)

    def _on_length(self, connection: _Connection) -> Event | None:
        assert isinstance(connection.coming, _Bytes)
        [length] = LENGTH.unpack(connection.coming.buffer)
        if not 0 < length <= MAX_MESSAGE_BYTES:
            return Garbled(connection.address)
        connection.expect(_Bytes(length), self._on_message)
        return None

    def _on_message(self, connection: _Connection) -> Event | None:
        assert isinstance(connection.coming, _Bytes)
        try:
            answer = decode_answer(connection.coming.buffer)
        except MessageError:
            return Garbled(connection.address)
        if isinstance(answer, Data):
            connection.data = answer
            connection.parts.extend(answer.parts)
            self._expect_row(connection, answer)
            return None
        self._expect_length(connection)
        return Heard(connection.address, answer)

    def _expect_row(self, connection: _Connection, data: Data) -> None:
        part = connection.parts.popleft()
        row = self._place(connection.address, (data.request, data.round, part))
        connection.expect(_Landing(part, row, self._unwanted), self._on_row)

    def _on_row(self, connection: _Connection) -> Event | None:
        data, came = connection.data, connection.coming
        assert data is not None
        assert isinstance(came, _Landing)
        if connection.parts:
            self._expect_row(connection, data)
        else:
            self._expect_length(connection)
        if came.checksum is None:
            return None
        one = Data(data.request, data.round, (came.part,))
        return Heard(connection.address, one, [came.header], came.checksum.finish())

    def close(self) -> None:
        for address in list(self._connections):
            self.disconnect(address)
