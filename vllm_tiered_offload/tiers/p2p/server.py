"""Serves this engine's rows to its peers, on a thread of its own: the scheduler thread may sleep.

`serving` decides, a listener moves messages, and NIXL, where it is used, lets peers read the region; this joins them.
No send blocks, and nothing reads a row after its promise has ended.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import zmq

from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.tiers.block_frame import encode_header
from vllm_tiered_offload.tiers.p2p.bounded_log import BoundedLog
from vllm_tiered_offload.tiers.p2p.curve_listener import CurveListener
from vllm_tiered_offload.tiers.p2p.io_thread import IoThread
from vllm_tiered_offload.tiers.p2p.leases import PeerId, PromisedRow
from vllm_tiered_offload.tiers.p2p.listener import Arrived, Listener, RowToSend
from vllm_tiered_offload.tiers.p2p.messages import Data, Hello, Proofs, Reason, Welcome, encode
from vllm_tiered_offload.tiers.p2p.serving import Owner, ProveRows, SendRows
from vllm_tiered_offload.tiers.p2p.settings import P2pTierSettings
from vllm_tiered_offload.tiers.p2p.tcp_listener import TcpListener

logger = logging.getLogger(__name__)


class PeerServer(IoThread):
    """The thread that serves."""

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
        self._clock = clock
        self._log = BoundedLog(logger, clock)
        self._forget = False
        self._listener: Listener | None = None
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
        try:
            if settings.key_file is not None:
                self._listener = CurveListener(context, self._poller, settings)
            else:
                self._listener = TcpListener(self._poller, settings.listen, settings.port, self._clock)
        except (zmq.ZMQError, OSError) as error:
            where = f"listen {settings.listen}, port {settings.port}"
            raise OSError(f"cannot serve peers on {where}: {error}; choose another `listen` or `port`") from None
        self.port = self._listener.port
        how = "with keys" if settings.key_file is not None else "without keys"
        logger.info("p2p tier: serving peers on %s port %d, %s", settings.listen, self.port, how)

    def _turn(self, ready: Collection[object]) -> None:
        assert self._listener is not None
        if self._forget:
            self._forget = False
            self._owner.reset()
        self._owner.promises.expire()
        for event in self._listener.arrivals(ready):
            if isinstance(event, Arrived):
                self._handle(event)
            else:
                if event.stuck:
                    self._count_dropped()
                self._owner.drop(event.peer)

    def _next_timer(self) -> float | None:
        assert self._listener is not None
        timers = self._owner.promises.next_deadline, self._listener.next_timer
        return min((timer for timer in timers if timer is not None), default=None)

    def _close(self) -> None:
        self._owner.reset()
        if self._listener is not None:
            self._listener.close()
        self._rows = ()

    def _handle(self, arrived: Arrived) -> None:
        assert self._listener is not None
        peer, refused = arrived.peer, self._owner.refused.total()
        reply = self._owner.receive(peer, arrived.user, b"" if arrived.message is None else arrived.message)
        if self._owner.refused.total() > refused:
            self._log.warning("refused", f"a peer was refused; all refusals: {_told(self._owner.refused)}")
        sent = True
        match reply:
            case None:
                return
            case SendRows():
                sent = all(self._listener.send_row(peer, self._row_to_send(peer, reply, row)) for row in reply.rows)
            case ProveRows():
                sent = self._listener.say(peer, encode(self._proofs(reply)))
                self._owner.promises.done(peer, reply.request, reply.round, [row.part for row in reply.rows])
            case _:
                sent = self._listener.say(peer, encode(reply))
                if isinstance(reply, Welcome):
                    self._listener.welcome(peer)
        if not sent:
            self._count_dropped()
            self._owner.drop(peer)
            self._listener.drop(peer)

    def _row_to_send(self, peer: PeerId, reply: SendRows, row: PromisedRow) -> RowToSend:
        """One Data, with the frame that proves its bytes."""
        payload = self._rows[row.row]
        promises, round_id = self._owner.promises, (peer, reply.request, reply.round)
        return RowToSend(
            encode(Data(reply.request, reply.round, row.part)),
            self._prove(row),
            payload,
            promises.holder(*round_id),
            partial(promises.done, *round_id, [row.part]),
        )

    def _proofs(self, reply: ProveRows) -> Proofs:
        parts = tuple(row.part for row in reply.rows)
        return Proofs(reply.request, reply.round, parts, tuple(self._prove(row) for row in reply.rows))

    def _prove(self, row: PromisedRow) -> bytes:
        payload = self._rows[row.row]
        header = encode_header(row.key, payload, self._own.fingerprint)
        self._count("p2p_served_rows_total")
        self._count("p2p_served_bytes_total", len(header) + len(payload))
        return header

    def _count_dropped(self) -> None:
        self._count("p2p_dropped_peers_total")
        self._log.warning("dropped", "a peer does not take what it asked for, and is dropped")

    def _count(self, key: str, amount: int = 1) -> None:
        self._counters[key] += amount


def _told(refused: Mapping[Reason, int]) -> str:
    return ", ".join(f"{reason.value} {count}" for reason, count in refused.items())
