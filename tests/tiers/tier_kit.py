"""Short hands for tests of the CPU tier."""

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.cpu.tier import CpuTier, CpuTierSettings


def keys_of(name: str, count: int, start: int = 0) -> list[OffloadKey]:
    """Keys of one prefix, head first."""
    return [OffloadKey(f"{name}{i:03d}".encode()) for i in range(start, start + count)]


def make_tier(num_rows: int, policy: str = "lru", *, strict: bool = True, events: bool = True) -> CpuTier:
    """A bound tier."""
    settings = CpuTierSettings(capacity=num_rows * 4096, eviction_policy=policy)
    tier = CpuTier(settings, strict=strict, events=events)
    tier.bind_region(RegionGeometry.fit(settings.capacity, [4096], 1))
    return tier


def begin(tier, req_id: str) -> ReqContext:
    """An announced request."""
    req = ReqContext(req_id)
    tier.on_new_request(req)
    return req


def fill(tier, name: str, count: int) -> list[OffloadKey]:
    """Keys stored by a request of their own that has finished."""
    req, keys = begin(tier, f"fill-{name}"), keys_of(name, count)
    prepared = tier.prepare_store(keys, req)
    assert prepared.num_accepted == count
    tier.complete_store(prepared)
    tier.on_request_finished(req)
    return keys


def assert_idle(tier) -> None:
    """Nothing is going on any more, and the tier is in one piece."""
    tier.check()
    assert not any(tier.leftovers().values()), tier.leftovers()
