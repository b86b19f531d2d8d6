"""A gate between an engine and its peer. It can be shut in the middle of a pull, whose milliseconds are hard to hit."""

import socket
import threading

from vllm_tiered_offload.tiers.p2p.framing import LENGTH
from vllm_tiered_offload.tiers.p2p.messages import Confirm, Fetch, decode_question


class Gate:
    """Hands what comes to `port` of this machine on to port `to`, message by message, and all that comes from there."""

    def __init__(self, port: int, to: int) -> None:
        self.to = to
        self._rows_left: int | None = None  # that may come before it is shut
        self._listening = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._serve, daemon=True).start()

    def shut_after(self, rows: int) -> None:
        """Let nothing more through once so many rows were asked for, or have been read and were to be confirmed."""
        self._rows_left = rows

    def _serve(self) -> None:
        while True:
            puller, _ = self._listening.accept()
            try:
                owner = socket.create_connection(("127.0.0.1", self.to))
            except OSError:  # it is gone
                puller.close()
                continue
            for end in (puller, owner):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for hand_on, one, other in ((self._say, puller, owner), (self._answer, owner, puller)):
                threading.Thread(target=self._until_gone, args=[hand_on, one, other], daemon=True).start()

    def _until_gone(self, hand_on, one: socket.socket, other: socket.socket) -> None:
        try:
            hand_on(one, other)
        except (OSError, EOFError):
            for end in (one, other):
                end.close()

    def _say(self, puller: socket.socket, owner: socket.socket) -> None:
        with puller.makefile("rb") as said:
            while True:
                length = _exactly(said, LENGTH.size)
                message = _exactly(said, *LENGTH.unpack(length))
                owner.sendall(length + message)
                question = decode_question(message)
                if self._rows_left is not None and isinstance(question, Fetch | Confirm):
                    self._rows_left -= len(question.parts)
                    if self._rows_left <= 0:
                        threading.Event().wait()

    def _answer(self, owner: socket.socket, puller: socket.socket) -> None:
        while data := owner.recv(1 << 20):
            puller.sendall(data)
        raise EOFError


def _exactly(said, count: int) -> bytes:
    data = said.read(count)
    if len(data) < count:
        raise EOFError
    return data
