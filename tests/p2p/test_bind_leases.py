"""A tier behind is given the primary tier's leases, once, after the region."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from vllm_tiered_offload import Fingerprint, OffloadKey, RegionGeometry, ReqContext
from vllm_tiered_offload.contract.fingerprint import FIELDS
from vllm_tiered_offload.contract.managers import Lease, RowLeases
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.hierarchy.manager import TieringOffloadingManager
from vllm_tiered_offload.testing.fakes.memory_tier import MemoryTier
from vllm_tiered_offload.tiers.cpu.tier import CpuTier, CpuTierSettings
from vllm_tiered_offload.tiers.guard import TierGuard

pytestmark = pytest.mark.fast

GEOMETRY = RegionGeometry(4, (4096,), 1)


class Region:
    """Rows in this process, there at once."""

    failed = False
    geometry = GEOMETRY

    def start(self, announcement: RegionAnnouncement) -> None:
        self.opened = [self]

    def take(self) -> "Region | None":
        return self.opened.pop() if self.opened else None

    def rows(self) -> list[memoryview]:
        return [memoryview(bytearray(4096)) for _ in range(4)]

    def close(self) -> None:
        pass


class LeasingTier(MemoryTier):
    """Notes in which order it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def bind_region(self, rows: Sequence[memoryview], geometry: RegionGeometry, fingerprint: Fingerprint) -> None:
        super().bind_region(rows, geometry, fingerprint)
        self.told.append("region")

    def bind_leases(self, leases: RowLeases) -> None:
        self.told.append(leases)


def make(tier: MemoryTier) -> TieringOffloadingManager:
    region: Any = Region()
    primary = CpuTier(CpuTierSettings(capacity=4 * 4096), strict=True)
    manager = TieringOffloadingManager(primary, [TierGuard(tier, "memory")], strict=True, region_access=region)
    manager.bind_region(GEOMETRY)
    manager.open_region(RegionAnnouncement(1, 1, 1, GEOMETRY, Fingerprint.of(dict.fromkeys(FIELDS, 1))))
    for _ in range(3):
        manager.on_schedule_end()
    return manager


def test_leases_come_once_after_the_region_and_work_from_another_thread() -> None:
    """Made to fail by leaving the call out, and by calling it before bind_region."""
    tier = LeasingTier()
    manager = make(tier)
    region, leases = tier.told
    assert region == "region"
    req, key = ReqContext("r"), OffloadKey(b"key")
    manager.on_new_request(req)
    manager.complete_store(manager.prepare_store([key], req))
    found: list[Lease] = []
    thread = threading.Thread(target=lambda: found.append(leases.lease([key, OffloadKey(b"other")])))
    thread.start()
    thread.join()
    assert found[0].keys == (key,)
    leases.release(found[0])


def test_a_tier_that_wants_none_needs_no_method() -> None:
    manager = make(MemoryTier())
    assert not any(manager.guards[0].counters.values())
