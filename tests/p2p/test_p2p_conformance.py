"""The peer tier through the conformance suite.

A pull-only tier stores nothing, so the suite's stores are done by the test: `Storing` puts their bytes into the memory
of another engine, which serves them over its port. Everything that comes back was pulled by the tier under test. What
it stands for: lookups, loads, faults, threads, reset and end of the puller. What it does not: stores are not the
tier's own, so the suite's tests of what a store leaves behind after a reset are left out, with the reason.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import pytest
from msgspec.structs import replace as replace_fields
from p2p_kit import PATIENCE, Memory, attach_at_once, needs_nixl

from vllm_tiered_offload import (
    Fingerprint,
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadKey,
    RegionGeometry,
    SecondaryTierManager,
)
from vllm_tiered_offload.testing.conformance import Faults, SecondaryTierConformance
from vllm_tiered_offload.tiers.block_frame import CHECKSUM_BYTES, PayloadChecksum
from vllm_tiered_offload.tiers.p2p.directory import PeerDirectory
from vllm_tiered_offload.tiers.p2p.instructions import Address
from vllm_tiered_offload.tiers.p2p.leases import PromisedRow
from vllm_tiered_offload.tiers.p2p.messages import Proof, Reason, Refuse
from vllm_tiered_offload.tiers.p2p.settings import PeerAddress
from vllm_tiered_offload.tiers.p2p.tier import P2pTier

STORES_AFTER_A_RESET = "opted out: after a reset a peer tier shares and pulls nothing, whatever is stored elsewhere"


class OwnerEngine:
    """Another engine with a large memory, whose serving can be troubled."""

    def __init__(self, geometry: RegionGeometry, fingerprint: Fingerprint, transport: str) -> None:
        rows = 1024 if geometry.row_bytes <= 1 << 14 else 64
        self.memory = Memory(geometry=replace(geometry, num_rows=rows))
        self.tier = P2pTier.from_settings({"lease_share": 1.0, "transport": transport}, engine_id=f"owner {id(self)}")
        self.tier.bind_region(self.memory.rows, self.memory.geometry, fingerprint)
        self.tier.bind_leases(self.memory.primary)
        server = self.tier._server
        assert server.is_open.wait(PATIENCE)
        self.server = server
        self.damaged: set[OffloadKey] = set()
        self.broken = False
        self._header, self._proof = server._header, server._serving.proofs.of
        server._header = self._header_of_other_bytes  # type: ignore[method-assign]
        server._serving.proofs.of = self._proof_of_other_bytes  # type: ignore[method-assign]
        self._receive = server._serving.owner.receive
        server._serving.owner.receive = self._receive_or_refuse  # type: ignore[method-assign]

    def put(self, key: OffloadKey, data: memoryview) -> None:
        primary, req = self.memory.primary, self.memory.req
        if primary.lookup([key], req) == [LookupResult.MISS]:
            prepared = primary.prepare_store([key], req)
            self.memory.rows[prepared.block_ids[0]][:] = data
            primary.complete_store(prepared)
        self.tier._offer([key])
        self.damaged.discard(key)

    def lose(self, key: OffloadKey) -> None:
        primary, req = self.memory.primary, self.memory.req
        primary.complete_load(primary.prepare_load([key], req), [key])

    def _header_of_other_bytes(self, serving: Any, row: PromisedRow, read: PayloadChecksum) -> bytes:
        """As if the bytes had been damaged on their way."""
        if row.key in self.damaged:
            read = read._replace(digest=bytes(CHECKSUM_BYTES))
        return self._header(serving, row, read)

    def _proof_of_other_bytes(self, row: PromisedRow, payload: memoryview) -> Proof:
        proof = self._proof(row, payload)
        return replace_fields(proof, checksum=bytes(CHECKSUM_BYTES)) if row.key in self.damaged else proof

    def _receive_or_refuse(self, peer: bytes, user: str, message: Any) -> Any:
        reply = self._receive(peer, user, message)
        if not self.broken or not hasattr(reply, "request"):
            return reply
        return Refuse(reply.request, reply.round, Reason.BUSY)


class Trouble(Faults):
    """What goes wrong in the owners, and whether the test's own stores go through."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        # By the shape of a row, and the fingerprint.
        self.owners: dict[tuple[tuple[int, ...], str], OwnerEngine] = {}
        self.is_broken = self.is_hanging = False

    def owner(self, geometry: RegionGeometry, fingerprint: Fingerprint) -> OwnerEngine:
        name = geometry.slot_bytes, fingerprint.digest
        if name not in self.owners:
            self.owners[name] = OwnerEngine(geometry, fingerprint, self.transport)
        return self.owners[name]

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> None:
        for owner in self.owners.values():
            owner.damaged.add(key)

    def lose(self, tier: SecondaryTierManager, key: OffloadKey) -> None:
        for owner in self.owners.values():
            owner.lose(key)

    @contextmanager
    def broken(self, tier: SecondaryTierManager) -> Iterator[None]:
        self._break(True)
        yield
        self._break(False)

    def _break(self, broken: bool) -> None:
        self.is_broken = broken
        for owner in self.owners.values():
            owner.broken = broken

    @contextmanager
    def hanging(self, tier: SecondaryTierManager) -> Iterator[None]:
        """The owners' threads hear nothing; the kernel takes what is sent to them, as with a stopped process."""
        self.is_hanging = True
        turns = {owner: owner.server._turn for owner in self.owners.values()}
        for owner in turns:
            owner.server._turn = lambda ready: time.sleep(0.01)  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.is_hanging = False
            for owner, turn in turns.items():
                owner.server._turn = turn  # type: ignore[method-assign]


class Storing(P2pTier):
    """The tier under test, and stores that go to another engine."""

    trouble: Trouble
    owner: OwnerEngine

    @classmethod
    def made(cls, trouble: Trouble, raw: Mapping[str, Any], engine_id: str) -> Self:
        tier = cls.from_settings(raw, engine_id=engine_id)
        tier.trouble = trouble
        tier.held: list[JobMetadata] = []  # type: ignore[misc]
        return tier

    def bind_region(self, rows: Sequence[memoryview], geometry: RegionGeometry, fingerprint: Fingerprint) -> None:
        self.owner = self.trouble.owner(geometry, fingerprint)
        owners = [owner for (shape, _), owner in self.trouble.owners.items() if shape == geometry.slot_bytes]
        peers = tuple(PeerAddress(host="127.0.0.1", port=owner.tier.port or 0) for owner in owners)
        self.settings = self.settings.model_copy(update={"peers": peers})
        self._directory = PeerDirectory(Address(peer.host, peer.port) for peer in peers)
        super().bind_region(rows, geometry, fingerprint)

    def submit_store(self, job: JobMetadata) -> None:
        if self.trouble.is_hanging:
            self.held.append(job)
        elif self.trouble.is_broken:
            self._results.append(JobResult(job.job_id, not job.keys, ()))
        else:
            for key, row in zip(job.keys, job.block_ids, strict=True):
                if not self._off:
                    self.owner.put(key, self._rows[row])
            self._learn(job.keys)
            super().submit_store(job)

    def _learn(self, keys: Sequence[OffloadKey]) -> None:
        """A chunk that was stored is not absent any more; the hierarchy finds such a one in host memory first."""
        for known in (self._absent, self._shunned):
            known.discard(keys)
        for key in keys:
            for request in self._requests.values():
                request.absent.pop(key, None)
                request.asked.pop(key, None)  # an answer that is on its way was given before

    def get_finished_jobs(self) -> Iterable[JobResult]:
        if not self.trouble.is_hanging:
            held, self.held = self.held, []
            for job in held:
                self.submit_store(job)
        return super().get_finished_jobs()

    def drain(self, timeout: float) -> bool:
        return super().drain(timeout) and not self.held


class TestP2p(SecondaryTierConformance):
    @pytest.fixture
    def tier_class(self) -> type[SecondaryTierManager]:
        return P2pTier

    @pytest.fixture(autouse=True)
    def _short_beliefs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was absent is asked for again sooner than in production, so that the tests are quick."""
        monkeypatch.setattr("vllm_tiered_offload.tiers.p2p.tier.ABSENT_SECONDS", 0.2)

    @pytest.fixture
    def tier_settings(self, transport: str) -> Mapping[str, Any]:
        return {"lookup_cache": 0.1, "transport": transport}

    @pytest.fixture
    def reports_events(self) -> str:
        return "what a peer has is the peer's to tell, and what is only offered moved nowhere"

    @pytest.fixture
    def shutdown_limit(self) -> float:
        return 5.0

    @pytest.fixture
    def transport(self) -> str:
        return "sockets"

    @pytest.fixture
    def faults(self, transport: str) -> Iterator[Trouble]:
        trouble = Trouble(transport)
        yield trouble
        for owner in trouble.owners.values():
            owner.tier.shutdown()
            assert owner.memory.pinned == 0

    @pytest.fixture
    def new_tier(self, tier_settings: Mapping[str, Any], faults: Trouble) -> Callable[..., SecondaryTierManager]:
        def make(engine_id: str = "engine-1", events: bool = False) -> SecondaryTierManager:
            return Storing.made(faults, tier_settings, engine_id)

        return make

    def test_store_after_a_reset(self) -> None:  # type: ignore[override]
        pytest.skip(STORES_AFTER_A_RESET)

    def test_late_store_does_not_replace_a_newer_one(self) -> None:  # type: ignore[override]
        pytest.skip(STORES_AFTER_A_RESET)


@needs_nixl
class TestP2pOverNixl(TestP2p):
    """The same, rows read out of the owner's memory."""

    @pytest.fixture
    def transport(self) -> str:
        return "nixl"

    @pytest.fixture(autouse=True)
    def _attach_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And not on a thread, meanwhile going on over sockets: this is about what is read."""
        attach_at_once(monkeypatch)
