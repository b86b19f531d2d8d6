"""The encrypted port of an owner: a ROUTER socket under CURVE, and the ZAP socket that says whose keys may connect.

Row bytes are copied into ZeroMQ's queue at once. A queue holds SEND_QUEUE messages: a puller asks for fewer rows than
that at a time, and one whose queue is full does not read.

ZeroMQ bounds the size of a part but not the number of a message's parts: a peer could make it hold as many as it likes.
So only those whose key is on the list get as far as messages, and who has no keys does not listen with ZeroMQ.
"""

from collections.abc import Collection, Iterator, Sequence

import zmq

from vllm_tiered_offload.tiers.block_frame import checksum_of
from vllm_tiered_offload.tiers.p2p.keys import ZAP_DOMAIN, ZAP_ENDPOINT, answer_zap, read_key_file
from vllm_tiered_offload.tiers.p2p.leases import PeerId
from vllm_tiered_offload.tiers.p2p.listener import Arrived, Gone, RowToSend
from vllm_tiered_offload.tiers.p2p.messages import MAX_MESSAGE_BYTES, Data, encode
from vllm_tiered_offload.tiers.p2p.settings import P2pTierSettings
from vllm_tiered_offload.tiers.p2p.sockets import CURVE_BYTES, endpoint, receive_parts, set_common_options

SEND_QUEUE = 64  # messages to one peer that it has not taken
MESSAGES_A_TURN = 64
_PARTS = 2  # of what a peer may say: its routing id and the message

_OPTIONS = [
    (zmq.ROUTER_MANDATORY, 1),  # a full queue is an error, not a silent loss
    (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + CURVE_BYTES),
    (zmq.RCVHWM, 64),
    (zmq.SNDHWM, SEND_QUEUE),
    (zmq.HANDSHAKE_IVL, 2000),
    # A connection whose other end is gone is closed, and its queues with it.
    (zmq.HEARTBEAT_IVL, 5000),
    (zmq.HEARTBEAT_TIMEOUT, 10000),
]


class CurveListener:
    """Raises KeyFileError for a key file without a key, and zmq.ZMQError where the port is taken."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", poller: zmq.Poller, settings: P2pTierSettings
    ) -> None:
        assert settings.key_file is not None
        self._allowed = settings.keys_that_may_pull
        self._router = context.socket(zmq.ROUTER)
        set_common_options(self._router, settings.listen, _OPTIONS)
        self._router.curve_secretkey = read_key_file(settings.key_file).secret
        self._router.curve_server = 1
        self._router.zap_domain = ZAP_DOMAIN
        self._zap = context.socket(zmq.REP)
        self._zap.bind(ZAP_ENDPOINT)
        self._router.bind(endpoint(settings.listen, settings.port or "*"))
        self._poller = poller
        self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def begin(self) -> None:
        for socket in (self._zap, self._router):
            self._poller.register(socket, zmq.POLLIN)

    def arrivals(self, ready: Collection[object]) -> Iterator[Arrived | Gone]:
        if self._zap in ready:
            self._zap.send_multipart(answer_zap(self._zap.recv_multipart(), self._allowed))
        if self._router not in ready:
            return
        for _ in range(MESSAGES_A_TURN):
            try:
                peer, *parts = receive_parts(self._router, _PARTS)
            except zmq.Again:
                return
            yield Arrived(peer.bytes, _user_of(peer), parts[0].buffer if len(parts) == 1 else None)

    def say(self, peer: PeerId, message: bytes) -> bool:
        return self._send(peer, [message])

    def send_rows(self, peer: PeerId, request: int, round_: int, rows: Sequence[RowToSend]) -> bool:
        """One message each: a message is in memory as a whole."""
        for row in rows:
            header = row.prove(row.known or checksum_of(row.row))
            sent = self._send(peer, [encode(Data(request, round_, (row.part,))), row.row, header])
            row.done()
            if not sent:
                return False
        return True

    def _send(self, peer: PeerId, parts: list[bytes | memoryview]) -> bool:
        try:
            self._router.send_multipart([peer, *parts], flags=zmq.NOBLOCK, copy=True)
        except zmq.ZMQError:
            return False
        return True

    def welcome(self, peer: PeerId) -> None:
        """ZeroMQ knows no strangers: they have no key."""

    def drop(self, peer: PeerId) -> None:
        """What is queued stays queued, and is bounded."""

    @property
    def next_timer(self) -> float | None:
        return None

    def close(self) -> None:
        """The sockets end with their context."""


def _user_of(frame: zmq.Frame) -> str:
    """The name that the ZAP handler gave to the connection."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
