"""Two whole hierarchies, each with the peer tier behind its host memory: what one stores, the other promotes."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from p2p_kit import FINGERPRINT, PATIENCE, ROW, content, keys_of, wait_until
from test_bind_leases import Region

from vllm_tiered_offload import LookupResult, OffloadKey, RegionGeometry, ReqContext
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.hierarchy.manager import TieringOffloadingManager
from vllm_tiered_offload.testing.conformance.material import make_rows
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


class Stack:
    """An engine's scheduler side."""

    def __init__(self, ports: Sequence[int] = (), **settings: Any) -> None:
        self.primary = CpuTier(CpuTierSettings(capacity=GEOMETRY.total_bytes), strict=True)
        peers = [{"host": "127.0.0.1", "port": port} for port in ports]
        self.tier = P2pTier.from_settings({"peers": peers, **settings}, engine_id=f"stack {id(self)}")
        self.region: Any = RegionOfRows()
        self.manager = TieringOffloadingManager(
            self.primary, [TierGuard(self.tier, "p2p")], strict=True, region_access=self.region
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


def test_only_who_computed_a_chunk_serves_it(stacks: list[Stack]) -> None:
    """A promoted chunk is not offered to the tiers again, and what was not offered is not served."""
    owner, puller = stacks
    owner.store(KEYS, owner.begin(ReqContext("a")))
    assert puller.look(KEYS, puller.begin(ReqContext("b"))) == [HIT] * 6
    third = Stack([puller.tier.port or 0])
    try:
        assert third.look(KEYS, third.begin(ReqContext("c"))) == [MISS] * 6
    finally:
        third.close()
