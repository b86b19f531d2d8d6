"""What both ends do with their ZeroMQ sockets."""

from collections.abc import Sequence

import zmq

# MAXMSGSIZE counts what is on the wire: under CURVE a nonce and an authenticator more, some 40 bytes.
CURVE_BYTES = 64


def receive_parts(socket: "zmq.Socket[bytes]", max_parts: int) -> list[zmq.Frame]:
    """One wire message, of which at most `max_parts` + 1 parts are kept. Raises zmq.Again where there is none."""
    parts = [socket.recv(zmq.NOBLOCK, copy=False)]
    while parts[-1].more and len(parts) <= max_parts:
        parts.append(socket.recv(zmq.NOBLOCK, copy=False))
    more = parts[-1].more
    while more:
        more = socket.recv(zmq.NOBLOCK, copy=False).more
    return parts


def endpoint(host: str, port: int | str) -> str:
    """The TCP endpoint of ZeroMQ."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def set_common_options(socket: "zmq.Socket[bytes]", host: str, options: Sequence[tuple[int, int]]) -> None:
    """Options that every ZeroMQ socket of this tier has, and `options`."""
    socket.linger = 0
    socket.ipv6 = ":" in host
    for option, value in options:
        socket.setsockopt(option, value)
