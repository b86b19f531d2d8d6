"""Passes on what the tiers behind do: to the story, and to every checker.

All of it happens inside a guard, which would take a checker's complaint for trouble of the tier. So complaints wait
in the story until the engine is out of the hook.
"""

from contextlib import suppress

from vllm_tiered_offload.contract.jobs import JobResult
from vllm_tiered_offload.testing.simulator.checkers import Watchers
from vllm_tiered_offload.testing.simulator.story import Story, Violation
from vllm_tiered_offload.testing.simulator.tier_watch import Flight


class TierReporter:
    """A `tier_watch.Listener`."""

    def __init__(self, story: Story, watchers: Watchers) -> None:
        self._story = story
        self._watchers = watchers

    def _tell(self, event: str, *args: object) -> None:
        with suppress(Violation):
            self._watchers.tell(event, *args)

    def tier_called(self, tier: str, method: str, req_id: str) -> None:
        self._tell("tier_called", tier, method, req_id)

    def tier_raised(self, tier: str, method: str) -> None:
        self._story.tell("fault", (), f"{tier}.{method} raised")
        self._tell("tier_raised", tier, method)

    def tier_submitted(self, flight: Flight) -> None:
        job = flight.job
        kind = "promotion" if job.is_promotion else "cascade"
        self._story.tell(kind, [job.req_context.req_id], f"{flight.tier} job {job.job_id} rows", job.block_ids)
        self._tell("tier_submitted", flight)

    def tier_late(self, flight: Flight) -> None:
        self._story.tell("timeout", [flight.job.req_context.req_id], f"{flight.tier} job {flight.job.job_id}")
        self._tell("tier_late", flight)

    def tier_ended(self, flight: Flight, result: JobResult) -> None:
        if not result.success:
            self._story.tell("fault")
        if flight.late:
            self._story.tell("quarantine", [flight.job.req_context.req_id], "ends, rows", flight.job.block_ids)
        text = f"{flight.tier} job {result.job_id}: {len(result.successful_keys)} of {len(flight.job.keys)} keys"
        self._story.tell("tier result", [flight.job.req_context.req_id], text)
        self._tell("tier_ended", flight, result)
