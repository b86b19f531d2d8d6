"""A thread that owns ZeroMQ sockets. It sleeps until a socket, a wake-up or its next timer; it never polls in vain."""

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection
from math import ceil

import zmq

from vllm_tiered_offload.contract.seams import monotonic

logger = logging.getLogger(__name__)

MAX_ERRORS_IN_A_ROW = 10


class IoThread(ABC):
    """Derive from it: `_open`, `_turn`, `_next_timer`, `_close` run on the thread, everything else on any.

    An error in a turn is logged and the next turn comes; after MAX_ERRORS_IN_A_ROW the thread gives up.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # The descriptor and, with the lock, whether it is still ours: its number is somebody else's after the end.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_is_open = True
        self._bell_lock = threading.Lock()
        self._stopping = False
        self._poller = zmq.Poller()
        self.is_open = threading.Event()  # `_open` is over, well or not
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Have a turn soon. Never blocks; the descriptor is only a counter in memory."""
        with self._bell_lock:
            if self._bell_is_open:
                os.eventfd_write(self._bell, 1)

    @property
    def has_ended(self) -> bool:
        """It was stopped, or could not go on: no socket and no row is touched any more."""
        return self._ended.is_set()

    def stop(self, timeout: float) -> bool:
        """End the thread; whether it has ended within `timeout` seconds. May be called more than once."""
        self._stopping = True
        if self._thread.ident is None:
            self._close_bell()
            return True
        self.wake()
        return self._ended.wait(timeout)

    # ---- what the thread does ----------------------------------------------------------------------------------

    @abstractmethod
    def _open(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Make sockets, and register them with `self._poller`."""

    @abstractmethod
    def _turn(self, ready: Collection[object]) -> None:
        """Something happened. `ready` are the sockets that can be read."""

    @abstractmethod
    def _next_timer(self) -> float | None:
        """When (clock) a turn is due although nothing happens; None for never."""

    def _close(self) -> None:
        """The thread ends."""

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            try:
                self._open(context)
            finally:
                self.is_open.set()
            self._poller.register(self._bell, zmq.POLLIN)
            self._loop()
        except Exception as error:
            logger.error("p2p tier: %s has ended: %s", self._name, error)
        finally:
            self._close()
            context.destroy(linger=0)
            self._close_bell()
            self._ended.set()

    def _close_bell(self) -> None:
        with self._bell_lock:
            if self._bell_is_open:
                self._bell_is_open = False
                os.close(self._bell)

    def _loop(self) -> None:
        errors = 0
        while not self._stopping:
            ready = {item for item, _ in self._poller.poll(self._patience())}
            if self._bell in ready:
                os.eventfd_read(self._bell)
            try:
                self._turn(ready)
                errors = 0
            except Exception:
                errors += 1
                logger.exception("p2p tier: an error on %s that nobody thought of", self._name)
                if errors >= MAX_ERRORS_IN_A_ROW:
                    raise

    def _patience(self) -> int | None:
        """Milliseconds until the next timer, rounded up so that it is due then."""
        timer = self._next_timer()
        return None if timer is None else max(0, ceil((timer - monotonic()) * 1000))
