"""Fixtures of the kit for primary tiers. A tier's test file overrides `new_primary`; see docs/writing_a_tier.md."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from vllm_tiered_offload.contract.jobs import ReqContext
from vllm_tiered_offload.contract.managers import PrimaryTier
from vllm_tiered_offload.testing.conformance.material import Support
from vllm_tiered_offload.testing.conformance.primary_bench import PrimaryBench

NewPrimary = Callable[..., PrimaryTier]
NewBench = Callable[..., PrimaryBench]


class PrimaryTierFixtures:
    """Derive from this, override `new_primary`, and derive the test classes from that."""

    @pytest.fixture
    def new_primary(self) -> NewPrimary:
        """Makes a tier whose region is not bound: `new_primary(num_rows, events=False)`. Required."""
        pytest.fail(f"{type(self).__name__}: override the fixture new_primary")

    @pytest.fixture
    def honours_recency(self) -> Support:
        """True if what was touched outlives what was not; else the reason, for example another order on purpose."""
        return True

    @pytest.fixture
    def reports_events(self) -> Support:
        """True if the tier reports residency events when it is made with `events`; else the reason."""
        return True

    @pytest.fixture
    def new_bench(self, new_primary: NewPrimary) -> Iterator[NewBench]:
        """Makes a tier with so many rows; after the test everything is handed back, and nothing may be left."""
        with ExitStack() as ends:

            def make(num_rows: int, *, events: bool = False) -> PrimaryBench:
                bench = PrimaryBench(new_primary(num_rows, events=events), num_rows)
                ends.callback(bench.close)
                return bench

            yield make

    @pytest.fixture
    def bench(self, new_bench: NewBench) -> PrimaryBench:
        """A tier with eight rows."""
        return new_bench(8)

    @pytest.fixture
    def req(self, bench: PrimaryBench) -> ReqContext:
        """A request of that tier."""
        return bench.begin()
