"""Serves this engine's rows to its peers, on a thread of its own: the scheduler thread may sleep.

All sends are non-blocking. Row bytes are copied into ZeroMQ's queue while the promise holds, so nothing reads a row
after its promise has ended. A queue holds SEND_QUEUE messages: a puller asks for fewer rows than that at a time, and
one whose queue is full does not read, and is dropped.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import zmq

from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.tiers.block_frame import encode_header
from vllm_tiered_offload.tiers.p2p.bounded_log import BoundedLog
from vllm_tiered_offload.tiers.p2p.io_thread import IoThread, endpoint, receive_parts, set_common_options
from vllm_tiered_offload.tiers.p2p.keys import ZAP_DOMAIN, ZAP_ENDPOINT, answer_zap, read_key_file
from vllm_tiered_offload.tiers.p2p.leases import PeerId, PromisedRow
from vllm_tiered_offload.tiers.p2p.messages import MAX_MESSAGE_BYTES, Data, Hello, Reason, encode
from vllm_tiered_offload.tiers.p2p.serving import Owner, SendRows
from vllm_tiered_offload.tiers.p2p.settings import P2pTierSettings

logger = logging.getLogger(__name__)

SEND_QUEUE = 64  # messages to one peer that it has not taken
MESSAGES_A_TURN = 64
_MAX_PARTS = 2  # of what a peer may say: its routing id and the message

_OPTIONS = [
    (zmq.ROUTER_MANDATORY, 1),  # a full queue is an error, not a silent loss
    (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
    (zmq.RCVHWM, 64),
    (zmq.SNDHWM, SEND_QUEUE),
    (zmq.HANDSHAKE_IVL, 2000),
    # A connection whose other end is gone is closed, and its queues with it.
    (zmq.HEARTBEAT_IVL, 5000),
    (zmq.HEARTBEAT_TIMEOUT, 10000),
]


class PeerServer(IoThread):
    """The ROUTER socket, and the ZAP socket where there are keys."""

    def __init__(
        self,
        settings: P2pTierSettings,
        own: Hello,
        owner: Owner,
        rows: Sequence[memoryview],
        *,
        clock: Clock = monotonic,
    ) -> None:
        super().__init__("p2p-tier-server")
        self._settings = settings
        self._own = own
        self._owner = owner
        self._rows = rows
        self._log = BoundedLog(logger, clock)
        self._forget = False
        self.port: int | None = None  # once it listens
        # Only this thread counts. By flat key.
        self._counters: Counter[str] = Counter()

    def forget(self) -> None:
        """End every promise and session soon: the cache was reset. From any thread."""
        self._forget = True
        self.wake()

    def stats(self) -> Mapping[str, int | float]:
        """Numbers by flat key. From any thread."""
        return {
            **dict(self._counters),
            "p2p_sessions": self._owner.num_sessions,
            "p2p_promised_rows": self._owner.promises.num_rows,
            "p2p_promises_expired_total": self._owner.promises.num_expired,
            **{f"p2p_refused_total|reason={reason.value}": n for reason, n in dict(self._owner.refused).items()},
        }

    # ---- on the thread -----------------------------------------------------------------------------------------

    def _open(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        settings = self._settings
        self._router = context.socket(zmq.ROUTER)
        set_common_options(self._router, settings.listen, _OPTIONS)
        self._zap = context.socket(zmq.REP)
        if settings.key_file is not None:
            self._router.curve_secretkey = read_key_file(settings.key_file).secret
            self._router.curve_server = 1
            self._router.zap_domain = ZAP_DOMAIN
            self._zap.bind(ZAP_ENDPOINT)
            self._poller.register(self._zap, zmq.POLLIN)
        try:
            self._router.bind(endpoint(settings.listen, settings.port or "*"))
        except zmq.ZMQError as error:
            where = f"listen {settings.listen}, port {settings.port}"
            raise OSError(f"cannot serve peers on {where}: {error}; choose another `listen` or `port`") from None
        self._poller.register(self._router, zmq.POLLIN)
        self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        how = "with keys" if settings.key_file is not None else "without keys"
        logger.info("p2p tier: serving peers on %s port %d, %s", settings.listen, self.port, how)

    def _turn(self, ready: Collection[object]) -> None:
        if self._forget:
            self._forget = False
            self._owner.reset()
        self._owner.promises.expire()
        if self._zap in ready:
            self._zap.send_multipart(answer_zap(self._zap.recv_multipart(), self._settings.keys_that_may_pull))
        if self._router in ready:
            self._receive()

    def _next_timer(self) -> float | None:
        return self._owner.promises.next_deadline

    def _close(self) -> None:
        self._owner.reset()
        self._rows = ()

    def _receive(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                peer, *parts = receive_parts(self._router, _MAX_PARTS)
            except zmq.Again:
                return
            self._handle(peer.bytes, _user_of(peer), [part.buffer for part in parts])

    def _handle(self, peer: PeerId, user: str, parts: Sequence[memoryview]) -> None:
        refused = self._owner.refused.total()
        reply = self._owner.receive(peer, user, parts)
        if self._owner.refused.total() > refused:
            self._log.warning("refused", f"a peer was refused; all refusals: {_told(self._owner.refused)}")
        if reply is None:
            return
        try:
            if isinstance(reply, SendRows):
                for row in reply.rows:
                    self._send(peer, self._row_parts(reply, row))
            else:
                self._send(peer, [encode(reply)])
        except zmq.ZMQError as error:
            self._count("p2p_dropped_peers_total")
            self._log.warning("dropped", f"a peer does not take what it asked for, and is dropped: {error}")
            self._owner.drop(peer)
        if isinstance(reply, SendRows):
            self._owner.sent(peer, reply)

    def _row_parts(self, reply: SendRows, row: PromisedRow) -> list[bytes | memoryview]:
        """One Data, with the frame that proves its bytes."""
        payload = self._rows[row.row]
        header = encode_header(row.key, payload, self._own.fingerprint)
        self._count("p2p_served_rows_total")
        self._count("p2p_served_bytes_total", len(header) + len(payload))
        return [encode(Data(reply.request, reply.round, row.part)), header, payload]

    def _send(self, peer: PeerId, parts: Sequence[bytes | memoryview]) -> None:
        self._router.send_multipart([peer, *parts], flags=zmq.NOBLOCK, copy=True)

    def _count(self, key: str, amount: int = 1) -> None:
        self._counters[key] += amount


def _user_of(frame: zmq.Frame) -> str:
    """The name that the ZAP handler gave to the connection; nothing where there are no keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _told(refused: Mapping[Reason, int]) -> str:
    return ", ".join(f"{reason.value} {count}" for reason, count in refused.items())
