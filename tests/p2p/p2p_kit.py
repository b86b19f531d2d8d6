"""What the tests of the peer tier are made of: an engine with chunks in memory, and a puller that says anything."""

import contextlib
import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import zmq

from vllm_tiered_offload import (
    Fingerprint,
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadKey,
    RegionGeometry,
    ReqContext,
)
from vllm_tiered_offload.testing.conformance.material import content, keys_of, make_fingerprint, make_rows
from vllm_tiered_offload.tiers.block_frame import HEADER_BYTES
from vllm_tiered_offload.tiers.cpu.tier import CpuTier, CpuTierSettings
from vllm_tiered_offload.tiers.p2p.framing import LENGTH, frame
from vllm_tiered_offload.tiers.p2p.instructions import Address
from vllm_tiered_offload.tiers.p2p.leases import PromiseLimits, Promises
from vllm_tiered_offload.tiers.p2p.messages import Answer, Data, Hello, Question, decode_answer, encode
from vllm_tiered_offload.tiers.p2p.nixl_reader import NixlReader
from vllm_tiered_offload.tiers.p2p.server import PeerServer
from vllm_tiered_offload.tiers.p2p.serving import Owner, greeting
from vllm_tiered_offload.tiers.p2p.settings import P2pTierSettings
from vllm_tiered_offload.tiers.p2p.tier import P2pTier

ROW = 4096
needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
PATIENCE = 10.0
FINGERPRINT = make_fingerprint()
A = ReqContext("a")

__all__ = ["content", "keys_of"]  # for the tests


def attach_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's memory is attached by the time it has answered a first question. In production its rows come over
    sockets until a thread has done that."""

    attach = NixlReader.attach

    def and_wait(reader: NixlReader, address: Address, memory: Any) -> None:
        attach(reader, address, memory)
        if address in reader._peers:
            assert reader._peers[address].is_made.wait(PATIENCE)

    monkeypatch.setattr(NixlReader, "attach", and_wait)


def wait_until(done: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE:g} s"
        time.sleep(0.005)


class Memory:
    """An engine's primary tier and rows. Whoever puts chunks in is its scheduler thread."""

    def __init__(self, rows: int = 16, row_bytes: int = ROW, geometry: RegionGeometry | None = None) -> None:
        self.geometry = geometry or RegionGeometry(rows, (row_bytes,), 1)
        self.rows = make_rows(self.geometry)
        self.primary = CpuTier(CpuTierSettings(capacity=self.geometry.total_bytes), strict=True)
        self.primary.bind_region(self.geometry)
        self.req = ReqContext("owner")
        self.primary.on_new_request(self.req)

    def put(self, keys: Sequence[OffloadKey], salt: str = "") -> None:
        prepared = self.primary.prepare_store(list(keys), self.req)
        assert prepared.keys == tuple(keys)
        for key, row in zip(prepared.keys, prepared.block_ids, strict=True):
            self.rows[row][:] = content(key, self.geometry.row_bytes, salt)
        self.primary.complete_store(prepared)

    @property
    def pinned(self) -> int:
        return int(self.primary.get_stats()["rows_pinned"])


class Serving:
    """An engine that serves. `shared` are the keys that may leave."""

    def __init__(self, memory: Memory | None = None, *, fingerprint: Fingerprint = FINGERPRINT, **settings: object):
        self.memory = memory or Memory()
        self.settings = P2pTierSettings.model_validate({"transport": "sockets", **settings})
        self.shared: set[OffloadKey] = set()
        self.own = greeting(fingerprint, self.memory.geometry, "owner")
        rows = self.memory.geometry.num_rows
        limits = PromiseLimits(self.settings.lease_seconds, rows, rows // 2)
        self.owner = Owner(self.own, Promises(self.memory.primary, self.shared, limits))
        self.server = PeerServer(self.settings, "owner")
        self.server.start()
        self.server.serve(self.owner, self.memory.rows)
        assert self.server.is_open.wait(PATIENCE)

    @property
    def port(self) -> int:
        assert self.server.port is not None
        return self.server.port

    def put(self, keys: Sequence[OffloadKey], salt: str = "") -> None:
        self.memory.put(keys, salt)
        self.shared.update(keys)

    def close(self) -> None:
        assert self.server.stop(PATIENCE)
        assert self.memory.pinned == 0


class Engine:
    """A tier with memory; the test is its scheduler thread."""

    def __init__(
        self,
        peers: Sequence[int] = (),
        *,
        rows: int = 128,
        row_bytes: int = ROW,
        fingerprint: Fingerprint = FINGERPRINT,
        **settings: Any,
    ) -> None:
        addresses = settings.pop("peers_block", [{"host": "127.0.0.1", "port": port} for port in peers])
        block = {"peers": addresses, "transport": "sockets", **settings}
        self.memory = Memory(rows, row_bytes)
        self.tier = P2pTier.from_settings(block, engine_id=f"engine {id(self)}")
        self.tier.bind_region(self.memory.rows, self.memory.geometry, fingerprint)
        self.tier.bind_leases(self.memory.primary)
        assert self.tier._server.is_open.wait(PATIENCE)
        self.ids = count(1)
        self.results: dict[int, JobResult] = {}

    @property
    def port(self) -> int:
        assert self.tier.port is not None
        return self.tier.port

    def put(self, keys: Sequence[OffloadKey], salt: str = "") -> None:
        """Into host memory, and offered to the tier as the hierarchy does."""
        self.memory.put(keys, salt)
        job = JobMetadata(next(self.ids), tuple(keys), tuple(range(len(keys))), False, self.memory.req)
        self.tier.submit_store(job)

    def begin(self, req: ReqContext = A) -> ReqContext:
        self.tier.on_new_request(req)
        return req

    def look(self, keys: Sequence[OffloadKey], req: ReqContext = A) -> list[LookupResult]:
        """Scheduling passes until the answer is there."""
        deadline = time.monotonic() + PATIENCE
        while LookupResult.RETRY in (results := self.tier.lookup(keys, req)):
            assert time.monotonic() < deadline, "RETRY for ever"
            self.end_pass()
            time.sleep(0.002)
        return results

    def end_pass(self) -> None:
        self.tier.on_schedule_end()
        for result in self.tier.get_finished_jobs():
            assert result.job_id not in self.results, "a second result"
            self.results[result.job_id] = result

    def submit(self, keys: Sequence[OffloadKey], rows: Sequence[int] | None = None, req: ReqContext = A) -> int:
        chosen = tuple(rows if rows is not None else range(len(keys)))
        job = JobMetadata(next(self.ids), tuple(keys), chosen, True, req)
        self.tier.submit_load(job)
        return job.job_id

    def result(self, job_id: int) -> JobResult:
        def done() -> bool:
            self.end_pass()
            return job_id in self.results

        wait_until(done, f"the result of job {job_id}")
        return self.results[job_id]

    def load(self, keys: Sequence[OffloadKey], req: ReqContext = A) -> tuple[OffloadKey, ...]:
        """The keys that came through, whose bytes are right."""
        result = self.result(self.submit(keys, req=req))
        for row, key in enumerate(keys):
            if key in result.successful_keys:
                assert bytes(self.memory.rows[row]) == content(key, self.memory.geometry.row_bytes), "a wrong byte"
        return result.successful_keys

    def stat(self, name: str) -> float:
        """A number, or the sum over the labels that are left out of its name."""
        stats = self.tier.get_stats()
        return stats.get(name) or sum(value for key, value in stats.items() if key.startswith(f"{name}|"))

    def close(self) -> None:
        self.tier.shutdown()
        assert self.memory.pinned == 0


class Puller:
    """A peer on the plain port that says what the test says."""

    def __init__(self, port: int, row_bytes: int = ROW) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.row_bytes = row_bytes

    def say(self, question: Question) -> None:
        self.send(encode(question))

    def send(self, message: bytes) -> None:
        """Whatever it is."""
        self.socket.sendall(frame(message))

    def hear(self, seconds: float = PATIENCE) -> tuple[Answer, list[bytes]] | None:
        """The next answer and what follows it, part by part; None where none comes, or no more ever."""
        try:
            self.socket.settimeout(seconds)
            [length] = LENGTH.unpack(self._receive(LENGTH.size))
            self.socket.settimeout(PATIENCE)
            answer = decode_answer(self._receive(length))
            sizes = (self.row_bytes, HEADER_BYTES) * len(answer.parts) if isinstance(answer, Data) else ()
            return answer, [self._receive(size) for size in sizes]
        except OSError:
            return None

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            some = self.socket.recv(size - len(data))
            if not some:
                raise OSError("closed")
            data += some
        return bytes(data)

    def skip_answers(self) -> None:
        """Read what is there, whatever it is."""
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self.socket.recv(1 << 20):
                pass
        self.socket.settimeout(PATIENCE)

    def ask(self, question: Question) -> Answer:
        """One round trip."""
        self.say(question)
        heard = self.hear()
        assert heard is not None, f"no answer to {question}"
        return heard[0]

    def greet(self, hello: Hello) -> Answer:
        return self.ask(hello)

    def close(self) -> None:
        self.socket.close()


class KeyedPuller:
    """A peer on the encrypted port."""

    def __init__(self, port: int, **options: bytes) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def say(self, question: Question) -> None:
        self.socket.send(encode(question))

    def hear(self, seconds: float = PATIENCE) -> tuple[Answer, list[bytes]] | None:
        """The next answer and what follows it; None where none comes."""
        if not self.socket.poll(int(seconds * 1000)):
            return None
        parts = self.socket.recv_multipart()
        return decode_answer(parts[0]), parts[1:]

    def close(self) -> None:
        self.context.destroy(linger=0)


def cpu_seconds(thread_name: str) -> float:
    """CPU time of a live thread of this process."""
    [thread] = [thread for thread in threading.enumerate() if thread.name == thread_name]
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
