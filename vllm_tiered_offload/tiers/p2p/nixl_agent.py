"""NIXL with UCX behind it: agents, and what one tells another of its region.

What this makes up for (NIXL 1.5.1, found by running it):
- UCX reads its settings from the environment when an agent is made. Those that the user has set are respected; ours are
  there only meanwhile, for others in this process use UCX, too. InfiniBand's module crashes the interpreter at exit
  where there is no such hardware; TCP is three times as fast with large segments; and UCX listens on every interface
  unless it is told one.
- The progress thread spins, so there is none: who uses an agent polls it, while there is something to poll for.
- A READ that was cancelled, of a peer that was removed, still writes into the rows when a stopped peer goes on. Only
  the end of the agent ends it. So a puller has an agent for each peer, with a name that nobody had before.
- A damaged description of a peer is often believed: it is only taken from a peer that was welcomed, and has a digest.
"""

import hashlib
import importlib.util
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil

from vllm_tiered_offload.tiers.p2p.messages import DIGEST_BYTES, Memory
from vllm_tiered_offload.tiers.p2p.settings import P2pTierSettings, is_loopback

MEMORY = "DRAM"
PAUSE_SECONDS = 50e-6  # between two polls: the kernel's buffers hold more than comes meanwhile
_ANY_ADDRESS = ("0.0.0.0", "::")

# The environment of the process is one: agents are made one after the other.
_making = threading.Lock()


class NixlError(RuntimeError):
    """NIXL cannot be used; the text says why."""


def why_not_nixl(settings: P2pTierSettings) -> str | None:
    """Why rows are not read with NIXL under these settings; None where they are."""
    if settings.transport == "sockets":
        return "transport is sockets"
    if settings.transport == "auto" and settings.key_file is not None:
        return "NIXL does not encrypt"
    if settings.transport == "auto" and not is_loopback(settings.listen):
        return "whoever reaches NIXL's own port reaches this process's memory (transport: nixl accepts that)"
    if importlib.util.find_spec("nixl") is None:
        return "nixl is not installed"
    return None


def interface_of(host: str) -> str | None:
    """The network interface that has this address; None for any."""
    if host in _ANY_ADDRESS:
        return None
    if is_loopback(host):
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return str(name)
    return None


def ucx_settings(listen: str) -> dict[str, str]:
    """What UCX has to be told that it does not know, by the names of its environment variables."""
    wanted = {
        "UCX_MODULES": "^ib",
        "UCX_TCP_TX_SEG_SIZE": "256K",
        "UCX_TCP_RX_SEG_SIZE": "256K",
        "UCX_NET_DEVICES": interface_of(listen),
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "NIXL_LOG_LEVEL": "WARN",  # it tells each agent on the standard output
    }
    return {name: value for name, value in wanted.items() if value is not None and name not in os.environ}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


class Agent:
    """An agent that learns of our region. One thread at a time uses it."""

    def __init__(self, name: str, listen: str) -> None:
        """Takes up to a second, and longer the first time. Raises NixlError."""
        self.nixl: Any = None
        self._registered: Any = None
        self.base = self.row_bytes = self.num_rows = 0
        try:
            with _making, _environment(ucx_settings(listen)):
                from nixl._api import nixl_agent, nixl_agent_config

                self.nixl = nixl_agent(f"{name} {os.urandom(8).hex()}", nixl_agent_config(enable_prog_thread=False))
        except Exception as error:
            raise NixlError(f"NIXL cannot be used: {type(error).__name__} {error}") from error

    def register(self, rows: Sequence[memoryview]) -> None:
        """Rows are read from these, and into these. Raises NixlError."""
        self.base, self.row_bytes = _find_region(rows)
        self.num_rows = len(rows)
        try:
            self._registered = self.nixl.register_memory([(self.base, self.num_rows * self.row_bytes, 0, "")], MEMORY)
        except Exception as error:
            raise NixlError(f"NIXL cannot register the region: {type(error).__name__} {error}") from error

    def describe(self) -> Memory:
        """For peers that want to read our region."""
        agent = bytes(self.nixl.get_agent_metadata())
        numbers = self.base, self.num_rows, self.row_bytes
        return Memory(agent, *numbers, digest(agent, *numbers))

    def progress(self) -> None:
        """Help peers that are reading."""
        self.nixl.get_new_notifs()

    def close(self) -> None:
        """Nothing gets into our region, and nothing out of it, when this returns: the agent is gone.

        Whoever has handles of transfers gives them back before.
        """
        nixl, self.nixl = self.nixl, None
        if self._registered is not None:
            nixl.deregister_memory(self._registered)
            self._registered = None


def digest(agent: bytes, *numbers: int) -> bytes:
    """Over all that a Memory says."""
    return hashlib.blake2b(repr((agent, numbers)).encode(), digest_size=DIGEST_BYTES).digest()


def _find_region(rows: Sequence[memoryview]) -> tuple[int, int]:
    """The address of row 0 and the size of a row. Raises NixlError unless the rows lie one after the other."""
    if not rows:
        raise NixlError("the region has no rows")
    addresses = [int(np.frombuffer(row, np.uint8).__array_interface__["data"][0]) for row in (rows[0], rows[-1])]
    size = len(rows[0])
    if addresses[1] - addresses[0] != (len(rows) - 1) * size:
        raise NixlError("the rows of the region are not one piece of memory")
    return addresses[0], size
