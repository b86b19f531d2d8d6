"""The puller's plain connection by itself: whatever pieces bytes come in, messages and rows are what was sent."""

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest
import zmq

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.block_frame import decode_header, encode_header, verify
from vllm_tiered_offload.tiers.p2p.framing import PIECE_BYTES, frame
from vllm_tiered_offload.tiers.p2p.instructions import Address, PartId
from vllm_tiered_offload.tiers.p2p.messages import Data, Pong, Reason, Refuse, encode
from vllm_tiered_offload.tiers.p2p.tcp_transport import TcpTransport
from vllm_tiered_offload.tiers.p2p.transport import Event, Garbled, Heard, Lost, Moving

ROW = 2 * PIECE_BYTES + 12_288
UNTOUCHED = b"\xaa" * ROW
SPACE = bytes(32)


class Connected:
    """A transport with one connection, to an owner that is the test."""

    def __init__(self) -> None:
        self.rows = {part: memoryview(bytearray(UNTOUCHED)) for part in range(3)}
        self.wanted = {(1, 1, part) for part in self.rows}
        self.poller = zmq.Poller()
        self.bell = 0
        self.transport = TcpTransport(self.poller, ROW, self.place, self.ring)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.address = Address("127.0.0.1", listening.getsockname()[1])
            self.transport.connect(self.address)
            self.owner, _ = listening.accept()
        self.owner.setblocking(False)
        self.owner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ring(self) -> None:
        self.bell += 1

    def place(self, address: Address, part_id: PartId) -> memoryview | None:
        """Each row once."""
        assert address == self.address
        if part_id not in self.wanted:
            return None
        self.wanted.remove(part_id)
        return self.rows[part_id[2]]

    def hear(self, data: bytes, dice: random.Random) -> list[Event]:
        """All that comes of these bytes, which are sent in pieces of any size, until the answer to the last one."""
        events: list[Event] = []
        view = memoryview(data)
        while not (events and (isinstance(events[-1], Garbled | Lost) or heard(events)[-1:] == [Pong(7)])):
            if view:
                size = dice.choice([1, 5, 4096, 100_000, 1 << 20, 3 << 20])
                with contextlib.suppress(BlockingIOError):
                    view = view[self.owner.send(view[:size]) :]
            ready = {item for item, _ in self.poller.poll(1)}
            events += [event for event in self.transport.events(ready) if not isinstance(event, Moving)]
        return events

    def close(self) -> None:
        self.transport.close()
        self.owner.close()


def heard(events: list[Event]) -> list[object]:
    return [event.answer for event in events if isinstance(event, Heard)]


def payload(part: int) -> bytes:
    return random.Random(part).randbytes(ROW)


def data(*parts: int) -> bytes:
    """Data, and what is behind it."""
    rows = [payload(part) + encode_header(OffloadKey(b"%d" % part), payload(part), SPACE) for part in parts]
    return frame(encode(Data(1, 1, parts))) + b"".join(rows)


LAST = frame(encode(Pong(7)))


@pytest.fixture
def connected() -> Iterator[Connected]:
    connected = Connected()
    yield connected
    connected.close()


@pytest.mark.parametrize("seed", range(8))
def test_rows_and_messages_in_pieces_of_any_size(connected: Connected, seed: int) -> None:
    """Made to fail by a checksum that takes the header for a part of the row, and by one that reads a byte twice."""
    other = encode(Refuse(3, 4, Reason.BUSY))
    events = connected.hear(data(2, 0) + frame(other) + data(1) + LAST, random.Random(seed))
    rows = [event for event in events if isinstance(event, Heard) and isinstance(event.answer, Data)]
    assert [row.answer for row in rows] == [Data(1, 1, (part,)) for part in (2, 0, 1)]
    for row, part in zip(rows, (2, 0, 1), strict=True):
        assert bytes(connected.rows[part]) == payload(part)
        header = decode_header(row.behind[0])
        assert row.checksum is not None
        assert row.checksum.digest == header.checksum
        verify(header, connected.rows[part])


def test_rows_that_nobody_wants_get_nowhere(connected: Connected) -> None:
    """One that came before, and one that was never asked for: what is behind them is understood.

    Made to fail by asking for the place of a row once for all parts of Data.
    """
    events = connected.hear(data(0, 0, 9, 1) + LAST, random.Random(1))
    assert heard(events) == [Data(1, 1, (0,)), Data(1, 1, (1,)), Pong(7)]
    assert bytes(connected.rows[0]) == payload(0)
    assert bytes(connected.rows[1]) == payload(1)
    assert bytes(connected.rows[2]) == UNTOUCHED


def test_data_without_parts_is_no_message(connected: Connected) -> None:
    """The connection is given up before anything is placed."""
    events = connected.hear(frame(encode(Data(1, 1, ()))) + LAST, random.Random(1))
    assert events[0] == Garbled(connected.address)
    assert len(connected.wanted) == 3


def test_an_owner_that_ends_in_the_middle_of_a_row(connected: Connected) -> None:
    """Nothing is heard of that row."""
    connected.owner.setblocking(True)
    connected.owner.sendall(data(0)[: ROW // 2])
    connected.owner.close()
    events = connected.hear(b"", random.Random(1))
    assert events == [Lost(connected.address)]
