"""Messages on a plain TCP connection: four bytes with the length (little endian), then the message.

Behind Data there are the row and the frame header of each of its parts, whose sizes both ends know from the geometry.
The header comes last, so that either end reads a row for its checksum while it moves it: piece by piece, out of its
processor's cache. Nothing else has a length of its own, so what a connection makes us hold is bounded by the largest
message that we read from it.
"""

import contextlib
import socket
import struct

LENGTH = struct.Struct("<I")
PIECE_BYTES = 1 << 20  # of a row, that are moved, and read for its checksum, at a time: more goes slower, and less, too


def frame(message: bytes) -> bytes:
    """The message as it goes over the wire."""
    return LENGTH.pack(len(message)) + message


def set_options(connection: socket.socket) -> None:
    """Non-blocking, without delay; a host that is gone is found out although nobody says anything."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000)):
        with contextlib.suppress(AttributeError, OSError):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
