"""The suite over the tiers that are broken on purpose, and over the healthy one. Run by test_suite_can_fail.py.

Not called test_*: pytest collects it only when it is named.
"""

from collections.abc import Callable

import pytest
from broken_primaries import BROKEN_PRIMARIES
from memory_tiers import BROKEN, MemoryFaults, SelfDrivingMemoryTier

from vllm_tiered_offload import PrimaryTier, SecondaryTierManager
from vllm_tiered_offload.testing.conformance import PrimaryTierConformance, SecondaryTierConformance
from vllm_tiered_offload.tiers.cpu.tier import CpuTier


class _Secondary(SecondaryTierConformance):
    tier: type[SecondaryTierManager]

    @pytest.fixture
    def tier_class(self) -> type[SecondaryTierManager]:
        return self.tier

    @pytest.fixture
    def patience(self) -> float:
        return 0.6

    @pytest.fixture
    def faults(self) -> MemoryFaults:
        return MemoryFaults()

    @pytest.fixture
    def survives_restart(self) -> str:
        return "memory"

    shares_between_instances = reports_events = survives_restart


_SECONDARIES: list[type] = [*BROKEN, SelfDrivingMemoryTier]
for _tier in _SECONDARIES:
    globals()[f"Test{_tier.__name__}"] = type(f"Test{_tier.__name__}", (_Secondary,), {"tier": _tier})


class _Primary(PrimaryTierConformance):
    tier: type[CpuTier]

    @pytest.fixture
    def new_primary(self) -> Callable[..., PrimaryTier]:
        return lambda num_rows, events=False: self.tier.from_settings({"capacity": num_rows * 4096}, events=events)


_PRIMARIES: list[type] = [*BROKEN_PRIMARIES, CpuTier]
for _primary in _PRIMARIES:
    globals()[f"Test{_primary.__name__}"] = type(f"Test{_primary.__name__}", (_Primary,), {"tier": _primary})
