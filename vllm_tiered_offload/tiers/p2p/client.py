"""Pulls rows from peers, on a thread of its own: `pulling` decides, `transport` moves bytes, this joins the two."""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import zmq

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.telemetry.metrics import metric_key
from vllm_tiered_offload.tiers.p2p.bounded_log import BoundedLog
from vllm_tiered_offload.tiers.p2p.curve_transport import CurveTransport
from vllm_tiered_offload.tiers.p2p.instructions import (
    Address,
    Answered,
    Attach,
    Connect,
    Disconnect,
    Instruction,
    JobEnded,
    PartId,
    Read,
    Say,
    Wanted,
)
from vllm_tiered_offload.tiers.p2p.io_thread import IoThread
from vllm_tiered_offload.tiers.p2p.keys import read_key_file
from vllm_tiered_offload.tiers.p2p.messages import Hello, encode
from vllm_tiered_offload.tiers.p2p.nixl_agent import why_not_nixl
from vllm_tiered_offload.tiers.p2p.nixl_reader import Attached, Landed, NixlReader, ReadFailed
from vllm_tiered_offload.tiers.p2p.pulling import Pulling, PullTimes
from vllm_tiered_offload.tiers.p2p.read_queue import read_window
from vllm_tiered_offload.tiers.p2p.settings import P2pTierSettings
from vllm_tiered_offload.tiers.p2p.tcp_transport import TcpTransport
from vllm_tiered_offload.tiers.p2p.transport import Event, Garbled, Heard, Lost, Transport
from vllm_tiered_offload.tiers.p2p.verifier import RowVerifier

logger = logging.getLogger(__name__)


class Ask(NamedTuple):
    """Who of these peers has these keys? Ends in one Answered."""

    request: int
    round: int
    keys: tuple[OffloadKey, ...]
    addresses: tuple[Address, ...]


class Pull(NamedTuple):
    """Fetch these rows. Ends in one JobEnded."""

    job_id: int
    rows: tuple[Wanted, ...]


class Finish(NamedTuple):
    """The request is over."""

    request: int


class Know(NamedTuple):
    """These addresses may be asked, and each is counted under, and has the key of, its entry of `peers`."""

    entry_of: Mapping[Address, Address]


class Forget(NamedTuple):
    """End everything that is under way: the cache was reset."""


Command: TypeAlias = Ask | Pull | Finish | Know | Forget
Outcome: TypeAlias = Answered | JobEnded


class PeerClient(IoThread):
    """The thread that pulls. `tell` is called on it with each outcome, and must not block."""

    def __init__(
        self,
        settings: P2pTierSettings,
        own: Hello,
        rows: Sequence[memoryview],
        tell: Callable[[Outcome], None],
        *,
        is_myself: Callable[[bytes], bool] = lambda epoch: False,  # noqa: ARG005
        clock: Clock = monotonic,
    ) -> None:
        super().__init__("p2p-tier-client")
        self._settings = settings
        self._rows = rows
        self._tell = tell
        self._log = BoundedLog(logger, clock)
        self._commands: deque[Command] = deque()  # not taken by the thread yet
        self._keys = {Address(peer.host, peer.port): peer.public_key for peer in settings.peers}  # by entry
        self._entry_of: Mapping[Address, Address] = {}
        self._public_keys: dict[Address, str] = {}  # where there are keys; the transport looks in it
        times = PullTimes(settings.lookup_timeout, settings.pull_timeout, settings.silence_timeout)
        self._row_bytes = len(rows[0]) if rows else 0
        window = read_window(self._row_bytes)
        self._verifier = RowVerifier(own.fingerprint, rows, self._log)
        self._pulling = Pulling((), own, self._verifier, times, is_myself=is_myself, read_window=window, clock=clock)
        self._transport: Transport | None = None
        self._reader: NixlReader | None = None
        self._engine_id = own.engine_id
        self._failures = 0

    def submit(self, command: Command) -> None:
        """From any thread; the thread takes it up after `wake`."""
        self._commands.append(command)

    def stats(self) -> Mapping[str, int | float]:
        """Numbers by flat key; those of a peer under its entry of `peers`. From any thread."""
        pulling, load, entry_of = self._pulling, {"tier": "p2p", "direction": "load"}, self._entry_of
        stats: dict[str, float] = defaultdict(float)
        stats[metric_key("p2p_rows_read_total")] = self._reader.num_rows if self._reader is not None else 0
        for entry in self._keys:
            stats[metric_key("p2p_peers_up", peer=str(entry))] = 0
        for address, entry in entry_of.items():
            stats[metric_key("p2p_peers_up", peer=str(entry))] += pulling.is_up(address)
        for peer, num_rows in dict(pulling.rows_from).items():
            num_bytes = num_rows * self._row_bytes
            stats[metric_key("p2p_pulled_bytes_total", peer=str(entry_of[peer]))] += num_bytes
            stats[metric_key("tier_bytes_total", **load)] += num_bytes
        for peer, seconds in dict(pulling.seconds_from).items():
            stats[metric_key("p2p_pull_seconds_total", peer=str(entry_of[peer]))] += seconds
            stats[metric_key("tier_seconds_total", **load)] += seconds
        for (peer, kind), failures in dict(pulling.failures).items():
            stats[metric_key("p2p_peer_failures_total", peer=str(entry_of[peer]), kind=kind)] += failures
        for kind, rows in dict(pulling.failed_rows).items():
            stats[metric_key("tier_failures_total", **load, kind=kind)] += rows
        return stats

    # ---- on the thread -----------------------------------------------------------------------------------------

    def _open(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        settings = self._settings
        if settings.key_file is not None:
            own_keys = read_key_file(settings.key_file)
            self._transport = CurveTransport(context, self._poller, self._row_bytes, own_keys, self._public_keys)
        else:
            self._transport = TcpTransport(self._poller, self._row_bytes, self._place, self.wake)

        if why_not_nixl(settings) is None:
            self._reader = NixlReader(self._engine_id, settings.listen, self._rows, self.wake)

    def _turn(self, ready: Collection[object]) -> None:
        assert self._transport is not None
        while self._commands:
            self._do(self._obey(self._commands.popleft()))
        for event in self._transport.events(ready):
            self._do(self._take_in(event))
        for read in self._reader.events() if self._reader is not None else ():
            self._do(self._take_in_read(read))
        self._do(self._pulling.tick())
        failures = self._pulling.failures.total()
        if failures > self._failures:
            self._failures = failures
            self._log.warning("failures", f"pulling from peers: {_told(self._pulling.failures)}")

    def _take_in(self, event: Event) -> list[Instruction]:
        match event:
            case Heard(address, answer, behind, checksum):
                return self._pulling.heard(address, answer, behind, checksum)
            case Garbled(address):
                return self._pulling.garbled(address)
            case Lost(address):
                return self._pulling.lost(address)
        self._pulling.moving(event.address)
        return []

    def _take_in_read(self, event: Attached | Landed | ReadFailed) -> list[Instruction]:
        match event:
            case Landed(address, rows, alone):
                return self._pulling.landed(address, rows, alone=alone)
            case ReadFailed(address):
                return self._pulling.lost(address)
        self._pulling.can_read(event.address)
        return []

    def _obey(self, command: Command) -> list[Instruction]:
        match command:
            case Ask(request, round_, keys, addresses):
                return self._pulling.ask(request, round_, keys, addresses)
            case Pull(job_id, rows):
                return self._pulling.pull(job_id, rows)
            case Finish(request):
                return self._pulling.finish(request)
            case Know(entry_of):
                self._know(entry_of)
                return []
            case Forget():
                return self._pulling.forget()

    def _know(self, entry_of: Mapping[Address, Address]) -> None:
        self._entry_of = entry_of
        keys = {address: self._keys[entry] for address, entry in entry_of.items()}
        self._public_keys.update({address: key for address, key in keys.items() if key is not None})

    def _do(self, instructions: Sequence[Instruction]) -> None:
        assert self._transport is not None
        todo = deque(instructions)
        while todo:
            match todo.popleft():
                case Say(address, message):
                    if not self._transport.say(address, encode(message)):
                        todo.extend(self._pulling.lost(address))
                case Connect(address):
                    self._transport.connect(address)
                case Disconnect(address):
                    self._transport.disconnect(address)
                    if self._reader is not None:
                        self._reader.detach(address)
                case Attach(address, memory):
                    if self._reader is not None:
                        self._reader.attach(address, memory)
                case Read(address, rows):
                    assert self._reader is not None
                    self._reader.read(address, rows)
                case outcome:
                    self._tell(outcome)

    def _next_timer(self) -> float | None:
        return self._pulling.next_timer

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._reader is not None:
            self._reader.close()
        self._verifier.close()
        self._rows = ()

    def _place(self, address: Address, part_id: PartId) -> memoryview | None:
        wanted = self._pulling.landing(address, part_id)
        return self._rows[wanted.row] if wanted is not None else None


def _told(failures: Mapping[tuple[Address, str], int]) -> str:
    return ", ".join(f"{peer} {kind} {count}" for (peer, kind), count in failures.items())
