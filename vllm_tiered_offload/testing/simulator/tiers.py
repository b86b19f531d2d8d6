"""The tiers behind the CPU tier of one simulated engine: jobs run when the simulation says so, and fail as it says.

Each is a `MemoryTier` over the engine's real region rows, made by the connector from its settings like any other tier.
The thread that opens the host region is here too: it opens it when it is told to.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_tiered_offload.contract.jobs import JobMetadata, OffloadPolicy, ReqContext, RequestOffloadingContext
from vllm_tiered_offload.hierarchy.region_access import RegionAccess
from vllm_tiered_offload.testing.fakes.memory_tier import MemoryTier
from vllm_tiered_offload.testing.simulator.config import TIER_TYPE
from vllm_tiered_offload.tiers.registry import TIERS


class SimulatedTier(MemoryTier):
    """One tier behind; `request_level` wants every block of a request."""

    def __init__(self, *, request_level: bool = False) -> None:
        super().__init__()
        self.request_level = request_level
        self.bound = False  # knows the region
        self.left_out = 0  # chunks that checkers missed here; the manager must have counted as many as skipped

    def bind_region(self, *args: Any) -> None:
        super().bind_region(*args)
        self.bound = True

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        super().on_new_request(req_context)
        policy = OffloadPolicy.REQUEST_LEVEL if self.request_level else OffloadPolicy.BLOCK_LEVEL
        return RequestOffloadingContext(policy)


class TierControl:
    """All tiers behind, in one place.

    `held` keeps their jobs waiting until `run`; otherwise `end_of_step` runs all but the hung ones. `failing`,
    `spoiling` and `hanging` are budgets: that many of the next jobs fail, lose one of their keys, or do not come back
    until `wake`.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.tiers: list[SimulatedTier] = []  # nearest first
        self.held = False
        self.opens = True  # whether the region may be opened now
        self.failing = 0
        self.spoiling = 0
        self.hanging = 0
        self._hung: set[int] = set()  # waiting jobs that run only after `wake`
        self._aside: list[Callable[[], None]] = []  # for the thread that opens the region

    def __len__(self) -> int:
        """Jobs that wait, hung ones too."""
        return sum(len(tier.waiting) for tier in self.tiers)

    @contextmanager
    def registered(self) -> Iterator[None]:
        """The connector that is made inside finds its tiers here."""
        control = self

        class OurTier(SimulatedTier):
            @classmethod
            def from_settings(cls, raw: Any, *args: Any, **kwargs: Any) -> "OurTier":  # noqa: ARG003
                tier = cls(**raw)
                control.tiers.append(tier)
                return tier

        with TIERS.registered(TIER_TYPE, OurTier):
            yield

    def region_access(self) -> RegionAccess:
        """Opens the region outside of all hooks, at the end of a step."""
        return RegionAccess(self._aside.append)

    def run(self, count: int | None = None, shuffle: bool = False) -> int:
        """Run `count` of the waiting jobs (None: until none waits), of any tier; how many ran."""
        ran = 0
        while (count is None or ran < count) and (ready := self._ready()):
            tier, job = self._rng.choice(ready) if shuffle else ready[0]
            if self.hanging:
                self.hanging -= 1
                self._hung.add(job.job_id)
            else:
                self._run_one(tier, job)
                ran += 1
        return ran

    def wake(self) -> None:
        """No job hangs any more."""
        self._hung.clear()

    def end_of_step(self) -> None:
        """Called by the engine after each worker step."""
        if self.opens:
            while self._aside:
                self._aside.pop(0)()
        if not self.held:
            self.run()

    def calm(self) -> None:
        """No more surprises: what waits runs now, and from now on every job succeeds at the end of its step."""
        self.held, self.opens = False, True
        self.failing = self.spoiling = self.hanging = 0
        self.wake()
        for tier in self.tiers:
            tier.raising.clear()
            tier.retries = 0
        self.end_of_step()

    def _ready(self) -> list[tuple[SimulatedTier, JobMetadata]]:
        return [(tier, job) for tier in self.tiers for job in tier.waiting if job.job_id not in self._hung]

    def _run_one(self, tier: SimulatedTier, job: JobMetadata) -> None:
        spoilt = set()
        if self.spoiling:
            self.spoiling -= 1
            spoilt = {self._rng.choice(job.keys)} - tier.bad_keys
        fails = self.failing > 0
        self.failing -= fails
        tier.bad_keys |= spoilt
        tier.run_job(job, fail=fails)
        tier.bad_keys -= spoilt
