"""Which engines the entries of `peers` stand for: an address stands for itself, a name for what DNS says at the time.

The directory is pure; the tier's lock covers it. The resolver asks DNS on a thread of its own, which may take as long
as it likes, and tells what has changed. What it knew stays valid while DNS does not answer.
"""

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from vllm_tiered_offload.tiers.p2p.bounded_log import BoundedLog
from vllm_tiered_offload.tiers.p2p.instructions import Address

logger = logging.getLogger(__name__)

MAX_ADDRESSES = 64  # of one name; each one is asked
MAX_EVER = 4096  # addresses that are remembered: names that never come to rest find no more peers then


class Resolved(NamedTuple):
    """A name among the peers has these addresses now; none where it has not had one yet."""

    entry: Address
    addresses: tuple[Address, ...]


class PeerDirectory:
    """The entries of `peers`, and what they stand for."""

    def __init__(self, entries: Iterable[Address]) -> None:
        entries = tuple(entries)
        # Entry -> whom to ask. A name that was not looked up yet is missing.
        self._addresses: dict[Address, tuple[Address, ...]] = {
            entry: (entry,) for entry in entries if is_address(entry.host)
        }
        self.names = tuple(entry for entry in entries if entry not in self._addresses)
        # Every address that there ever was, with the entry that it is counted under; at most MAX_EVER learnt ones.
        self.entry_of: dict[Address, Address] = {entry: entry for entry in self._addresses}

    @property
    def is_complete(self) -> bool:
        """Whether every name was looked up once."""
        return all(name in self._addresses for name in self.names)

    def learn(self, resolved: Resolved) -> None:
        """What DNS says now."""
        for address in resolved.addresses:
            if len(self.entry_of) < MAX_EVER:
                self.entry_of.setdefault(address, resolved.entry)
        self._addresses[resolved.entry] = tuple(a for a in resolved.addresses if a in self.entry_of)

    def all(self) -> tuple[Address, ...]:
        """Everybody who may be asked, each once."""
        return tuple(dict.fromkeys(address for addresses in self._addresses.values() for address in addresses))

    def named(self, host: object, port: object) -> tuple[Address, ...]:
        """Those that a client means by this: an entry, or one of the addresses behind a name. None of a stranger's."""
        for entry, addresses in self._addresses.items():
            if (entry.host, entry.port) == (host, port):
                return addresses
        return tuple(address for address in self.all() if (address.host, address.port) == (host, port))


def is_address(host: str) -> bool:
    """Whether it needs no DNS."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


Lookup = Callable[[str, int], Collection[str]]
"""The addresses of a host name. Raises OSError. The port matters to nobody but a test."""


def ask_dns(host: str, port: int) -> list[str]:
    """What the system's resolver says, each address once."""
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for *_, place in answers))


class Resolver:
    """Looks the names up at once and then every `period` seconds. `tell` is called on its thread and must not block."""

    def __init__(
        self, names: Collection[Address], period: float, tell: Callable[[Resolved], None], lookup: Lookup = ask_dns
    ) -> None:
        self._names = tuple(names)
        self._period = period
        self._tell = tell
        self._lookup = lookup
        self._known: dict[Address, tuple[Address, ...]] = {}
        self._stopping = threading.Event()
        self._log = BoundedLog(logger)
        self._thread = threading.Thread(target=self._run, name="p2p-tier-resolver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Nobody waits for a DNS server: the thread touches nothing that goes away."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            for resolved in self._changes():
                self._tell(resolved)
            self._stopping.wait(self._period)

    def _changes(self) -> Iterator[Resolved]:
        for name in self._names:
            addresses = self._ask(name)
            if addresses != self._known.get(name):
                self._known[name] = addresses
                yield Resolved(name, addresses)

    def _ask(self, name: Address) -> tuple[Address, ...]:
        """In one order, so that only a real change is one."""
        try:
            hosts = sorted(self._lookup(name.host, name.port))
        except (OSError, UnicodeError) as error:
            self._log.warning(f"dns {name.host}", f"peer {name}: {error}; its known addresses stay in use")
            return self._known.get(name, ())
        if len(hosts) > MAX_ADDRESSES:
            self._log.warning(
                f"many {name.host}", f"peer {name}: {MAX_ADDRESSES} of its {len(hosts)} addresses are used"
            )
        return tuple(Address(host, name.port) for host in hosts[:MAX_ADDRESSES])
