"""Two hosts with a cable between them, made of network namespaces. Needs root, `ip` and `tc`."""

import ctypes
import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from typing import Self, TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
OWNER, PULLER = "10.213.77.1", "10.213.77.2"


@functools.cache
def why_not() -> str | None:
    """Why there can be no such hosts here."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2) is not installed"
    try:
        with Hosts():
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.decode(errors='replace').strip()}"


class Hosts:
    """`owner` and `puller` are namespaces; the cable's ends are called as they are."""

    def __init__(self) -> None:
        self.owner, self.puller = (f"vto-{os.getpid()}-{end}" for end in ("o", "p"))

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in (self.owner, self.puller):
            subprocess.run(["ip", "netns", "delete", host], check=False, capture_output=True)

    def _make(self) -> None:
        for host in (self.owner, self.puller):
            _run("ip", "netns", "add", host)
        _run(*f"ip -n {self.owner} link add cable type veth peer name cable netns {self.puller}".split())
        for host, address in ((self.owner, OWNER), (self.puller, PULLER)):
            _run(*f"ip -n {host} address add {address}/24 dev cable".split())
            _run(*f"ip -n {host} link set lo up".split())
            _run(*f"ip -n {host} link set cable up".split())

    def limit(self, rate: str) -> None:
        """What the owner sends goes no faster, such as "80mbit"."""
        _run(
            *f"ip netns exec {self.owner} tc qdisc add dev cable root tbf rate {rate} burst 256kb latency 50ms".split()
        )

    def unplug(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        _run(*f"ip -n {self.owner} link set cable down".split())

    def plug(self) -> None:
        _run(*f"ip -n {self.owner} link set cable up".split())

    def on_puller(self, call: Callable[[], T]) -> T:
        """Call it on the puller's host; the threads that it starts stay there."""
        answers: list[T] = []
        errors: list[BaseException] = []

        def there() -> None:
            try:
                _enter(self.puller)
                answers.append(call())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return answers[0]


def _enter(namespace: str) -> None:
    """Move this thread into the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(descriptor)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
