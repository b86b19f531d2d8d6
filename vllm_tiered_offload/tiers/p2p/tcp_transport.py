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

from vllm_tiered_offload.tiers.block_frame import HEADER_BYTES
from vllm_tiered_offload.tiers.p2p.framing import LENGTH, frame, set_options
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


@dataclass(slots=True, eq=False)
class _Connection:
    address: Address
    sock: socket.socket | None = None  # None while it is being made
    dropped: bool = False
    unsent: bytearray = field(default_factory=bytearray)
    # What is being received, of what it is the next part, and how much of that is there.
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(LENGTH.size)))
    filled: int = 0
    step: Callable[["_Connection"], Event | None] | None = None
    data: Data | None = None
    header: memoryview | None = None
    enough: int = 1  # bytes that have to be there to wake us
    wanted: bool = False  # `buffer` is the row of `data`

    def expect(self, buffer: memoryview, step: Callable[["_Connection"], Event | None]) -> None:
        self.buffer, self.filled, self.step = buffer, 0, step


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
                count = source.recv_into(connection.buffer[connection.filled :])
            except BlockingIOError:
                break
            except OSError:
                count = 0
            if not count:
                yield Lost(connection.address)
                return
            budget -= count
            connection.filled += count
            if connection.filled == len(connection.buffer) and connection.step is not None:
                event = connection.step(connection)
                if event is not None:
                    yield event
        if connection.dropped:
            return
        self._wait_for_enough(connection, source)
        if connection.data is not None:
            yield Moving(connection.address)

    def _wait_for_enough(self, connection: _Connection, source: socket.socket) -> None:
        """Of a row, more than the next packet: waking up for each costs more than the copy."""
        enough = min(len(connection.buffer) - connection.filled, WAKE_BYTES)
        if enough != connection.enough:
            connection.enough = enough
            source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)

    # ---- what comes, part by part ------------------------------------------------------------------------------

    def _expect_length(self, connection: _Connection) -> None:
        connection.data = connection.header = None
        connection.expect(memoryview(bytearray(LENGTH.size)), self._on_length)

    def _on_length(self, connection: _Connection) -> Event | None:
        [length] = LENGTH.unpack(connection.buffer)
        if not 0 < length <= MAX_MESSAGE_BYTES:
            return Garbled(connection.address)
        connection.expect(memoryview(bytearray(length)), self._on_message)
        return None

    def _on_message(self, connection: _Connection) -> Event | None:
        try:
            answer = decode_answer(connection.buffer)
        except MessageError:
            return Garbled(connection.address)
        if isinstance(answer, Data):
            connection.data = answer
            connection.expect(memoryview(bytearray(HEADER_BYTES)), self._on_header)
            return None
        self._expect_length(connection)
        return Heard(connection.address, answer)

    def _on_header(self, connection: _Connection) -> None:
        data = connection.data
        assert data is not None
        connection.header = connection.buffer
        row = self._place(connection.address, (data.request, data.round, data.part))
        connection.wanted = row is not None
        connection.expect(row if row is not None else self._unwanted, self._on_row)

    def _on_row(self, connection: _Connection) -> Event | None:
        data, header = connection.data, connection.header
        assert data is not None
        assert header is not None
        self._expect_length(connection)
        return Heard(connection.address, data, [header]) if connection.wanted else None

    def close(self) -> None:
        for address in list(self._connections):
            self.disconnect(address)
