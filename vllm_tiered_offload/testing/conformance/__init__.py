"""A pytest suite that any tier can be run through. See docs/writing_a_tier.md.

    class MyTier(SecondaryTierFixtures):
        @pytest.fixture
        def tier_class(self):
            return MyTierClass

    class TestContract(MyTier, ContractTests): ...
    class TestBytes(MyTier, BytesTests): ...

The suite talks to a tier through its contract alone. This package is the only one of ours that imports pytest.
"""

import pytest

# Assertions of the suite explain themselves like those of a test file; this must come before the imports below.
for _module in (
    "caller",
    "material",
    "primary_bench",
    "primary_life",
    "primary_room",
    "primary_rows",
    "secondary_bench",
    "secondary_bytes",
    "secondary_contract",
    "secondary_life",
    "secondary_trouble",
):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from vllm_tiered_offload.testing.conformance.material import (  # noqa: E402
    Support,
    content,
    keys_of,
    make_fingerprint,
)
from vllm_tiered_offload.testing.conformance.primary import PrimaryTierConformance  # noqa: E402
from vllm_tiered_offload.testing.conformance.primary_bench import PrimaryBench  # noqa: E402
from vllm_tiered_offload.testing.conformance.primary_fixtures import PrimaryTierFixtures  # noqa: E402
from vllm_tiered_offload.testing.conformance.primary_life import AbandonTests, GenerationTests  # noqa: E402
from vllm_tiered_offload.testing.conformance.primary_room import AdmissionTests, EvictionTests  # noqa: E402
from vllm_tiered_offload.testing.conformance.primary_rows import LeaseTests, PinTests, RowTests  # noqa: E402
from vllm_tiered_offload.testing.conformance.secondary import SecondaryTierConformance  # noqa: E402
from vllm_tiered_offload.testing.conformance.secondary_bench import Ended, Limits, SecondaryBench  # noqa: E402
from vllm_tiered_offload.testing.conformance.secondary_bytes import BytesTests  # noqa: E402
from vllm_tiered_offload.testing.conformance.secondary_contract import (  # noqa: E402
    ContractTests,
    TellingTests,
    ThreadTests,
)
from vllm_tiered_offload.testing.conformance.secondary_fixtures import Faults, SecondaryTierFixtures  # noqa: E402
from vllm_tiered_offload.testing.conformance.secondary_life import (  # noqa: E402
    ResetTests,
    RestartTests,
    ShutdownTests,
)
from vllm_tiered_offload.testing.conformance.secondary_trouble import DeadlineTests, FaultTests  # noqa: E402

__all__ = [
    "AbandonTests",
    "AdmissionTests",
    "BytesTests",
    "ContractTests",
    "DeadlineTests",
    "Ended",
    "EvictionTests",
    "FaultTests",
    "Faults",
    "GenerationTests",
    "LeaseTests",
    "Limits",
    "PinTests",
    "PrimaryBench",
    "PrimaryTierConformance",
    "PrimaryTierFixtures",
    "ResetTests",
    "RestartTests",
    "RowTests",
    "SecondaryBench",
    "SecondaryTierConformance",
    "SecondaryTierFixtures",
    "ShutdownTests",
    "Support",
    "TellingTests",
    "ThreadTests",
    "content",
    "keys_of",
    "make_fingerprint",
]
