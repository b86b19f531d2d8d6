"""All of the kit for primary tiers in one class."""

from vllm_tiered_offload.testing.conformance.primary_life import AbandonTests, GenerationTests
from vllm_tiered_offload.testing.conformance.primary_room import AdmissionTests, EvictionTests
from vllm_tiered_offload.testing.conformance.primary_rows import LeaseTests, PinTests, RowTests


class PrimaryTierConformance(
    RowTests, PinTests, LeaseTests, EvictionTests, AdmissionTests, GenerationTests, AbandonTests
):
    """Every theme, for test files that want one class."""
