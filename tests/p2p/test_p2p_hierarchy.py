"""Two whole hierarchies, each with the peer tier behind its host memory: what one stores, the other promotes."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from p2p_kit import FINGERPRINT, PATIENCE, ROW, content, keys_of, wait_until
from test_bind_leases import Region

from vllm_tiered_offload import LookupResult, OffloadKey, RegionGeometry, ReqContext
from vllm_tiered_offload.contract.managers import SecondaryTierManager
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.hierarchy.manager import TieringOffloadingManager
from vllm_tiered_offload.testing.conformance.material import make_rows
from vllm_tiered_offload.testing.fakes.memory_tier import MemoryTier
from vllm_tiered_offload.tiers.cpu.tier import CpuTier, CpuTierSettings
from vllm_tiered_offload.tiers.guard import TierGuard
from vllm_tiered_offload.tiers.p2p.tier import P2pTier

HIT, MISS = LookupResult.HIT, LookupResult.MISS
GEOMETRY = RegionGeometry(64, (ROW,), 1)
KEYS = keys_of("shared", 6)


class RegionOfRows(Region):
    geometry = GEOMETRY

    def __init__(self) -> None:
        self.memory = make_rows(GEOMETRY)

    def rows(self) -> list[memoryview]:
        return self.memory


class Disk(MemoryTier):
    """Does what it was told to at the end of each pass."""

    def on_schedule_end(self) -> None:
        self.run_jobs()


class Stack:
    """An engine's scheduler side."""

    def __init__(
        self, ports: Sequence[int] = (), *, behind: Sequence[SecondaryTierManager] = (), **settings: Any
    ) -> None:
        self.primary = CpuTier(CpuTierSettings(capacity=GEOMETRY.total_bytes), strict=True)
        peers = [{"host": "127.0.0.1", "port": port} for port in ports]
        self.tier = P2pTier.from_settings({"peers": peers, **settings}, engine_id=f"stack {id(self)}")
        self.region: Any = RegionOfRows()
        self.manager = TieringOffloadingManager(
            self.primary,
            [TierGuard(self.tier, "p2p"), *(TierGuard(tier, tier.medium) for tier in behind)],
            strict=True,
            region_access=self.region,
        )
        self.manager.bind_region(GEOMETRY)
        self.manager.open_region(RegionAnnouncement(1, 1, 1, GEOMETRY, FINGERPRINT))
        self.manager.on_schedule_end()
        assert self.tier._server.is_open.wait(PATIENCE)

    def begin(self, req: ReqContext) -> ReqContext:
        self.manager.on_new_request(req)
        return req

    def store(self, keys: Sequence[OffloadKey], req: ReqContext) -> None:
        prepared = self.manager.prepare_store(list(keys), req)
        for key, row in zip(prepared.keys, prepared.block_ids, strict=True):
            self.region.memory[row][:] = content(key, ROW)
        self.manager.complete_store(prepared)
        self.manager.on_schedule_end()

    def look(self, keys: Sequence[OffloadKey], req: ReqContext) -> list[LookupResult]:
        """Scheduling passes until the answer is there."""
        deadline = time.monotonic() + PATIENCE
        while not {HIT, MISS}.issuperset(results := self.manager.lookup(list(keys), req)):
            assert time.monotonic() < deadline
            self.manager.on_schedule_end()
            time.sleep(0.002)
        return results

    def check_load(self, keys: Sequence[OffloadKey], req: ReqContext) -> None:
        prepared = self.manager.prepare_load(list(keys), req)
        assert prepared.keys == tuple(keys)
        for key, row in zip(prepared.keys, prepared.block_ids, strict=True):
            assert bytes(self.region.memory[row]) == content(key, ROW)
        self.manager.complete_load(prepared)

    def close(self) -> None:
        self.manager.shutdown()


@pytest.fixture
def stacks() -> Iterator[list[Stack]]:
    made = [Stack()]
    made.append(Stack([made[0].tier.port or 0]))
    yield made
    for stack in made:
        stack.close()


def test_what_one_engine_computed_another_one_loads(stacks: list[Stack]) -> None:
    """The owner's scheduler thread does nothing while it is pulled from, and both are empty at the end."""
    owner, puller = stacks
    a, b = owner.begin(ReqContext("a")), puller.begin(ReqContext("b"))
    owner.store(KEYS, a)
    assert puller.look(KEYS, b) == [HIT] * 6
    assert puller.manager.hit_media(KEYS, b) == ["p2p"] * 6
    puller.check_load(KEYS, b)
    wait_until(lambda: owner.primary.get_stats()["rows_pinned"] == 0, "unpinning what was fetched")
    for stack, req in ((owner, a), (puller, b)):
        stack.manager.on_request_finished(req)
        wait_until(lambda stack=stack: not any(stack.manager.leftovers().values()), "the end of everything")
        wait_until(lambda stack=stack: not any(stack.tier.leftovers().values()), "the end of everything")
        stack.primary.check()


def test_chunks_that_may_not_leave_do_not(stacks: list[Stack]) -> None:
    """D5, case 46: a LoRA request's chunks stay in the engine's own memory. Made to fail by serving whatever is
    resident."""
    owner, puller = stacks
    private = owner.begin(ReqContext("lora", memory_only=True))
    owner.store(KEYS, private)
    assert owner.look(KEYS, private) == [HIT] * 6
    assert puller.look(KEYS, puller.begin(ReqContext("b"))) == [MISS] * 6


def test_a_reset_of_the_owner_reaches_the_puller(stacks: list[Stack]) -> None:
    """L6: the same keys with new weights' bytes are pulled by nobody."""
    owner, puller = stacks
    a, b = owner.begin(ReqContext("a")), puller.begin(ReqContext("b"))
    owner.store(KEYS[:3], a)
    assert puller.look(KEYS[:3], b) == [HIT] * 3
    owner.manager.reset_cache()
    owner.store(KEYS[3:], a)
    assert puller.look(KEYS[3:], puller.begin(ReqContext("c"))) == [MISS] * 3


def test_what_was_pulled_is_served_on(stacks: list[Stack]) -> None:
    """The engine that computed it may be gone by then. Made to fail by offering what was computed here alone."""
    owner, puller = stacks
    owner.store(KEYS, owner.begin(ReqContext("a")))
    assert puller.look(KEYS, puller.begin(ReqContext("b"))) == [HIT] * 6
    owner.tier.shutdown()
    third = Stack([puller.tier.port or 0])
    try:
        req = third.begin(ReqContext("c"))
        assert third.look(KEYS, req) == [HIT] * 6
        third.check_load(KEYS, req)
    finally:
        third.close()


def test_what_came_from_another_tier_is_served() -> None:
    """Two tiers behind host memory: what the other one brought back, peers may pull. Made to fail by telling nobody."""
    disk = Disk()
    both = Stack(behind=[disk])
    try:
        disk.chunks |= {key: content(key, ROW) for key in KEYS}
        assert both.look(KEYS, both.begin(ReqContext("a"))) == [HIT] * 6
        puller = Stack([both.tier.port or 0])
        req = puller.begin(ReqContext("b"))
        assert puller.look(KEYS, req) == [HIT] * 6
        puller.check_load(KEYS, req)
        puller.close()
    finally:
        both.close()


# ---- hand-over -----------------------------------------------------------------------------------------------------

FOR_A_DECODER = {"remote_decoder": {"kv_request_id": "r"}}


def from_prefiller(stack: Stack) -> dict[str, Any]:
    return {"remote_prefiller": {"kv_request_id": "r", "remote_host": "127.0.0.1", "remote_port": stack.tier.port}}


@pytest.mark.parametrize(("params", "wanted"), [(FOR_A_DECODER, HIT), (None, MISS)], ids=["hand-over", "any request"])
def test_a_producer_shares_what_is_resident_too(stacks: list[Stack], params: Any, wanted: LookupResult) -> None:
    """L5: the prompt's head is in host memory and not on offer (a cascade that was skipped, say). Made to fail by
    BLOCK_LEVEL."""
    owner, puller = stacks
    owner.store(KEYS[:4], owner.begin(ReqContext("earlier")))
    owner.tier._offered.clear()
    owner.store(KEYS, owner.begin(ReqContext("prefill", params)))
    assert puller.look(KEYS[:4], puller.begin(ReqContext("decode"))) == [wanted] * 4


def test_a_producer_shares_what_is_in_flight(stacks: list[Stack]) -> None:
    """L5: the head is being stored for somebody else, who does not offer it. Offered when it has come."""
    owner, puller = stacks
    owner.begin(private := ReqContext("earlier", memory_only=True))
    in_flight = owner.manager.prepare_store(KEYS[:4], private)
    for key, row in zip(in_flight.keys, in_flight.block_ids, strict=True):
        owner.region.memory[row][:] = content(key, ROW)
    owner.store(KEYS, req := owner.begin(ReqContext("prefill", FOR_A_DECODER)))
    owner.manager.on_request_finished(req)
    owner.manager.complete_store(in_flight)
    owner.manager.on_schedule_end()
    assert puller.look(KEYS, puller.begin(ReqContext("decode"))) == [HIT] * 6


def test_a_consumer_waits_for_what_is_being_computed(stacks: list[Stack]) -> None:
    """Both engines are asked at once. Made to fail by believing that a chunk is absent for long."""
    owner, puller = stacks
    req = puller.begin(ReqContext("decode", from_prefiller(owner)))
    prefill = owner.begin(ReqContext("prefill", FOR_A_DECODER))
    for number in range(0, 6, 2):
        for _ in range(20):
            assert puller.manager.lookup(KEYS, req)[0] is LookupResult.RETRY or number
            puller.manager.on_schedule_end()
            time.sleep(0.002)
        owner.store(KEYS[number : number + 2], prefill)
    assert puller.look(KEYS, req) == [HIT] * 6
    puller.check_load(KEYS, req)


def test_a_consumer_waits_for_a_bounded_time(stacks: list[Stack]) -> None:
    """And takes what has come by then. A request that names no prefiller waits for nothing."""
    owner, _ = stacks
    puller = Stack([owner.tier.port or 0], handover_timeout=0.3)
    try:
        owner.store(KEYS[:3], owner.begin(ReqContext("prefill", FOR_A_DECODER)))
        started = time.monotonic()
        req = puller.begin(ReqContext("decode", from_prefiller(owner)))
        assert puller.look(KEYS, req) == [HIT] * 3 + [MISS] * 3
        assert 0.25 < time.monotonic() - started < 2.0
        started = time.monotonic()
        assert puller.look(keys_of("nobody's", 2), puller.begin(ReqContext("other"))) == [MISS] * 2
        assert time.monotonic() - started < 0.25
    finally:
        puller.close()
