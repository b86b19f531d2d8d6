"""Serves this engine's rows to its peers, on a thread of its own: the scheduler thread may sleep.

`serving` decides, a listener moves messages, and NIXL, where it is used, lets peers read the region; this joins them.
No send blocks, and nothing reads a row after its promise has ended.
"""

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import zmq

from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.tiers.block_frame import PayloadChecksum, encode_header_of
from vllm_tiered_offload.tiers.p2p.bounded_log import BoundedLog
from vllm_tiered_offload.tiers.p2p.curve_listener import CurveListener
from vllm_tiered_offload.tiers.p2p.io_thread import IoThread
from vllm_tiered_offload.tiers.p2p.leases import PeerId, PromisedRow, Promises
from vllm_tiered_offload.tiers.p2p.listener import Arrived, Listener, RowToSend
from vllm_tiered_offload.tiers.p2p.messages import Confirmed, Proofs, Reason, Welcome, encode
from vllm_tiered_offload.tiers.p2p.nixl_agent import PAUSE_SECONDS, Agent, NixlError, why_not_nixl
from vllm_tiered_offload.tiers.p2p.proofs import RowProofs
from vllm_tiered_offload.tiers.p2p.serving import ConfirmParts, Owner, SendRows
from vllm_tiered_offload.tiers.p2p.settings import P2pTierSettings
from vllm_tiered_offload.tiers.p2p.tcp_listener import TcpListener

logger = logging.getLogger(__name__)

EAGER_SECONDS = 0.1  # after which peers that read are helped less often
LAZY_SECONDS = 0.001
ALONE_SECONDS = 0.01  # between two helps of peers that read alone: each takes time from what copies
PROVE_BYTES = 8 << 20  # of one turn, or one row: between them others have theirs


@dataclass(slots=True)
class _Serving:
    """What there is to serve."""

    owner: Owner
    rows: Sequence[memoryview]
    row_bytes: int
    proofs: RowProofs


class PeerServer(IoThread):
    """The thread that serves. It listens at once, so that a port that is taken is said at start, and answers later."""

    def __init__(self, settings: P2pTierSettings, engine_id: str, *, clock: Clock = monotonic) -> None:
        super().__init__("p2p-tier-server")
        self._settings = settings
        self._engine_id = engine_id
        self._clock = clock
        self._log = BoundedLog(logger, clock)
        self._serving: _Serving | None = None
        self._is_serving = False  # the thread knows of it
        self._forget = False
        self._listener: Listener | None = None
        self._agent: Agent | None = None  # where peers may read the region
        self._heard_at = 0.0  # when any peer said something last
        self._is_proving = False  # something was proved in the last turn, and there may be more
        self._helped_at = 0.0  # when peers that read alone were helped last
        self.port: int | None = None  # once it listens
        # Only this thread counts. By flat key.
        self._counters: Counter[str] = Counter()

    def serve(self, owner: Owner, rows: Sequence[memoryview]) -> None:
        """From now on peers are answered. Once, from any thread."""
        row_bytes = len(rows[0]) if rows else 0
        self._serving = _Serving(owner, rows, row_bytes, RowProofs(len(rows), row_bytes))
        self.wake()

    def forget(self) -> None:
        """End every promise and session soon: the cache was reset. From any thread."""
        self._forget = True
        self.wake()

    def stats(self) -> Mapping[str, int | float]:
        """Numbers by flat key. From any thread."""
        if self._serving is None:
            return {}
        owner = self._serving.owner
        return {
            **dict(self._counters),
            "p2p_sessions": owner.num_sessions,
            "p2p_promised_rows": owner.promises.num_rows,
            "p2p_promises_expired_total": owner.promises.num_expired,
            **{f"p2p_refused_total|reason={reason.value}": n for reason, n in dict(owner.refused).items()},
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
        keys = "with keys" if settings.key_file is not None else "without keys"
        why_not = self._make_agent()
        rows = "peers that have NIXL read rows with it" if why_not is None else f"rows go over sockets: {why_not}"
        logger.info("p2p tier: serving peers on %s port %d, %s; %s", settings.listen, self.port, keys, rows)

    def _make_agent(self) -> str | None:
        """Why there is none."""
        why_not = why_not_nixl(self._settings)
        if why_not is None:
            try:
                self._agent = Agent(f"{self._engine_id} owner", self._settings.listen)
            except NixlError as error:
                why_not = str(error)
        return why_not

    def _turn(self, ready: Collection[object]) -> None:
        assert self._listener is not None
        if self._serving is None:
            return
        if not self._is_serving:
            self._begin(self._listener, self._serving)
        owner = self._serving.owner
        if self._forget:
            self._forget = False
            owner.reset()
        owner.promises.expire()
        for event in self._listener.arrivals(ready):
            if isinstance(event, Arrived):
                self._handle(self._listener, self._serving, event)
            else:
                if event.stuck:
                    self._count_dropped()
                owner.drop(event.peer)
        self._prove_some(self._listener, self._serving)
        self._help(owner.promises)

    def _begin(self, listener: Listener, serving: _Serving) -> None:
        if self._agent is not None:
            try:
                self._agent.register(serving.rows)
                serving.owner.memory = self._agent.describe()
            except NixlError as error:
                logger.warning("p2p tier: rows go over sockets: %s", error)
        listener.begin()
        self._is_serving = True

    def _next_timer(self) -> float | None:
        if self._serving is None or self._listener is None:
            return None
        timers = self._serving.owner.promises.next_deadline, self._listener.next_timer, self._next_progress()
        return min((timer for timer in timers if timer is not None), default=None)

    def _next_progress(self) -> float | None:
        """While peers read: at once, or now and then if none of them has said anything for a while."""
        if self._is_proving:
            return self._clock()
        if self._agent is None or self._serving is None or not self._serving.owner.promises.are_read:
            return None
        if not self._serving.owner.promises.needs_help:
            return self._helped_at + ALONE_SECONDS
        now = self._clock()
        return now if now - self._heard_at < EAGER_SECONDS else now + LAZY_SECONDS

    def _close(self) -> None:
        if self._serving is not None:
            self._serving.owner.reset()
            self._serving.rows = ()
        if self._listener is not None:
            self._listener.close()
        if self._agent is not None:
            self._agent.close()

    def _handle(self, listener: Listener, serving: _Serving, arrived: Arrived) -> None:
        self._heard_at = self._clock()
        peer, owner = arrived.peer, serving.owner
        refused = owner.refused.total()
        reply = owner.receive(peer, arrived.user, b"" if arrived.message is None else arrived.message)
        if owner.refused.total() > refused:
            self._log.warning("refused", f"a peer was refused; all refusals: {_told(owner.refused)}")
        sent = True
        match reply:
            case None:
                return
            case SendRows():
                to_send = [self._row_to_send(serving, peer, reply, row) for row in reply.rows]
                sent = listener.send_rows(peer, reply.request, reply.round, to_send)
            case ConfirmParts(request, round_, rows, parts):
                sent = not rows or listener.say(peer, self._proofs(serving, request, round_, rows))
                sent = sent and listener.say(peer, encode(Confirmed(request, round_, parts)))
                owner.promises.done(peer, request, round_, parts)
            case _:
                sent = listener.say(peer, encode(reply))
                if isinstance(reply, Welcome):
                    listener.welcome(peer)
        if not sent:
            self._drop_stuck(listener, owner, peer)

    def _prove_some(self, listener: Listener, serving: _Serving) -> None:
        """What peers are reading, a bit each turn, so that they need not wait for it; and before that, when there is
        nothing else to do, what they will read."""
        promises, proofs = serving.owner.promises, serving.proofs
        at_once = max(1, PROVE_BYTES // max(1, serving.row_bytes))
        to_prove = promises.next_to_prove(at_once, proofs.has)
        if to_prove is not None:
            peer, request, round_, rows = to_prove
            if not listener.say(peer, self._proofs(serving, request, round_, rows)):
                self._drop_stuck(listener, serving.owner, peer)
        else:
            rows = promises.next_expected(at_once, proofs.has)
            for row in rows:
                proofs.of(row, serving.rows[row.row])
        self._is_proving = bool(rows)

    def _help(self, promises: Promises) -> None:
        """Peers that read: those that read alone now and then, for what they begin with and in case they are wrong."""
        if self._agent is None or not promises.are_read:
            return
        if promises.needs_help:
            self._agent.progress()
            if not self._is_proving:
                time.sleep(PAUSE_SECONDS)
        elif self._clock() >= self._helped_at + ALONE_SECONDS:
            self._helped_at = self._clock()
            self._agent.progress()

    def _drop_stuck(self, listener: Listener, owner: Owner, peer: PeerId) -> None:
        """What it does not take is more than we keep for it."""
        self._count_dropped()
        owner.drop(peer)
        listener.drop(peer)

    def _row_to_send(self, serving: _Serving, peer: PeerId, reply: SendRows, row: PromisedRow) -> RowToSend:
        promises, round_id = serving.owner.promises, (peer, reply.request, reply.round)
        return RowToSend(
            row.part,
            serving.rows[row.row],
            serving.proofs.checksum(row),
            partial(self._header, serving, row),
            promises.holder(*round_id),
            partial(promises.done, *round_id, [row.part]),
        )

    def _proofs(self, serving: _Serving, request: int, round_: int, rows: Sequence[PromisedRow]) -> bytes:
        self._count_served(len(rows), serving.row_bytes)
        parts = tuple(row.part for row in rows)
        proofs = tuple(serving.proofs.of(row, serving.rows[row.row]) for row in rows)
        return encode(Proofs(request, round_, parts, proofs))

    def _header(self, serving: _Serving, row: PromisedRow, found: PayloadChecksum) -> bytes:
        """Of a row that is sent, and was `found` to be this."""
        self._count_served(1, found.size)
        serving.proofs.keep(row, found)
        return encode_header_of(row.key, found, serving.owner.own.fingerprint)

    def _count_served(self, num_rows: int, row_bytes: int) -> None:
        self._counters["p2p_served_rows_total"] += num_rows
        self._counters["p2p_served_bytes_total"] += num_rows * row_bytes

    def _count_dropped(self) -> None:
        self._counters["p2p_dropped_peers_total"] += 1
        self._log.warning("dropped", "a peer does not take what it asked for, and is dropped")


def _told(refused: Mapping[Reason, int]) -> str:
    return ", ".join(f"{reason.value} {count}" for reason, count in refused.items())
