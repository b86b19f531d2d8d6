"""The encrypted connections of a puller: ZeroMQ's sockets, under CURVE."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_tiered_offload.tiers.block_frame import HEADER_BYTES
from vllm_tiered_offload.tiers.p2p.instructions import Address
from vllm_tiered_offload.tiers.p2p.keys import OwnKeys
from vllm_tiered_offload.tiers.p2p.messages import MAX_MESSAGE_BYTES, Data, MessageError, decode_answer
from vllm_tiered_offload.tiers.p2p.sockets import CURVE_BYTES, endpoint, receive_parts, set_common_options
from vllm_tiered_offload.tiers.p2p.transport import Event, Garbled, Heard, Lost

_DATA_PARTS = 3  # the message, one row, its header
MESSAGES_A_TURN = 32

# Any of these ends the connection. It is never made again behind our back: `Pulling` decides when.
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(slots=True)
class _Connection:
    address: Address
    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"


class CurveTransport:
    """A DEALER socket for each peer, with a monitor that tells at once when its connection breaks."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        row_bytes: int,
        own_keys: OwnKeys,
        public_keys: Mapping[Address, str],
    ) -> None:
        self._context = context
        self._poller = poller
        self._own_keys = own_keys
        self._public_keys = public_keys
        self._options = [
            (zmq.MAXMSGSIZE, max(row_bytes, HEADER_BYTES, MAX_MESSAGE_BYTES) + CURVE_BYTES),
            (zmq.RCVHWM, 64),
            (zmq.SNDHWM, 256),
            (zmq.RECONNECT_IVL, -1),
            (zmq.HANDSHAKE_IVL, 2000),
            (zmq.HEARTBEAT_IVL, 5000),
            (zmq.HEARTBEAT_TIMEOUT, 10000),
        ]
        # The open connection of each peer.
        self._connections: dict[Address, _Connection] = {}

    def connect(self, address: Address) -> None:
        self.disconnect(address)
        socket = self._context.socket(zmq.DEALER)
        set_common_options(socket, address.host, self._options)
        socket.curve_publickey, socket.curve_secretkey = self._own_keys
        socket.curve_serverkey = self._public_keys[address].encode("ascii")
        monitor = socket.get_monitor_socket(_LOST)
        monitor.linger = 0
        self._connections[address] = _Connection(address, socket, monitor)
        for item in (socket, monitor):
            self._poller.register(item, zmq.POLLIN)
        socket.connect(endpoint(address.host, address.port))

    def disconnect(self, address: Address) -> None:
        connection = self._connections.pop(address, None)
        if connection is None:
            return
        for item in (connection.socket, connection.monitor):
            self._poller.unregister(item)
        connection.socket.disable_monitor()
        connection.monitor.close()
        connection.socket.close()

    def say(self, address: Address, message: bytes) -> bool:
        connection = self._connections.get(address)
        if connection is None:
            return False
        try:
            connection.socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def events(self, ready: Collection[object]) -> Iterator[Event]:
        for connection in list(self._connections.values()):
            if connection.socket in ready:
                yield from self._messages(connection)
            if connection.monitor in ready and self._is_lost(connection):
                yield Lost(connection.address)

    def _messages(self, connection: _Connection) -> Iterator[Event]:
        for _ in range(MESSAGES_A_TURN):
            if self._connections.get(connection.address) is not connection:
                return  # it was dropped because of what it said
            try:
                parts = receive_parts(connection.socket, _DATA_PARTS)
            except zmq.Again:
                return
            yield _event(connection.address, [part.buffer for part in parts])

    def _is_lost(self, connection: _Connection) -> bool:
        if self._connections.get(connection.address) is not connection:
            return False
        lost = False
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(connection.monitor.recv_multipart(zmq.NOBLOCK))
                lost = lost or bool(event["event"] & _LOST)
        return lost

    def close(self) -> None:
        for address in list(self._connections):
            self.disconnect(address)


def _event(address: Address, parts: list[memoryview]) -> Event:
    try:
        answer = decode_answer(parts[0])
    except MessageError:
        return Garbled(address)
    if not isinstance(answer, Data):
        return Heard(address, answer) if len(parts) == 1 else Garbled(address)
    if len(parts) != _DATA_PARTS or len(answer.parts) != 1:
        return Garbled(address)
    row, header = parts[1:]
    return Heard(address, answer, [header, row])
