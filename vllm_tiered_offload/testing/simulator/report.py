"""The figures of a run, as MEASURE defines them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = (
    "admit", "preempt", "abort", "finish", "load", "store", "promotion", "cascade", "reset", "fault", "timeout",
    "quarantine",
)  # fmt: skip
RARE = frozenset({"reset", "fault", "timeout", "quarantine"})  # these need 0.1 % of the steps, the others 1 %
POOL_FULL_SHARE = 0.3


@dataclass(slots=True)
class Totals:
    """What several episodes add up to. `events` counts the steps in which a kind happened."""

    steps: int = 0  # steps with tokens or jobs
    pool_full: int = 0
    violations: int = 0
    leftover_state: int = 0  # violations of v5, counted in `violations` too
    seconds: float = 0.0
    episodes: int = 0
    slots_checked: int = 0
    tokens_loaded: int = 0
    events: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Totals") -> None:
        """Fold another part of the run into this one; it ran beside or after it."""
        self.steps += other.steps
        self.pool_full += other.pool_full
        self.violations += other.violations
        self.leftover_state += other.leftover_state
        self.seconds += other.seconds
        self.episodes += other.episodes
        self.slots_checked += other.slots_checked
        self.tokens_loaded += other.tokens_loaded
        self.events.update(other.events)

    def as_json(self, wall_seconds: float) -> dict[str, Any]:
        """The report."""
        steps = max(self.steps, 1)
        return {
            "violations": self.violations,
            "leftover_state": self.leftover_state,
            "steps": self.steps,
            "steps_per_second": round(self.steps / wall_seconds, 1) if wall_seconds else 0.0,
            "events": {kind: self.events[kind] for kind in KINDS},
            "pool_full_share": round(self.pool_full / steps, 4),
            "episodes": self.episodes,
            "slots_checked": self.slots_checked,
            "tokens_loaded": self.tokens_loaded,
        }

    def shortfalls(self) -> list[str]:
        """Where the run was too tame to mean anything."""
        missing = []
        for kind in KINDS:
            share = 0.001 if kind in RARE else 0.01
            if self.events[kind] < share * self.steps:
                missing.append(f"{kind}: {self.events[kind]} of {self.steps} steps, at least {share:.1%} wanted")
        if self.pool_full < POOL_FULL_SHARE * self.steps:
            missing.append(f"pool full in {self.pool_full} of {self.steps} steps, {POOL_FULL_SHARE:.0%} wanted")
        return missing


def merge_counts(counts: Mapping[str, int]) -> Counter[str]:
    """The kinds of events that the report knows."""
    return Counter({kind: counts.get(kind, 0) for kind in KINDS})
