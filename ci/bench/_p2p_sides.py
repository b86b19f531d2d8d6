"""The two ends of a pull, in a process each: the tier's own, raw NIXL READs, and plain sockets.

`python _p2p_sides.py KIND ROWS ROW_BYTES` is the end that has the rows; it prints one line of JSON that says where it
is, and serves until it is killed. The other ends are classes with a `pull`, which fetches all rows and takes seconds.
"""

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import zmq

from vllm_tiered_offload.contract.fingerprint import FIELDS, Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import JobMetadata, LookupResult, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.cpu.tier import CpuTier, CpuTierSettings
from vllm_tiered_offload.tiers.p2p.nixl_agent import Agent
from vllm_tiered_offload.tiers.p2p.nixl_reader import READS_IN_FLIGHT
from vllm_tiered_offload.tiers.p2p.read_queue import READ_BYTES
from vllm_tiered_offload.tiers.p2p.tier import P2pTier

FINGERPRINT = Fingerprint.of({**dict.fromkeys(FIELDS, None), "model": "bench"})
HOST = "127.0.0.1"
PATIENCE = 60.0
STORE_ANEW = signal.SIGUSR1  # tells a tier's owner that its rows are other ones, of which nothing is known yet


class Rows:
    """A region whose pages are there."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.geometry = RegionGeometry(num_rows, (row_bytes,), 1)
        self.whole = memoryview(mmap.mmap(-1, num_rows * row_bytes))
        self.rows = [self.whole[index * row_bytes : (index + 1) * row_bytes] for index in range(num_rows)]
        self.fill(b"\0")

    def fill(self, byte: bytes) -> None:
        self.whole[:] = byte * len(self.whole)

    def fill_randomly(self) -> None:
        for row in self.rows:
            row[:] = os.urandom(len(row))


def keys_of(num_rows: int) -> list[OffloadKey]:
    return [OffloadKey(b"bench %8d" % index) for index in range(num_rows)]


# ---- the end that has the rows -------------------------------------------------------------------------------------


def end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def announce(**where: object) -> None:
    print(json.dumps(where), flush=True)


def serve_tier(region: Rows, num_rows: int, settings: dict[str, Any]) -> None:
    """Of twice as many rows, because one peer is promised no more than half of them."""
    primary = CpuTier(CpuTierSettings(capacity=region.geometry.total_bytes), strict=True)
    primary.bind_region(region.geometry)
    request = ReqContext("owner")
    primary.on_new_request(request)
    keys = keys_of(num_rows)

    def store() -> tuple[int, ...]:
        prepared = primary.prepare_store(keys, request)
        primary.complete_store(prepared)
        return prepared.block_ids

    stored = store()
    tier = P2pTier.from_settings({"lease_share": 1.0, "lease_seconds": 60.0, **settings}, engine_id="owner")
    tier.bind_region(region.rows, region.geometry, FINGERPRINT)
    tier.bind_leases(primary)
    tier.submit_store(JobMetadata(1, tuple(keys), stored, False, request))
    while tier.port is None:
        time.sleep(0.01)
    announce(port=tier.port)
    while signal.sigwait({STORE_ANEW}):
        primary.complete_load(primary.prepare_load(keys, request), keys)
        store()


def serve_nixl(region: Rows) -> None:
    agent = Agent("raw owner", HOST)
    agent.register(region.rows)
    announce(agent=agent.describe().agent.hex(), base=agent.base)
    while True:
        agent.nixl.get_new_notifs()
        time.sleep(0)


def serve_sockets(region: Rows) -> None:
    listening = socket.create_server((HOST, 0))
    announce(port=listening.getsockname()[1])
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while connection.recv(1):
        for row in region.rows:
            connection.sendall(row)


# ---- the end that wants them ---------------------------------------------------------------------------------------


class Owner:
    """The process with the rows, and where it is."""

    def __init__(self, kind: str, rows: Rows, settings: dict[str, Any] | None = None) -> None:
        arguments = [kind, str(len(rows.rows)), str(rows.geometry.row_bytes), json.dumps(settings or {})]
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.where = json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Puller(Protocol):
    def pull(self) -> float:
        """All rows; seconds."""

    def close(self) -> None:
        """It and its owner."""


class TierPuller:
    """Ours. What counts is from the load to its result, as the scheduler thread sees them.

    `anew`: nobody has pulled these rows since they were stored, so they have to be proved; otherwise they were.
    """

    def __init__(
        self, region: Rows, transport: str, owner: dict[str, Any], own: dict[str, Any], *, anew: bool = False
    ) -> None:
        self.region = region
        self.anew = anew
        self.owner = Owner("tier", region, {"transport": transport, **owner})
        peer = {"host": HOST, "port": self.owner.where["port"], **own.pop("peer", {})}
        self.tier = P2pTier.from_settings(
            {
                "peers": [peer],
                "transport": transport,
                "lookup_cache": 0,
                "lookup_timeout": 5,
                "silence_timeout": 5,
                **own,
            },
            engine_id="puller",
        )
        self.tier.bind_region(region.rows, region.geometry, FINGERPRINT)
        self.keys = keys_of(len(region.rows))
        self.numbers = count(1)
        self.must_read = transport == "nixl"
        self._attach()

    def _attach(self) -> None:
        """Until the owner serves, and rows do not come over sockets any more if they are to be read."""
        deadline = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < deadline, "the owner does not serve, or NIXL is not used"
            request = self._find()
            if request is not None:
                self.tier.on_request_finished(request)
                time.sleep(0.2)  # until that is released
                self.pull()
                if not self.must_read or self.tier.get_stats()["p2p_rows_read_total"]:
                    return
            time.sleep(0.2)

    def _find(self) -> ReqContext | None:
        """A request that was promised all rows."""
        request = ReqContext(f"r{next(self.numbers)}")
        self.tier.on_new_request(request)
        while LookupResult.RETRY in (found := self.tier.lookup(self.keys, request)):
            self.tier.on_schedule_end()
            time.sleep(0.0005)
        if LookupResult.MISS not in found:
            return request
        self.tier.on_request_finished(request)
        return None

    def pull(self) -> float:
        if self.anew:
            self.owner.process.send_signal(STORE_ANEW)
            time.sleep(0.05)  # until that is done
        request = self._find()
        assert request is not None, "the owner does not have the rows"
        began = time.perf_counter()
        rows = tuple(range(len(self.keys)))
        self.tier.submit_load(JobMetadata(next(self.numbers), tuple(self.keys), rows, True, request))
        assert self.tier.drain(PATIENCE)
        seconds = time.perf_counter() - began
        [result] = self.tier.get_finished_jobs()
        assert result.success, "a pull failed"
        self.tier.on_request_finished(request)
        return seconds

    def close(self) -> None:
        self.tier.shutdown()
        self.owner.end()


class RawNixlPuller:
    """READs of all rows, `rows_a_read` in each, `at_once` of them in flight.

    Its owner helps without a pause, and is stopped as long as others are measured, who would have a core less.
    """

    def __init__(self, region: Rows, rows_a_read: int, at_once: int) -> None:
        self.region, self.rows_a_read, self.at_once = region, rows_a_read, at_once
        self.owner = Owner("nixl", region)
        self.agent = Agent("raw puller", HOST)
        self.agent.register(region.rows)
        self.name = self.agent.nixl.add_remote_agent(bytes.fromhex(self.owner.where["agent"]))
        self.owner.process.send_signal(signal.SIGSTOP)

    def pull(self) -> float:
        self.owner.process.send_signal(signal.SIGCONT)
        try:
            return self._pull()
        finally:
            self.owner.process.send_signal(signal.SIGSTOP)

    def _pull(self) -> float:
        began = time.perf_counter()
        nixl, flying = self.agent.nixl, []
        first, total = 0, len(self.region.rows)
        while first < total or flying:
            while first < total and len(flying) < self.at_once:
                handle = self._new_read(first, min(first + self.rows_a_read, total))
                first += self.rows_a_read
                if nixl.transfer(handle) == "DONE":
                    handle.release()
                else:
                    flying.append(handle)
            for handle in list(flying):
                if nixl.check_xfer_state(handle) == "DONE":
                    flying.remove(handle)
                    handle.release()
        return time.perf_counter() - began

    def _new_read(self, first: int, end: int) -> Any:
        size, nixl = self.region.geometry.row_bytes, self.agent.nixl
        sides = (self.agent.base, self.owner.where["base"])
        lists = (nixl.get_xfer_descs([(base + i * size, size, 0) for i in range(first, end)], "DRAM") for base in sides)
        return nixl.initialize_xfer("READ", *lists, self.name)

    def close(self) -> None:
        self.agent.close()
        self.owner.end()


def raw_nixl(region: Rows) -> list[RawNixlPuller]:
    """One READ for all rows, and small ones, some at a time."""
    small = max(1, READ_BYTES // region.geometry.row_bytes)
    return [RawNixlPuller(region, len(region.rows), 1), RawNixlPuller(region, small, READS_IN_FLIGHT)]


class SocketPuller:
    """sendall into recv_into, row by row."""

    def __init__(self, region: Rows) -> None:
        self.region = region
        self.owner = Owner("sockets", region)
        self.socket = socket.create_connection((HOST, self.owner.where["port"]))

    def pull(self) -> float:
        began = time.perf_counter()
        self.socket.sendall(b"g")
        for row in self.region.rows:
            got = 0
            while got < len(row):
                got += self.socket.recv_into(row[got:])
        return time.perf_counter() - began

    def close(self) -> None:
        self.socket.close()
        self.owner.end()


def keyed(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of an owner and of a puller that have keys."""
    pairs = [zmq.curve_keypair(), zmq.curve_keypair()]
    files = [directory / "owner.key", directory / "puller.key"]
    for file, (_, secret) in zip(files, pairs, strict=True):
        file.write_bytes(secret)
    publics = [public.decode("ascii") for public, _ in pairs]
    owner = {"key_file": str(files[0]), "allowed_keys": [publics[1]]}
    return owner, {"key_file": str(files[1]), "peer": {"public_key": publics[0]}}


def main(arguments: Sequence[str]) -> None:
    kind, num_rows, row_bytes, settings = arguments[0], int(arguments[1]), int(arguments[2]), json.loads(arguments[3])
    signal.pthread_sigmask(signal.SIG_BLOCK, {STORE_ANEW})  # in every thread, for whoever waits for it
    threading.Thread(target=end_with_parent, daemon=True).start()
    region = Rows(2 * num_rows if kind == "tier" else num_rows, row_bytes)
    region.fill_randomly()
    match kind:
        case "tier":
            serve_tier(region, num_rows, settings)
        case "nixl":
            serve_nixl(region)
        case "sockets":
            serve_sockets(region)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(sys.argv[1:])
