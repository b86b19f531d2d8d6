"""Random trouble of the tiers behind: slow, out of order, hung, failing, raising, not knowing yet, losing keys."""

import random
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
    """Drives the tiers of one simulation. All randomness comes from `rng`."""

    control: TierControl
    rng: random.Random
    rates: TierRates = field(default_factory=TierRates)

    def __post_init__(self) -> None:
        self.control.opens = self.rng.random() >= self.rates.late_region

    def step(self) -> None:
        """Before each engine step."""
        if not self.control.tiers:
            return
        self._jobs()
        self._budgets()
        for tier in self.control.tiers:
            self._moods(tier)

    def _jobs(self) -> None:
        rng, rates, control = self.rng, self.rates, self.control
        if not control.opens:
            control.opens = rng.random() < rates.open_region
        if not control.held:
            control.held = rng.random() < rates.hold
        elif rng.random() < rates.release:
            control.held = False
        else:
            control.run(rng.randint(0, 2), shuffle=True)
        if rng.random() < rates.wake:
            control.wake()

    def _budgets(self) -> None:
        rng, rates, control = self.rng, self.rates, self.control
        if rng.random() < rates.fail:
            control.failing += rng.choice((1, 1, 2, 8))
        elif rng.random() < rates.heal:
            control.failing = 0
        if rng.random() < rates.spoil:
            control.spoiling += rng.randint(1, 3)
        if rng.random() < rates.hang:
            control.hanging += 1

    def _moods(self, tier: MemoryTier) -> None:
        rng, rates = self.rng, self.rates
        if tier.raising:
            if rng.random() < rates.recover:
                tier.raising.clear()
        elif rng.random() < rates.raises:
            tier.raising.update(rng.sample(RAISES, rng.randint(1, 3)))
        if tier.retries:
            if rng.random() < rates.know:
                tier.retries = 0
        elif rng.random() < rates.forget:
            tier.retries = rng.choice((1, 2, 3, 1_000_000))
            tier.ask_anew()
        if tier.chunks and rng.random() < rates.lose:
            tier.lose(rng.choice(list(tier.chunks)))
        tier.drains = rng.random() < rates.drains
