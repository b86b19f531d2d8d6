"""Fixtures of the kit for secondary tiers. A tier's test file overrides the first ones; see docs/writing_a_tier.md."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest

from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import SecondaryTierManager
from vllm_tiered_offload.testing.conformance.material import Support, make_fingerprint
from vllm_tiered_offload.testing.conformance.secondary_bench import Limits, SecondaryBench

NewTier = Callable[..., SecondaryTierManager]
NewBench = Callable[..., SecondaryBench]


class Faults:
    """How a tier's test file makes trouble in the tier's medium. What is not overridden is skipped, and says so."""

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> None:  # noqa: ARG002
        """Change a stored chunk behind the tier's back, so that its bytes are wrong."""
        pytest.skip(f"opted out of damaged chunks: {type(self).__name__} has no damage()")

    def lose(self, tier: SecondaryTierManager, key: OffloadKey) -> None:  # noqa: ARG002
        """Remove a stored chunk behind the tier's back."""
        pytest.skip(f"opted out of lost chunks: {type(self).__name__} has no lose()")

    def broken(self, tier: SecondaryTierManager) -> AbstractContextManager[None]:  # noqa: ARG002
        """While the context is open, every read and write of chunks fails."""
        pytest.skip(f"opted out of a broken medium: {type(self).__name__} has no broken()")

    def hanging(self, tier: SecondaryTierManager) -> AbstractContextManager[None]:  # noqa: ARG002
        """While the context is open, every read and write of chunks waits; it goes on when the context is left."""
        pytest.skip(f"opted out of a hanging medium: {type(self).__name__} has no hanging()")


class SecondaryTierFixtures:
    """Derive from this, override `tier_class` and what else differs, and derive the test classes from that."""

    # ---- to be overridden --------------------------------------------------------------------------------------

    @pytest.fixture
    def tier_class(self) -> type[SecondaryTierManager]:
        """The class under test. Required."""
        pytest.fail(f"{type(self).__name__}: override the fixture tier_class")

    @pytest.fixture
    def tier_settings(self) -> Mapping[str, Any]:
        """The tier's settings block, without `type`. It leaves room for 256 chunks of 4096 bytes and 8 of 1 MiB.

        Two tiers of one test get the same block, so a directory in it is shared (`tmp_path` is a good place).
        """
        return {}

    @pytest.fixture
    def survives_restart(self) -> Support:
        """True if a tier made after the shutdown of another one finds what that one stored; else the reason."""
        return True

    @pytest.fixture
    def shares_between_instances(self) -> Support:
        """True if two live tiers with the same settings find each other's chunks (within `patience`); else why not."""
        return True

    @pytest.fixture
    def reports_events(self) -> Support:
        """True if the tier reports residency events when it is made with `events`; else the reason."""
        return True

    @pytest.fixture
    def faults(self) -> Faults | str:
        """Makes trouble in the medium; or the reason why the tests cannot."""
        return "the tier's test file overrides no fixture `faults`"

    @pytest.fixture
    def patience(self) -> float:
        """Seconds within which everything that was asked for must come."""
        return 10.0

    @pytest.fixture
    def call_limit(self) -> float:
        """Seconds that one call on the scheduler thread may take. Generous, because test machines are busy."""
        return 0.25

    @pytest.fixture
    def shutdown_limit(self) -> float:
        """Seconds that shutdown may take, even while the medium hangs."""
        return 15.0

    @pytest.fixture
    def settle(self) -> float:
        """Seconds during which the kit watches for what must not come (a second result, a late write)."""
        return 0.15

    @pytest.fixture
    def geometry(self) -> RegionGeometry:
        """The shape of the region: 16 rows of 4096 bytes. Not fewer rows, other sizes as you like."""
        return RegionGeometry(16, (4096,), 1)

    @pytest.fixture
    def fingerprint(self) -> Fingerprint:
        """The namespace of the bytes."""
        return make_fingerprint()

    @pytest.fixture
    def new_tier(self, tier_class: type[SecondaryTierManager], tier_settings: Mapping[str, Any]) -> NewTier:
        """Makes a tier: `new_tier(engine_id="engine-1", events=False)`. Override it where settings say too little."""

        def make(engine_id: str = "engine-1", events: bool = False) -> SecondaryTierManager:
            return tier_class.from_settings(dict(tier_settings), "tiers[0]", engine_id=engine_id, events=events)

        return make

    # ---- made of these -----------------------------------------------------------------------------------------

    @pytest.fixture
    def limits(self, patience: float, call_limit: float, shutdown_limit: float, settle: float) -> Limits:
        """The four times together."""
        return Limits(patience, call_limit, shutdown_limit, settle)

    @pytest.fixture
    def new_bench(
        self, new_tier: NewTier, geometry: RegionGeometry, fingerprint: Fingerprint, limits: Limits
    ) -> Iterator[NewBench]:
        """Makes a tier with a region of its own, and shuts it down after the test."""
        with ExitStack() as ends:

            def make(engine_id: str = "engine-1", *, events: bool = False, **options: Any) -> SecondaryBench:
                shape = options.pop("geometry", geometry)
                identity = options.pop("fingerprint", fingerprint)
                bench = SecondaryBench(new_tier(engine_id=engine_id, events=events), shape, identity, limits, **options)
                ends.callback(bench.close)
                return bench

            yield make

    @pytest.fixture
    def bench(self, new_bench: NewBench) -> SecondaryBench:
        """One tier whose region is bound."""
        return new_bench()

    @pytest.fixture
    def req(self, bench: SecondaryBench) -> ReqContext:
        """A request of that tier."""
        return bench.begin()

    @pytest.fixture
    def trouble(self, faults: Faults | str) -> Faults:
        """`faults`, or a skip that says why there are none."""
        if isinstance(faults, str):
            pytest.skip(f"opted out of faults: {faults}")
        return faults
