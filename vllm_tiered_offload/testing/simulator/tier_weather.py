"""Random trouble of the tiers behind: slow, out of order, hung, failing, raising, not knowing yet, losing keys."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_tiered_offload.testing.fakes.memory_tier import MemoryTier
from vllm_tiered_offload.testing.simulator.tiers import TierControl

RAISES = (
    "on_new_request", "on_request_finished", "lookup", "touch", "submit_store", "submit_load", "get_finished_jobs",
    "on_schedule_end", "drain", "reset", "take_events", "get_stats",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TierRates:
    """Chance per step of each kind of event."""

    late_region: float = 0.3  # share of engines whose region is opened late
    open_region: float = 0.1
    hold: float = 0.06  # jobs begin to wait
    release: float = 0.15
    fail: float = 0.01  # the next jobs fail
    heal: float = 0.08  # no job fails any more
    spoil: float = 0.025  # the next jobs lose a key each
    hang: float = 0.015  # a job does not come back for a long time
    wake: float = 0.01
    raises: float = 0.006  # some methods begin to raise
    recover: float = 0.25
    forget: float = 0.02  # the tier does not know its keys, for some questions
    know: float = 0.15
    lose: float = 0.05  # a chunk goes behind the tier's back
    drains: float = 0.3  # share of resets that find a tier which can drain


@dataclass(slots=True)
class TierWeather:
    """Decides what happens to the tiers of one simulation; `do(name, *args)` does it. Randomness comes from `rng`."""

    control: TierControl
    rng: random.Random
    do: Callable[..., None]
    rates: TierRates = field(default_factory=TierRates)

    def __post_init__(self) -> None:
        if self.control.tiers and self.rng.random() < self.rates.late_region:
            self.do("region_opens", False)

    def step(self) -> None:
        """Before each engine step."""
        if not self.control.tiers:
            return
        self._jobs()
        self._budgets()
        for number, tier in enumerate(self.control.tiers):
            self._moods(number, tier)

    def _jobs(self) -> None:
        rng, rates, control = self.rng, self.rates, self.control
        if not control.opens and rng.random() < rates.open_region:
            self.do("region_opens", True)
        if not control.held:
            if rng.random() < rates.hold:
                self.do("hold_tiers", True)
        elif rng.random() < rates.release:
            self.do("hold_tiers", False)
        elif count := rng.randint(0, 2):
            self.do("run_tier_jobs", count)
        if rng.random() < rates.wake:
            self.do("tier_jobs_wake")

    def _budgets(self) -> None:
        rng, rates = self.rng, self.rates
        if rng.random() < rates.fail:
            self.do("tier_jobs", "failing", rng.choice((1, 1, 2, 8)))
        elif self.control.failing and rng.random() < rates.heal:
            self.do("tier_jobs_heal")
        if rng.random() < rates.spoil:
            self.do("tier_jobs", "spoiling", rng.randint(1, 3))
        if rng.random() < rates.hang:
            self.do("tier_jobs", "hanging", 1)

    def _moods(self, number: int, tier: MemoryTier) -> None:
        rng, rates = self.rng, self.rates
        if tier.raising:
            if rng.random() < rates.recover:
                self.do("tier_raises", number, ())
        elif rng.random() < rates.raises:
            self.do("tier_raises", number, tuple(rng.sample(RAISES, rng.randint(1, 3))))
        if tier.retries:
            if rng.random() < rates.know:
                self.do("tier_retries", number, 0)
        elif rng.random() < rates.forget:
            self.do("tier_retries", number, rng.choice((1, 2, 3, 1_000_000)))
        if tier.chunks and rng.random() < rates.lose:
            self.do("tier_loses", number, rng.random())
        if tier.drains != (drains := rng.random() < rates.drains):
            self.do("tier_drains", number, drains)
