"""The memory tier of the tests through the suite: what the hierarchy is tested with must keep the contract itself."""

from collections.abc import Mapping
from typing import Any

import pytest
from memory_tiers import MemoryFaults, SelfDrivingMemoryTier

from vllm_tiered_offload import SecondaryTierManager
from vllm_tiered_offload.testing.conformance import Faults, SecondaryTierConformance


class TestMemory(SecondaryTierConformance):
    @pytest.fixture
    def tier_class(self) -> type[SecondaryTierManager]:
        return SelfDrivingMemoryTier

    @pytest.fixture
    def survives_restart(self) -> str:
        return "the chunks are in this object"

    @pytest.fixture
    def shares_between_instances(self) -> str:
        return "the chunks are in this object"

    @pytest.fixture
    def reports_events(self) -> str:
        return "the fake has none to report"

    @pytest.fixture
    def faults(self) -> Faults:
        return MemoryFaults()


class TestMemoryThatHesitates(TestMemory):
    """Answers RETRY first."""

    @pytest.fixture
    def tier_settings(self) -> Mapping[str, Any]:
        return {"retries": 3}
