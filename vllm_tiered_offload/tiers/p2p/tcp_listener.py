"""The plain port of an owner: TCP, for peers on this machine or in a network that is trusted.

Rows are sent from where they are, while their promise holds; who does not take them for STALL_SECONDS, or until their
promise has ended, is cut off. Whatever anybody sends, this holds no more of it than one message of a peer that was
welcomed, and STRANGER_BYTES of anybody else; strangers have STRANGER_SECONDS to be welcomed, and are few at a time.
"""

import socket
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import zmq

from vllm_tiered_offload.contract.seams import Clock
from vllm_tiered_offload.tiers.block_frame import PayloadChecksum, RunningChecksum
from vllm_tiered_offload.tiers.p2p.framing import LENGTH, PIECE_BYTES, frame, set_options
from vllm_tiered_offload.tiers.p2p.leases import PeerId
from vllm_tiered_offload.tiers.p2p.listener import Arrived, Gone, RowToSend
from vllm_tiered_offload.tiers.p2p.messages import MAX_MESSAGE_BYTES, Data, encode

MAX_CONNECTIONS = 192
STRANGER_BYTES = 16 << 10
STRANGER_SECONDS = 2.0
STALL_SECONDS = 5.0
RECEIVE_BYTES = 64 << 10
BYTES_A_TURN = 4 << 20  # sent to one peer before others have theirs
MAX_UNSENT = 256  # messages and rows to one peer, none of them larger than a message or a row
MAX_UNSENT_BYTES = 8 << 20  # rows not counted: they are where they are


@dataclass(slots=True)
class _Message:
    """A message on its way."""

    left: memoryview

    def may_be_read(self) -> bool:
        return True

    def next_bytes(self) -> list[memoryview]:
        return [self.left]

    def advance(self, sent: int) -> bool:
        """So many bytes went; whether all have gone."""
        self.left = self.left[sent:]
        return not self.left


@dataclass(slots=True)
class _Row:
    """A row on its way, and its header behind it. Each piece is read for its checksum just before it is sent, unless
    that is known."""

    to_send: RowToSend
    read: RunningChecksum | None = None  # once its turn has come
    ready: int = 0  # of the row's bytes, that may be sent
    sent: int = 0  # of these
    header: memoryview | None = None  # what is left of it, once the row has been read

    def may_be_read(self) -> bool:
        return self.to_send.holds()

    def next_bytes(self) -> list[memoryview]:
        row = self.to_send.row
        if self.header is None:
            checksum = self.to_send.known or self._read_on(row)
            if checksum is not None:
                self.ready = len(row)
                self.header = memoryview(self.to_send.prove(checksum))
        if self.ready - self.sent > PIECE_BYTES:
            return [row[self.sent : self.sent + PIECE_BYTES]]
        return [view for view in (row[self.sent : self.ready], self.header) if view]

    def _read_on(self, row: memoryview) -> PayloadChecksum | None:
        """The row's checksum, once its last piece was read."""
        if self.read is None:
            self.read = RunningChecksum(len(row))
        if self.sent == self.ready:
            self.read.add(row[self.ready : self.ready + PIECE_BYTES])
            self.ready = self.read.done
        return self.read.finish() if self.ready == len(row) else None

    def advance(self, sent: int) -> bool:
        """So many bytes went; whether all have gone."""
        of_row = min(sent, self.ready - self.sent)
        self.sent += of_row
        if self.header is None:
            return False
        self.header = self.header[sent - of_row :]
        if self.header:
            return False
        self.to_send.done()
        return True


@dataclass(slots=True, eq=False)
class _Connection:
    peer: PeerId
    sock: socket.socket
    deadline: float | None  # of a stranger, or of one that does not take what was sent to it
    welcomed: bool = False
    closed: bool = False
    received: bytearray = field(default_factory=bytearray)
    unsent: deque[_Message | _Row] = field(default_factory=deque)
    unsent_bytes: int = 0  # rows not counted

    @property
    def limit(self) -> int:
        """The largest message that is read from it."""
        return MAX_MESSAGE_BYTES if self.welcomed else STRANGER_BYTES


class TcpListener:
    """Raises OSError where the port is taken, or the address is not ours."""

    def __init__(self, poller: zmq.Poller, host: str, port: int, clock: Clock) -> None:
        self._poller = poller
        self._clock = clock
        self._numbers = count(1)
        # By file descriptor, which is what the poller knows; oldest first.
        self._connections: dict[int, _Connection] = {}
        self._by_peer: dict[PeerId, _Connection] = {}
        self._gone: list[Gone] = []  # not told
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(where)
            self._socket.listen(128)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    def begin(self) -> None:
        self._poller.register(self._socket.fileno(), zmq.POLLIN)

    def arrivals(self, ready: Collection[object]) -> Iterator[Arrived | Gone]:
        now = self._clock()
        for late in [c for c in self._connections.values() if c.deadline is not None and c.deadline <= now]:
            self._end(late, stuck=late.welcomed)
        for descriptor in ready:
            connection = self._connections.get(descriptor) if isinstance(descriptor, int) else None
            if connection is not None:
                yield from self._receive(connection)
                if connection.unsent and not connection.closed:
                    self._send(connection)
        if self._socket.fileno() in ready:
            self._accept()
        gone, self._gone = self._gone, []
        yield from gone

    @property
    def next_timer(self) -> float | None:
        if self._gone:
            return self._clock()
        return min((c.deadline for c in self._connections.values() if c.deadline is not None), default=None)

    # ---- connections -------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:  # nobody is there any more, or there are no descriptors left
                return
            if len(self._connections) >= MAX_CONNECTIONS and not self._end_oldest_stranger():
                accepted.close()
                continue
            set_options(accepted)
            peer = next(self._numbers).to_bytes(8, "big")
            connection = _Connection(peer, accepted, self._clock() + STRANGER_SECONDS)
            self._connections[accepted.fileno()] = self._by_peer[peer] = connection
            self._poller.register(accepted.fileno(), zmq.POLLIN)

    def _end_oldest_stranger(self) -> bool:
        for connection in self._connections.values():
            if not connection.welcomed:
                self._end(connection)
                return True
        return False

    def _end(self, connection: _Connection, *, stuck: bool = False) -> None:
        if connection.closed:
            return
        connection.closed = True
        self._poller.unregister(connection.sock.fileno())
        del self._connections[connection.sock.fileno()], self._by_peer[connection.peer]
        connection.sock.close()
        connection.unsent.clear()
        self._gone.append(Gone(connection.peer, stuck))

    def welcome(self, peer: PeerId) -> None:
        connection = self._by_peer.get(peer)
        if connection is not None:
            connection.welcomed = True
            self._renew_deadline(connection, progress=True)

    def drop(self, peer: PeerId) -> None:
        connection = self._by_peer.get(peer)
        if connection is not None:
            self._end(connection)

    # ---- what comes --------------------------------------------------------------------------------------------

    def _receive(self, connection: _Connection) -> Iterator[Arrived]:
        try:
            data = connection.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(connection)
            return
        connection.received += data
        yield from self._messages(connection)

    def _messages(self, connection: _Connection) -> Iterator[Arrived]:
        at, received = 0, connection.received
        while not connection.closed and len(received) - at >= LENGTH.size:
            [length] = LENGTH.unpack_from(received, at)
            if not 0 < length <= connection.limit:
                yield Arrived(connection.peer, "", None)
                self._end(connection)
                return
            if len(received) - at - LENGTH.size < length:
                break
            at += LENGTH.size
            yield Arrived(connection.peer, "", bytes(received[at : at + length]))
            at += length
        del received[:at]

    # ---- what goes ---------------------------------------------------------------------------------------------

    def say(self, peer: PeerId, message: bytes) -> bool:
        return self._queue(peer, message, [])

    def send_rows(self, peer: PeerId, request: int, round_: int, rows: Sequence[RowToSend]) -> bool:
        return self._queue(peer, encode(Data(request, round_, tuple(row.part for row in rows))), rows)

    def _queue(self, peer: PeerId, message: bytes, rows: Sequence[RowToSend]) -> bool:
        connection = self._by_peer.get(peer)
        if connection is None:
            return True  # it will be told as gone
        connection.unsent_bytes += len(message)
        if len(connection.unsent) + len(rows) >= MAX_UNSENT or connection.unsent_bytes > MAX_UNSENT_BYTES:
            return False
        was_idle = not connection.unsent
        connection.unsent.append(_Message(memoryview(frame(message))))
        connection.unsent.extend(map(_Row, rows))
        if was_idle:
            self._send(connection)
        return True

    def _send(self, connection: _Connection) -> None:
        """As much as goes. What is over is told to whoever sent it."""
        budget, unsent = BYTES_A_TURN, connection.unsent
        while unsent and budget > 0:
            first = unsent[0]
            if not first.may_be_read():
                self._end(connection, stuck=True)
                return
            try:
                sent = connection.sock.sendmsg(first.next_bytes())
            except BlockingIOError:
                break
            except OSError:
                self._end(connection)
                return
            budget -= sent
            if first.advance(sent):
                unsent.popleft()
        if not unsent:
            connection.unsent_bytes = 0
        self._renew_deadline(connection, progress=budget < BYTES_A_TURN)
        self._poller.register(connection.sock.fileno(), zmq.POLLIN | (zmq.POLLOUT if unsent else 0))

    def _renew_deadline(self, connection: _Connection, *, progress: bool) -> None:
        """A peer that was welcomed has none while nothing is queued for it, and a new one with each byte it takes."""
        if not connection.welcomed:
            return
        if not connection.unsent:
            connection.deadline = None
        elif progress or connection.deadline is None:
            connection.deadline = self._clock() + STALL_SECONDS

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._end(connection)
        self._socket.close()
