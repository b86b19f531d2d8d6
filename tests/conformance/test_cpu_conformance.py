"""The CPU tier, with each of its eviction policies, through the conformance suite for primary tiers."""

from collections.abc import Callable

import pytest

from vllm_tiered_offload import PrimaryTier
from vllm_tiered_offload.testing.conformance import PrimaryTierConformance
from vllm_tiered_offload.tiers.cpu.tier import CpuTier


class CpuConformance(PrimaryTierConformance):
    policy: str

    @pytest.fixture
    def new_primary(self) -> Callable[..., PrimaryTier]:
        def make(num_rows: int, events: bool = False) -> PrimaryTier:
            settings = {"capacity": num_rows * 4096, "eviction_policy": self.policy}
            return CpuTier.from_settings(settings, strict=True, events=events)

        return make


class TestLru(CpuConformance):
    policy = "lru"


class TestArc(CpuConformance):
    policy = "arc"
