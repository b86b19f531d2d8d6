"""All of the kit for secondary tiers in one class."""

from vllm_tiered_offload.testing.conformance.secondary_bytes import BytesTests
from vllm_tiered_offload.testing.conformance.secondary_contract import ContractTests, TellingTests, ThreadTests
from vllm_tiered_offload.testing.conformance.secondary_life import ResetTests, RestartTests, ShutdownTests
from vllm_tiered_offload.testing.conformance.secondary_trouble import DeadlineTests, FaultTests


class SecondaryTierConformance(
    ContractTests,
    TellingTests,
    ThreadTests,
    BytesTests,
    DeadlineTests,
    FaultTests,
    RestartTests,
    ResetTests,
    ShutdownTests,
):
    """Every theme, for test files that want one class."""
