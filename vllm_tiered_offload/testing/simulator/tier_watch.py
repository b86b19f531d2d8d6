"""Watches the border between each guard and its tier: who was called with what, which jobs are under way, which late.

What is seen here is what the tier really did. What the guard makes of it is for the checkers to judge.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_tiered_offload.contract.jobs import JobMetadata, JobResult
from vllm_tiered_offload.contract.seams import Clock
from vllm_tiered_offload.tiers.guard import TierGuard


@dataclass(slots=True, eq=False)
class Flight:
    """A job that the tier accepted and has not given a result for."""

    tier: str
    job: JobMetadata
    deadline: float
    late: bool = False  # the guard looked for its result at or after the deadline, and there was none

    @property
    def rows(self) -> frozenset[int]:
        """The region rows that the tier may touch."""
        return frozenset(self.job.block_ids)

    def rows_of(self, keys: Sequence[Any]) -> set[int]:
        """The rows of some of its keys."""
        wanted = set(keys)
        return {row for key, row in zip(self.job.keys, self.job.block_ids, strict=True) if key in wanted}


class Listener(Protocol):
    """Who hears of it."""

    def tier_called(self, tier: str, method: str, req_id: str) -> None:
        """The guard is about to call a method that belongs to a request."""

    def tier_raised(self, tier: str, method: str) -> None:
        """The tier raised."""

    def tier_submitted(self, flight: Flight) -> None:
        """The tier accepted a job."""

    def tier_late(self, flight: Flight) -> None:
        """A job's deadline has passed."""

    def tier_ended(self, flight: Flight, result: JobResult) -> None:
        """The tier gave a job's result; it touches the rows no more."""


REQUEST_METHODS = ("on_new_request", "on_request_finished", "lookup", "touch", "submit_store", "submit_load")


class TierWatch:
    """The watch on one tier. Patches the instance, so that the class stays as it is."""

    def __init__(self, guard: TierGuard, clock: Clock, timeout: float, listener: Listener) -> None:
        self.guard = guard
        self._name = guard.name
        self._clock = clock
        self._timeout = timeout
        self._listener = listener
        self._flights: dict[int, Flight] = {}
        for method in REQUEST_METHODS:
            self._wrap(method, self._spied(method, getattr(guard.tier, method)))
        # On this thread: the tier in memory never blocks, and the speed of the machine must not decide what happens.
        setattr(guard, "_call_bounded", lambda what, call, _timeout: guard._call(what, call))  # noqa: B010
        self._wrap("get_finished_jobs", self._polled(guard.tier.get_finished_jobs))
        self._wrap("on_schedule_end", self._raising("on_schedule_end", guard.tier.on_schedule_end))

    def _wrap(self, method: str, spied: Callable[..., Any]) -> None:
        setattr(self.guard.tier, method, spied)

    def _raising(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            try:
                return call(*args)
            except Exception:
                self._listener.tier_raised(self._name, method)
                raise

        return watched

    def _spied(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        call = self._raising(method, call)
        submits = method.startswith("submit")

        def spied(*args: Any) -> Any:
            ctx = args[0].req_context if submits else args[-1]
            self._listener.tier_called(self._name, method, ctx.req_id)
            answer = call(*args)
            if submits:
                flight = Flight(self._name, args[0], self._clock() + self._timeout)
                self._flights[flight.job.job_id] = flight
                self._listener.tier_submitted(flight)
            return answer

        return spied

    def _polled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        call = self._raising("get_finished_jobs", call)

        def polled() -> list[Any]:
            try:
                results = list(call())
                for result in results:
                    self._listener.tier_ended(self._flights.pop(result.job_id), result)
            finally:
                for flight in self._flights.values():
                    if not flight.late and flight.deadline <= self._clock():
                        flight.late = True
                        self._listener.tier_late(flight)
            return results

        return polled
