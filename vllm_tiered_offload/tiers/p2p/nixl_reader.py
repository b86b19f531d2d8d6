"""Reads rows out of peers' memory: one READ for a few rows at a time, straight into ours.

An agent for each peer, made on a thread of its own because that takes long; until it is there, rows come over sockets.
The thread that owns this polls while a READ is in flight.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from vllm_tiered_offload.contract.seams import Clock
from vllm_tiered_offload.tiers.p2p.instructions import Address, PartId, Wanted
from vllm_tiered_offload.tiers.p2p.messages import Memory
from vllm_tiered_offload.tiers.p2p.nixl_agent import MEMORY, PAUSE_SECONDS, Agent, NixlError, digest

logger = logging.getLogger(__name__)

READ_BYTES = 4 << 20  # of one READ, or one row: small enough that checksums keep up with it
READS_IN_FLIGHT = 3  # of one peer
EAGER_SECONDS = 0.02  # without anything landing; after that it is polled less often
LAZY_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Attached:
    """The peer's memory can be read."""

    address: Address


@dataclass(frozen=True, slots=True)
class Landed:
    """These parts were read."""

    address: Address
    part_ids: Sequence[PartId]


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A READ of this peer's memory has failed."""

    address: Address


class _Made(NamedTuple):
    peer: "_Peer"
    agent: Agent | None
    name: str
    error: str


@dataclass(slots=True, eq=False)
class _Peer:
    address: Address
    memory: Memory
    agent: Agent | None = None  # None while it is being made
    name: str = ""  # what the peer's agent is called
    dropped: bool = False
    has_read: bool = False  # something came of it
    wanted: deque[Wanted] = field(default_factory=deque)  # not begun
    reads: list[tuple[Any, Sequence[PartId]]] = field(default_factory=list)  # in flight, by handle


class NixlReader:
    """The memory of all attached peers."""

    def __init__(
        self, engine_id: str, listen: str, rows: Sequence[memoryview], ring: Callable[[], None], clock: Clock
    ) -> None:
        self._engine_id = engine_id
        self._listen = listen
        self._rows = rows
        self._ring = ring
        self._clock = clock
        self._numbers = count(1)
        self._peers: dict[Address, _Peer] = {}
        self._made: deque[_Made] = deque()  # by their threads
        self._hopeless: set[Address] = set()  # it was tried, and nothing ever came
        self.num_rows = 0  # that were read, since the start
        self._moved_at = 0.0  # when something landed last, or was begun

    def attach(self, address: Address, memory: Memory) -> None:
        """Begin to. Ends in Attached, or not at all."""
        self.detach(address)
        if address in self._hopeless:
            return
        peer = self._peers[address] = _Peer(address, memory)
        threading.Thread(target=self._make, args=[peer], name="p2p-tier-attach", daemon=True).start()

    def _make(self, peer: _Peer) -> None:
        """On a thread of its own."""
        agent, name, error = None, "", ""
        try:
            memory = peer.memory
            if memory.digest != digest(memory.agent, memory.base, memory.num_rows, memory.row_bytes):
                raise NixlError("what it says of its memory is damaged")
            agent = Agent(f"{self._engine_id} reader {next(self._numbers)}", self._listen)
            agent.register(self._rows)
            if memory.row_bytes != agent.row_bytes:
                raise NixlError("its rows have another size")
            name = agent.nixl.add_remote_agent(memory.agent)
        except Exception as caught:
            error = str(caught) or type(caught).__name__
        self._made.append(_Made(peer, agent, name, error))
        self._ring()

    def detach(self, address: Address) -> None:
        """When this returns nothing of the peer's memory gets into a row any more."""
        peer = self._peers.pop(address, None)
        if peer is None:
            return
        peer.dropped = True
        for handle, _ in peer.reads:
            _give_back(handle)
        peer.reads.clear()
        peer.wanted.clear()
        if peer.agent is not None:
            peer.agent.close()

    def read(self, address: Address, rows: Sequence[Wanted]) -> None:
        """Each ends in a Landed, a ReadFailed, or with `detach`."""
        self._peers[address].wanted.extend(rows)
        self._moved_at = self._clock()

    def events(self) -> Iterator[Attached | Landed | ReadFailed]:
        """What has happened. Begins what there is room for."""
        while self._made:
            yield from self._on_made(*self._made.popleft())
        busy = [peer for peer in self._peers.values() if peer.agent is not None and (peer.wanted or peer.reads)]
        for peer in busy:
            assert peer.agent is not None
            yield from self._poll(peer, peer.agent)
        if any(peer.reads for peer in busy):
            time.sleep(PAUSE_SECONDS)

    def _on_made(self, peer: _Peer, agent: Agent | None, name: str, error: str) -> Iterator[Attached]:
        if error and not peer.dropped:
            self._give_up(peer.address, error)
        if error or peer.dropped:
            if agent is not None:
                agent.close()
            return
        peer.agent, peer.name = agent, name
        yield Attached(peer.address)

    def _poll(self, peer: _Peer, agent: Agent) -> Iterator[Landed | ReadFailed]:
        try:
            part_ids = [*self._finished(peer, agent), *self._begin(peer, agent)]
        except Exception as error:
            if not peer.has_read:
                self._give_up(peer.address, f"{type(error).__name__} {error}")
            yield ReadFailed(peer.address)
            return
        if part_ids:
            peer.has_read = True
            self.num_rows += len(part_ids)
            self._moved_at = self._clock()
            yield Landed(peer.address, part_ids)

    def _finished(self, peer: _Peer, agent: Agent) -> list[PartId]:
        """Parts of READs that are over. Raises whatever NIXL does for those that failed."""
        finished: list[PartId] = []
        for read in list(peer.reads):
            handle, part_ids = read
            if _is_over(agent.nixl.check_xfer_state(handle)):
                peer.reads.remove(read)
                _give_back(handle)
                finished += part_ids
        return finished

    def _begin(self, peer: _Peer, agent: Agent) -> list[PartId]:
        """Parts of READs that were over at once."""
        finished: list[PartId] = []
        while peer.wanted and len(peer.reads) < READS_IN_FLIGHT:
            at_once = max(1, READ_BYTES // agent.row_bytes)
            rows = [peer.wanted.popleft() for _ in range(min(at_once, len(peer.wanted)))]
            handle = self._new_read(peer, agent, rows)
            part_ids = [wanted.part_id for wanted in rows]
            peer.reads.append((handle, part_ids))
            if _is_over(agent.nixl.transfer(handle)):
                peer.reads.pop()
                _give_back(handle)
                finished += part_ids
                break  # it took its time: others first
        return finished

    def _new_read(self, peer: _Peer, agent: Agent, rows: Sequence[Wanted]) -> Any:
        size = agent.row_bytes
        theirs = [wanted.source.row for wanted in rows]
        if any(row is None or row >= peer.memory.num_rows for row in theirs):
            raise NixlError("a row that the peer does not have")
        here = [(agent.base + wanted.row * size, size, 0) for wanted in rows]
        there = [(peer.memory.base + (row or 0) * size, size, 0) for row in theirs]
        descriptors = (agent.nixl.get_xfer_descs(side, MEMORY) for side in (here, there))
        return agent.nixl.initialize_xfer("READ", *descriptors, peer.name)

    def _give_up(self, address: Address, why: str) -> None:
        self._hopeless.add(address)
        logger.warning("p2p tier: the memory of peer %s cannot be read, so rows come over sockets: %s", address, why)

    @property
    def next_timer(self) -> float | None:
        """When (clock) `events` has to be called, whatever happens."""
        if not any(peer.wanted or peer.reads for peer in self._peers.values() if peer.agent is not None):
            return None
        now = self._clock()
        return now if now - self._moved_at < EAGER_SECONDS else now + LAZY_SECONDS

    def close(self) -> None:
        """Nothing gets into a row any more."""
        for address in list(self._peers):
            self.detach(address)


def _is_over(state: str) -> bool:
    if state == "ERR":
        raise NixlError("a READ has failed")
    return state == "DONE"


def _give_back(handle: Any) -> None:
    """A transfer that is not over is cancelled as far as NIXL can; the end of its agent ends it."""
    try:
        handle.release()
    except Exception as error:
        logger.debug("p2p tier: NIXL keeps a transfer: %s", error)
