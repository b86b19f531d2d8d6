"""One stranger's connection to an engine's peer tier, for `p2p ping`."""

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import ceil
from typing import Self

import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_tiered_offload.tiers.p2p.framing import LENGTH, frame
from vllm_tiered_offload.tiers.p2p.keys import read_key_file
from vllm_tiered_offload.tiers.p2p.messages import (
    MAX_MESSAGE_BYTES,
    MessageError,
    Ping,
    Pong,
    Refuse,
    decode_answer,
    encode,
)
from vllm_tiered_offload.tiers.p2p.sockets import endpoint

_NOBODY = "nobody listens there"
_NO_PEER_TIER = "what answers there is no peer tier of this version without keys"


class NoAnswer(Exception):
    """Why there is none: one line."""


class Pinging(ABC):
    """A connection to an engine. `round_trip` and `__enter__` raise NoAnswer."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """End the connection."""

    def round_trip(self, number: int, timeout: float) -> float:
        """Seconds until the thread that serves has answered."""
        started = time.monotonic()
        answer = self._ask(encode(Ping(number)), started + timeout)
        seconds = time.monotonic() - started
        if answer is None:
            raise NoAnswer(f"no answer within {timeout:g} s")
        try:
            # It greets before it says anything else, so a refusal is what a stranger hears.
            is_one = isinstance(decode_answer(answer), Pong | Refuse)
        except MessageError:
            is_one = False
        if not is_one:
            raise NoAnswer(_NO_PEER_TIER)
        return seconds

    @abstractmethod
    def _ask(self, message: bytes, deadline: float) -> bytes | None:
        """The message that comes back by then (monotonic), if any."""


def pinging(address: str, key_file: str | None, public_key: str | None) -> Pinging:
    """A connection to HOST:PORT. Raises ValueError (one line) where that, or the keys, cannot be."""
    host, port = _parted(address)
    if key_file is None and public_key is None:
        return PlainPinging(host, port)
    if key_file is None or public_key is None:
        raise ValueError("--key-file and --public-key go together")
    return CurvePinging(host, port, key_file, public_key)


def _parted(address: str) -> tuple[str, int]:
    """HOST:PORT, with an IPv6 host in brackets."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address}: expected HOST:PORT")
    return host, int(port)


class PlainPinging(Pinging):
    """TCP, to an engine without keys."""

    def __init__(self, host: str, port: int) -> None:
        self._where = host, port
        self._socket: socket.socket | None = None

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def _ask(self, message: bytes, deadline: float) -> bytes | None:
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self._where, timeout=max(0.0, deadline - time.monotonic()))
            self._socket.sendall(frame(message))
            [length] = LENGTH.unpack(self._receive(self._socket, LENGTH.size, deadline))
            return self._receive(self._socket, length, deadline) if length <= MAX_MESSAGE_BYTES else b""
        except ConnectionRefusedError:
            raise NoAnswer(_NOBODY) from None
        except TimeoutError:
            return None
        except OSError as error:
            raise NoAnswer(error.strerror or str(error)) from None

    @staticmethod
    def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
        received = b""
        while len(received) < size:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(size - len(received))
            if not part:
                raise NoAnswer("it ended the connection: has it keys? Then name --key-file and --public-key")
            received += part
        return received


_ENDS: Mapping[int, str] = {
    zmq.EVENT_CLOSED: _NOBODY,
    zmq.EVENT_CONNECT_RETRIED: _NOBODY,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not let this key in: it belongs into its `allowed_keys`",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it has no keys: leave out --key-file and --public-key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it ended the handshake: is --public-key its key, and has it keys at all?",
    zmq.EVENT_DISCONNECTED: "it ended the handshake: is --public-key its key, and has it keys at all?",
}


class CurvePinging(Pinging):
    """ZeroMQ under CURVE, to an engine with keys."""

    def __init__(self, host: str, port: int, key_file: str, public_key: str) -> None:
        keys = read_key_file(key_file)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = ":" in host
        for option, value in ((zmq.RECONNECT_IVL, -1), (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)):
            self._socket.setsockopt(option, value)
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        try:
            self._socket.curve_serverkey = public_key.encode("ascii")
        except (ValueError, zmq.ZMQError):
            self._context.destroy(linger=0)
            raise ValueError("--public-key: expected 40 characters of Z85") from None
        self._monitor = self._socket.get_monitor_socket()
        self._poller = zmq.Poller()
        for item in (self._socket, self._monitor):
            self._poller.register(item, zmq.POLLIN)
        self._socket.connect(endpoint(host, port))

    def __exit__(self, *_: object) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def _ask(self, message: bytes, deadline: float) -> bytes | None:
        self._socket.send(message, zmq.NOBLOCK)
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(self._poller.poll(ceil(left * 1000)))
            if self._socket in ready:
                return self._socket.recv_multipart()[0]
            if self._monitor in ready:
                event = parse_monitor_message(self._monitor.recv_multipart())["event"]
                if event in _ENDS:
                    raise NoAnswer(_ENDS[event])
        return None
