"""Random packets against a live port: nothing is raised, nothing grows without bound, others are served on.

Three kinds of sender: bytes on a bare TCP connection, half of them behind the greeting of another protocol; whole
messages of random bytes; and messages made by damaging good ones, from a peer that was welcomed.
"""

import logging
import os
import random
import resource
import socket
from collections.abc import Iterator

import pytest
from p2p_kit import Puller, Serving, keys_of, wait_until

from vllm_tiered_offload.tiers.p2p.framing import LENGTH
from vllm_tiered_offload.tiers.p2p.messages import (
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    Confirm,
    Fetch,
    Found,
    Lookup,
    Ping,
    Pong,
    Question,
    Reading,
    Reason,
    Refuse,
    Release,
    Welcome,
    encode,
)
from vllm_tiered_offload.tiers.p2p.serving import MAX_SESSIONS
from vllm_tiered_offload.tiers.p2p.tcp_listener import MAX_CONNECTIONS, STRANGER_BYTES, TcpListener

KEYS = keys_of("served", 8)
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0")
ZMTP_MORE = b"\x01\x08" + bytes(8)  # a part, and more of them follow
GROWTH_LIMIT_MIB = 48


@pytest.fixture
def serving(caplog: pytest.LogCaptureFixture) -> Iterator[Serving]:
    caplog.set_level(logging.WARNING)
    serving = Serving(lease_seconds=0.2)
    serving.put(KEYS)
    yield serving
    serving.close()
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors, errors[0].getMessage()
    assert len(caplog.records) <= 4, "the log grows with the packets"


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def check_healthy(serving: Serving) -> None:
    """A peer that behaves is served, and nothing is larger than it may be."""
    puller = Puller(serving.port)
    try:
        assert isinstance(puller.greet(serving.own), Welcome)
        found = puller.ask(Lookup(1, 1, tuple(KEYS)))
        assert isinstance(found, Found)
        assert len(found.parts) == len(KEYS)
        puller.ask(Fetch(1, 1, found.epoch, (0,)))
        puller.say(Release(1, 1))
        assert puller.ask(Ping(1)) == Pong(1)
    finally:
        puller.close()
    serving.owner.promises.check()
    assert serving.owner.num_sessions <= MAX_SESSIONS
    assert len(serving.server._log._next) <= 64


def raw_packets(port: int, count: int, dice: random.Random) -> None:
    """On bare connections, a new one whenever the other end has had enough."""
    sent = 0
    while sent < count:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            try:
                if dice.random() < 0.5:
                    connection.sendall(ZMTP_GREETING)
                    sent += 1
                for _ in range(dice.randint(1, 20)):
                    connection.sendall(dice.randbytes(dice.choice([1, 9, 64, 700])))
                    sent += 1
            except OSError:
                continue


class Reconnecting:
    """A peer that comes back when it was cut off, and greets if `own` is there."""

    def __init__(self, serving: Serving, *, greets: bool) -> None:
        self.serving, self.greets = serving, greets
        self.puller: Puller | None = None

    def send(self, message: bytes) -> None:
        try:
            if self.puller is None:
                self.puller = Puller(self.serving.port)
                if self.greets:
                    self.puller.greet(self.serving.own)
            self.puller.send(message)
            self.puller.skip_answers()
        except OSError:
            self.close()

    def close(self) -> None:
        if self.puller is not None:
            self.puller.close()
            self.puller = None


def message_packets(peer: Reconnecting, count: int, dice: random.Random) -> None:
    """Whole messages of random bytes."""
    for _ in range(count):
        peer.send(dice.randbytes(dice.choice([1, 5, 30, 300])))


def damaged_packets(serving: Serving, peer: Reconnecting, count: int, dice: random.Random) -> None:
    """Good messages with a byte changed, cut or added, and a few left as they are: absurd ones among them."""
    epoch = serving.owner.promises.epoch
    good: list[Question] = [
        serving.own,
        Lookup(1, 1, tuple(KEYS)),
        Lookup(2, 1, tuple(dice.randbytes(36) for _ in range(50))),
        Fetch(1, 1, epoch, (0, 1, 2)),
        Fetch(1, 1, os.urandom(16), (7,)),
        Reading(1, 1, epoch, (3, 4)),
        Confirm(1, 1, epoch, (3,)),
        Release(1, 1),
        Ping(1),
    ]
    for _ in range(count):
        data = bytearray(encode(dice.choice(good)))
        at = dice.randrange(len(data))
        match dice.randrange(5):
            case 0:
                data[at] ^= 1 << dice.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = dice.randbytes(3)
            case 3:
                data[at : at + 5] = b"\xdd\x7f\xff\xff\xff"
        peer.send(bytes(data))


def attack(serving: Serving, packets: int, seed: int = 1) -> None:
    dice = random.Random(seed)
    stranger, welcomed = Reconnecting(serving, greets=False), Reconnecting(serving, greets=True)
    try:
        for _ in range(10):
            raw_packets(serving.port, packets // 30, dice)
            message_packets(stranger, packets // 30, dice)
            damaged_packets(serving, welcomed, packets // 30, dice)
            check_healthy(serving)
    finally:
        stranger.close()
        welcomed.close()


def test_100000_random_packets(serving: Serving) -> None:
    """Made to fail by letting msgspec's DecodeError through, and by a log without bounds."""
    attack(serving, 2_000)
    before, malformed = peak_mib(), serving.owner.refused[Reason.MALFORMED]
    attack(serving, 100_000, seed=2)
    assert peak_mib() - before < GROWTH_LIMIT_MIB
    assert serving.owner.refused[Reason.MALFORMED] - malformed > 40_000, "the packets did not get there"


def test_a_message_beyond_the_largest_closes_the_connection(serving: Serving) -> None:
    """Before it is in memory; for a stranger that is a small one. Made to fail by leaving the bounds out."""
    puller = Puller(serving.port)
    puller.greet(serving.own)
    before = peak_mib()
    for peer, size in ((puller, MAX_MESSAGE_BYTES + 1), (Puller(serving.port), STRANGER_BYTES + 1)):
        peer.socket.sendall(LENGTH.pack(size) + bytes(100))
        while (heard := peer.hear()) is not None:
            assert heard[0] == Refuse(0, 0, Reason.MALFORMED)
        peer.close()
    check_healthy(serving)
    assert peak_mib() - before < GROWTH_LIMIT_MIB


def test_what_never_ends_takes_no_room(serving: Serving) -> None:
    """Bytes without an end from many connections at once: in one message, and in messages without number, among them
    ZeroMQ's, of which libzmq would have held as many parts as anybody sends. Made to fail by receiving without bounds.
    """
    before = peak_mib()
    endless = [bytes(1 << 16), LENGTH.pack(STRANGER_BYTES) + bytes(1 << 16), ZMTP_GREETING + ZMTP_MORE * (1 << 12)]
    for number in range(300):
        with socket.create_connection(("127.0.0.1", serving.port), timeout=10) as connection:
            try:
                for _ in range(16):
                    connection.sendall(endless[number % len(endless)])
            except OSError:
                continue
    check_healthy(serving)
    assert peak_mib() - before < GROWTH_LIMIT_MIB


def test_strangers_do_not_keep_peers_out(serving: Serving) -> None:
    """However many connect: the oldest stranger makes room, never one that was welcomed. Made to fail by refusing the
    newest."""
    known = Puller(serving.port)
    known.greet(serving.own)
    silent = [socket.create_connection(("127.0.0.1", serving.port), timeout=10) for _ in range(MAX_CONNECTIONS + 20)]
    check_healthy(serving)
    assert known.ask(Ping(1)) == Pong(1)
    listener = serving.server._listener
    assert isinstance(listener, TcpListener)
    assert len(listener._connections) <= MAX_CONNECTIONS
    for connection in silent:
        connection.close()
    known.close()


def test_a_flood_of_large_questions_pins_no_more_than_it_may(serving: Serving) -> None:
    """Each with as many keys as there may be, and every round another one."""
    puller = Puller(serving.port)
    puller.greet(serving.own)
    before = peak_mib()
    largest = (*KEYS, *keys_of("absent", MAX_KEYS - len(KEYS)))
    for round_ in range(60):
        puller.say(Lookup(1, round_, largest))
        assert puller.hear() is not None
    puller.say(Ping(1))
    wait_until(lambda: isinstance(answer := puller.hear(), tuple) and answer[0] == Pong(1), "the last answer")
    assert serving.owner.promises.num_rows <= 16
    check_after = Puller(serving.port)
    assert isinstance(check_after.greet(serving.own), Welcome)
    check_after.close()
    puller.close()
    assert peak_mib() - before < GROWTH_LIMIT_MIB


def test_connections_that_say_nothing(serving: Serving) -> None:
    """Whoever connects and is silent is cut off after the time for a handshake, and holds up nobody meanwhile."""
    silent = [socket.create_connection(("127.0.0.1", serving.port), timeout=10) for _ in range(100)]
    check_healthy(serving)
    for connection in silent:
        connection.setblocking(False)
    wait_until(lambda: all(_ended(connection) for connection in silent), "cutting off silent connections")
    for connection in silent:
        connection.close()


def _ended(connection: socket.socket) -> bool:
    """Read what ZeroMQ says for itself, up to the end of the connection."""
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
