"""Random packets against a live port: nothing is raised, nothing grows without bound, others are served on.

Three kinds of sender: bytes on a bare TCP connection, half of them behind a greeting of ZeroMQ's so that they reach its
parsers; wire messages of random parts; and wire messages made by damaging good ones, from a peer that was welcomed.
"""

import logging
import os
import random
import resource
import socket
from collections.abc import Iterator

import pytest
from p2p_kit import Puller, Serving, keys_of, wait_until

from vllm_tiered_offload.tiers.p2p.messages import (
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    Fetch,
    Found,
    Lookup,
    Ping,
    Pong,
    Question,
    Reason,
    Release,
    Welcome,
    encode,
)
from vllm_tiered_offload.tiers.p2p.serving import MAX_SESSIONS

KEYS = keys_of("served", 8)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0")
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
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
                    connection.sendall(GREETING)
                    sent += 1
                if dice.random() < 0.5:
                    connection.sendall(READY)
                for _ in range(dice.randint(1, 20)):
                    connection.sendall(dice.randbytes(dice.choice([1, 9, 64, 700])))
                    sent += 1
            except OSError:
                continue


def message_packets(puller: Puller, count: int, dice: random.Random) -> None:
    """Wire messages of random parts."""
    for _ in range(count):
        parts = [dice.randbytes(dice.choice([0, 1, 5, 30, 300])) for _ in range(dice.choice([1, 1, 1, 2, 3, 9, 60]))]
        puller.socket.send_multipart(parts)
        while puller.socket.poll(0):
            puller.socket.recv_multipart()


def damaged_packets(serving: Serving, puller: Puller, count: int, dice: random.Random) -> None:
    """Good messages with a byte changed, cut or added, and a few left as they are: absurd ones among them."""
    epoch = serving.owner.promises.epoch
    good: list[Question] = [
        serving.own,
        Lookup(1, 1, tuple(KEYS)),
        Lookup(2, 1, tuple(dice.randbytes(36) for _ in range(50))),
        Fetch(1, 1, epoch, (0, 1, 2)),
        Fetch(1, 1, os.urandom(16), (7,)),
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
        puller.socket.send(bytes(data))
        while puller.socket.poll(0):
            puller.socket.recv_multipart()


def attack(serving: Serving, packets: int, seed: int = 1) -> None:
    dice = random.Random(seed)
    stranger, welcomed = Puller(serving.port), Puller(serving.port)
    welcomed.greet(serving.own)
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
    """ZeroMQ itself refuses it, before it is in memory. Made to fail by leaving MAXMSGSIZE out."""
    puller = Puller(serving.port)
    puller.greet(serving.own)
    before = peak_mib()
    with socket.create_connection(("127.0.0.1", serving.port), timeout=10) as connection:
        connection.sendall(GREETING + READY + b"\x02" + (1 << 29).to_bytes(8, "big"))
        wait_until(lambda: _is_closed(connection), "closing the connection")
    puller.socket.send(bytes(MAX_MESSAGE_BYTES + 1))
    check_healthy(serving)
    assert peak_mib() - before < GROWTH_LIMIT_MIB
    puller.close()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) == b""
    except OSError:
        return True


def test_a_flood_of_large_questions_pins_no_more_than_it_may(serving: Serving) -> None:
    """Each with as many keys as there may be, and every round another one."""
    puller = Puller(serving.port)
    puller.greet(serving.own)
    before = peak_mib()
    largest = (*KEYS, *keys_of("absent", MAX_KEYS - len(KEYS)))
    for round_ in range(60):
        puller.socket.send(encode(Lookup(1, round_, largest)))
        while puller.socket.poll(0):
            puller.socket.recv_multipart()
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
