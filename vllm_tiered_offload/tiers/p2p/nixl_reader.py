"""Reads rows out of peers' memory: one READ for a few rows at a time, straight into ours.

A lane is an agent and its thread: making one takes long, and a READ within this machine is a system call that copies.
A peer has one lane, and a second one as soon as its READs turn out to be such copies. Until the first one is there,
rows come over sockets. A thread polls while a READ is in flight, and sleeps otherwise. What it has read, it reads again
for its checksum, while that is in the cache.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

from vllm_tiered_offload.contract.seams import monotonic
from vllm_tiered_offload.tiers.block_frame import checksum_of
from vllm_tiered_offload.tiers.p2p.instructions import Address, LandedRow, Wanted
from vllm_tiered_offload.tiers.p2p.messages import Memory
from vllm_tiered_offload.tiers.p2p.nixl_agent import MEMORY, PAUSE_SECONDS, Agent, NixlError, digest
from vllm_tiered_offload.tiers.p2p.read_queue import LANES, ReadQueue

logger = logging.getLogger(__name__)

READS_IN_FLIGHT = 3  # of one lane
EAGER_SECONDS = 0.02  # without anything landing; after that it is polled less often
LAZY_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Attached:
    """The peer's memory can be read."""

    address: Address


@dataclass(frozen=True, slots=True)
class Landed:
    """These rows were read; the last ones `alone`, in the call that began it, so the peer had no part in it."""

    address: Address
    rows: Sequence[LandedRow]
    alone: bool


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A READ of this peer's memory has failed."""

    address: Address


@dataclass(frozen=True, slots=True)
class Unreadable:
    """This peer's memory was never read, and will not be."""

    address: Address
    why: str


class _Peer:
    """One peer's memory. `read` and `stop` are called from one thread; the lanes are threads of their own."""

    def __init__(self, address: Address, memory: Memory, reader: "NixlReader") -> None:
        self.address = address
        self.memory = memory
        self.reader = reader
        self.stopping = False
        self.has_read = False  # something came of it
        self._queue = ReadQueue(memory.row_bytes)
        self._has_work = threading.Condition()  # also guards `_queue` and `_lanes`
        self._lanes = [_Lane(self)]

    @property
    def is_made(self) -> threading.Event:
        """The first lane is there, or will not be."""
        return self._lanes[0].is_made

    def read(self, rows: Sequence[Wanted]) -> None:
        with self._has_work:
            self._queue.add(rows)
            self._has_work.notify_all()

    def stop(self) -> None:
        """Nothing gets into a row any more when this returns; while an agent is being made nothing does anyway."""
        with self._has_work:
            self.stopping = True
            self._has_work.notify_all()
        for lane in self._lanes:
            lane.join()

    # ---- for its lanes -----------------------------------------------------------------------------------------

    def take(self, *, wait: bool) -> list[Wanted]:
        """The rows of the next READ. With `wait` there are none only when it stops."""
        with self._has_work:
            while not self.stopping:
                rows = self._queue.take()
                if rows or not wait:
                    return rows
                self._has_work.wait()
            return []

    def landed(self, rows: Sequence[LandedRow], *, alone: bool) -> None:
        """They were read, `alone` in the call that began it."""
        self.has_read = True
        with self._has_work:
            to_tell = self._queue.landed(rows)
        if to_tell:
            self.tell(Landed(self.address, to_tell, alone))

    def add_lane(self) -> None:
        """A READ was a system call that copies, so another thread can make another one meanwhile."""
        with self._has_work:
            if len(self._lanes) < LANES and not self.stopping:
                self._lanes.append(_Lane(self))

    def tell(self, event: "ReaderEvent") -> None:
        if not self.stopping:
            self.reader.tell(self, event)


class _Lane:
    """An agent for one peer's memory, and the thread that uses it."""

    def __init__(self, peer: _Peer) -> None:
        self._peer = peer
        self._reads: list[tuple[Any, Sequence[Wanted]]] = []  # in flight, by handle
        self.is_made = threading.Event()  # the agent is there, or will not be
        self._thread = threading.Thread(target=self._run, name="p2p-tier-reader", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Unless its agent is being made: then it ends by itself, before it reads anything."""
        if self.is_made.is_set():
            self._thread.join()

    def _run(self) -> None:
        agent: Agent | None = None
        peer = self._peer
        try:
            agent = Agent(peer.reader.new_name(), peer.reader.listen)
            peer_name = self._attach(agent)
            peer.tell(Attached(peer.address))
            self.is_made.set()
            self._serve(agent, peer_name)
        except Exception as error:
            logger.debug("p2p tier: a reader of %s has ended: %s", peer.address, error)
            if not peer.has_read:
                peer.tell(Unreadable(peer.address, f"{type(error).__name__} {error}"))
            if self.is_made.is_set():
                peer.tell(ReadFailed(peer.address))
        finally:
            for handle, _ in self._reads:
                _give_back(handle)
            self._reads.clear()
            if agent is not None:
                agent.close()
            self.is_made.set()

    def _attach(self, agent: Agent) -> Any:
        memory, reader = self._peer.memory, self._peer.reader
        if memory.digest != digest(memory.agent, memory.base, memory.num_rows, memory.row_bytes):
            raise NixlError("what it says of its memory is damaged")
        agent.register(reader.rows)
        if memory.row_bytes != agent.row_bytes:
            raise NixlError("its rows have another size")
        return agent.nixl.add_remote_agent(memory.agent)

    def _serve(self, agent: Agent, peer_name: Any) -> None:
        """Until `stop`. What is over is told before anything begins, which may wait.

        Raises whatever NIXL does for a READ that failed.
        """
        moved_at = 0.0
        while not self._peer.stopping:
            was_idle = not self._reads
            if self._finish(agent) or self._begin(agent, peer_name) or was_idle:
                moved_at = monotonic()
            elif self._reads:
                time.sleep(PAUSE_SECONDS if monotonic() - moved_at < EAGER_SECONDS else LAZY_SECONDS)

    def _finish(self, agent: Agent) -> bool:
        """READs that are over; whether there were any."""
        finished: list[Wanted] = []
        for read in list(self._reads):
            handle, rows = read
            if _is_over(agent.nixl.check_xfer_state(handle)):
                self._reads.remove(read)
                _give_back(handle)
                finished += rows
        if finished:
            self._landed(finished, alone=False)
        return bool(finished)

    def _begin(self, agent: Agent, peer_name: Any) -> bool:
        """Up to one that was over at once, which took its time; whether there was one.

        Waits for something to read while nothing is in flight.
        """
        while len(self._reads) < READS_IN_FLIGHT:
            rows = self._peer.take(wait=not self._reads)
            if not rows:
                break
            handle = self._new_read(agent, peer_name, rows)
            self._reads.append((handle, rows))
            if _is_over(agent.nixl.transfer(handle)):
                self._reads.pop()
                _give_back(handle)
                self._landed(rows, alone=not self._reads)
                return True
        return False

    def _landed(self, rows: Sequence[Wanted], *, alone: bool) -> None:
        if alone:
            self._peer.add_lane()
        ours = self._peer.reader.rows
        landed = [LandedRow(wanted.part_id, checksum_of(ours[wanted.row])) for wanted in rows]
        self._peer.landed(landed, alone=alone)

    def _new_read(self, agent: Agent, peer_name: Any, rows: Sequence[Wanted]) -> Any:
        size, memory = agent.row_bytes, self._peer.memory
        here: list[tuple[int, int, int]] = []
        there: list[tuple[int, int, int]] = []
        for row, their_row, num_rows in _runs(rows):
            if their_row + num_rows > memory.num_rows:
                raise NixlError("a row that the peer does not have")
            here.append((agent.base + row * size, num_rows * size, 0))
            there.append((memory.base + their_row * size, num_rows * size, 0))
        descriptors = (agent.nixl.get_xfer_descs(side, MEMORY) for side in (here, there))
        return agent.nixl.initialize_xfer("READ", *descriptors, peer_name)


class NixlReader:
    """The memory of all attached peers. `ring` is called when there is something for `events`."""

    def __init__(self, engine_id: str, listen: str, rows: Sequence[memoryview], ring: Callable[[], None]) -> None:
        self.listen = listen
        self.rows = rows
        self.num_rows = 0  # that were read, since the start
        self._engine_id = engine_id
        self._ring = ring
        self._numbers = count(1)
        self._peers: dict[Address, _Peer] = {}
        self._events: deque[tuple[_Peer, ReaderEvent]] = deque()  # from the peers' threads
        self._hopeless: set[Address] = set()  # it was tried, and nothing ever came

    def attach(self, address: Address, memory: Memory) -> None:
        """Begin to. Ends in Attached, or not at all."""
        self.detach(address)
        if address not in self._hopeless:
            self._peers[address] = _Peer(address, memory, self)

    def detach(self, address: Address) -> None:
        """When this returns nothing of the peer's memory gets into a row any more."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            peer.stop()

    def read(self, address: Address, rows: Sequence[Wanted]) -> None:
        """Each ends in a Landed, a ReadFailed, or with `detach`."""
        self._peers[address].read(rows)

    def events(self) -> Iterator[Attached | Landed | ReadFailed]:
        """What has happened."""
        while self._events:
            peer, event = self._events.popleft()
            if self._peers.get(peer.address) is not peer:
                continue
            if isinstance(event, Landed):
                self.num_rows += len(event.rows)
            if isinstance(event, Unreadable):
                self._hopeless.add(event.address)
                text = "p2p tier: the memory of peer %s cannot be read, so rows come over sockets: %s"
                logger.warning(text, event.address, event.why)
            else:
                yield event

    def close(self) -> None:
        """Nothing gets into a row any more."""
        for address in list(self._peers):
            self.detach(address)

    # ---- for the peers' threads --------------------------------------------------------------------------------

    def new_name(self) -> str:
        """Of an agent."""
        return f"{self._engine_id} reader {next(self._numbers)}"

    def tell(self, peer: _Peer, event: "ReaderEvent") -> None:
        """Something has happened."""
        self._events.append((peer, event))
        self._ring()


ReaderEvent: TypeAlias = Attached | Landed | ReadFailed | Unreadable


def _runs(rows: Sequence[Wanted]) -> Iterator[tuple[int, int, int]]:
    """Our first row, theirs, and how many: what lies side by side at both ends is one piece of memory."""
    first, their_first, num_rows = 0, 0, 0
    for wanted in rows:
        if wanted.source.row is None:
            raise NixlError("a row that the peer did not tell")
        if num_rows and (wanted.row, wanted.source.row) == (first + num_rows, their_first + num_rows):
            num_rows += 1
            continue
        if num_rows:
            yield first, their_first, num_rows
        first, their_first, num_rows = wanted.row, wanted.source.row, 1
    if num_rows:
        yield first, their_first, num_rows


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
