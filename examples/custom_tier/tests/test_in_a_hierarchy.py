"""The installed package in the engine's own hierarchy: found by name, guarded, and asked for what memory lost."""

import time
from importlib.metadata import entry_points
from typing import Any

import pytest
from vllm_tiered_offload import LookupResult, RegionGeometry, ReqContext
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.hierarchy.build import build_manager
from vllm_tiered_offload.hierarchy.manager import TieringOffloadingManager
from vllm_tiered_offload.settings import Settings, SettingsError
from vllm_tiered_offload.testing.conformance import content, keys_of, make_fingerprint

from compressed_tier import CompressedTier

ROW = 4096
HIT = LookupResult.HIT

pytestmark = pytest.mark.skipif(
    "compressed" not in entry_points(group="vllm_tiered_offload.tiers").names,
    reason="the example is not installed: pip install ./examples/custom_tier",
)


class Region:
    """The host region, in this process."""

    failed = False

    def __init__(self, num_rows: int) -> None:
        self.geometry = RegionGeometry(num_rows, (ROW,), 1)
        self.memory = [memoryview(bytearray(ROW)) for _ in range(num_rows)]

    def start(self, announcement: RegionAnnouncement) -> None:
        pass

    def take(self) -> "Region":
        return self

    def rows(self) -> list[memoryview]:
        return self.memory

    def close(self) -> None:
        pass


def build(region: Any, **tier: Any) -> TieringOffloadingManager:
    settings = Settings.parse(
        {"cpu": {"capacity": 8 * ROW}, "tiers": [{"type": "compressed", **tier}], "lifecycle": "strict"}
    )
    return build_manager(settings, region_access=region)


def test_settings_are_checked_at_the_start() -> None:
    with pytest.raises(SettingsError, match=r"tiers\[0\].*capacity"):
        build(Region(8))
    with pytest.raises(SettingsError, match="levle"):
        build(Region(8), capacity="1MiB", levle=3)


def test_what_left_memory_comes_back() -> None:
    """Sixteen chunks through eight rows: the first eight come back from the tier, byte by byte."""
    region = Region(8)
    manager = build(region, capacity="1MiB")
    assert isinstance(manager.guards[0].tier, CompressedTier)
    manager.bind_region(region.geometry)
    manager.open_region(RegionAnnouncement(0, 0, 0, region.geometry, make_fingerprint()))
    manager.has_pending_work()
    keys = keys_of("prompt", 16)
    for part in (keys[:4], keys[4:8], keys[8:12], keys[12:]):
        store(manager, region, part)
    req = ReqContext("again")
    manager.on_new_request(req)
    wait_for(manager, keys[:4], req)
    load = manager.prepare_load(keys[:4], req)
    assert load.keys == tuple(keys[:4])
    assert [bytes(region.memory[row]) for row in load.block_ids] == [content(key, ROW) for key in load.keys]
    manager.complete_load(load)
    manager.on_request_finished(req)
    manager.shutdown()


def store(manager: TieringOffloadingManager, region: Region, keys: list[Any]) -> None:
    """What the workers do for a request that computed these chunks."""
    req = ReqContext(f"first {keys[0].hex()}")
    manager.on_new_request(req)
    prepared = manager.prepare_store(keys, req)
    for key, row in zip(prepared.keys, prepared.block_ids, strict=True):
        region.memory[row][:] = content(key, ROW)
    manager.complete_store(prepared)
    manager.on_request_finished(req)
    deadline = time.monotonic() + 10
    while manager.guards[0].num_unreleased:
        assert time.monotonic() < deadline
        manager.has_pending_work()
        time.sleep(0.001)


def wait_for(manager: TieringOffloadingManager, keys: list[Any], req: ReqContext) -> None:
    """Scheduling passes until all are readable."""
    deadline = time.monotonic() + 10
    while manager.lookup(keys, req) != [HIT] * len(keys):
        assert time.monotonic() < deadline
        manager.on_schedule_end()
        time.sleep(0.001)
