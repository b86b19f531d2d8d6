"""What a checker can watch. Everything is a no-op here; a checker overrides what it needs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_tiered_offload.contract.jobs import JobResult
from vllm_tiered_offload.testing.simulator.story import Violation

if TYPE_CHECKING:
    from vllm_tiered_offload.testing.simulator.engine import Simulation, Step
    from vllm_tiered_offload.testing.simulator.tier_watch import Flight


class Checker:
    """One invariant, watched from outside the connector. `name` is its id in DESIGN."""

    name = ""

    def __init__(self, sim: "Simulation") -> None:
        self.sim = sim

    def broken(self, text: str, req_id: str | None = None) -> Violation:
        """The error to raise."""
        return self.sim.story.violation(self.name, text, req_id)

    def added(self, request: Any) -> None:
        """A request is about to reach the scheduler."""

    def ended(self, request: Any) -> None:
        """vLLM finished a request."""

    def allocated(self, block_ids: list[int]) -> None:
        """The block pool hands out these device blocks."""

    def hook(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """A hook of the outermost connector's scheduler side returned."""

    def scheduled(self, step: "Step") -> None:
        """A batch is scheduled, its message to the workers is built."""

    def writing(self, req_id: str, block_ids: list[int], changes: Callable[[], bool]) -> None:
        """The forward pass writes into these blocks next; `changes()` tells whether any byte becomes different."""

    def received(self, step: "Step") -> None:
        """On the workers: the forward pass of this batch has run, its stores are submitted next."""

    def reported(self, step: "Step") -> None:
        """The workers have answered for this batch."""

    def updated(self, step: "Step") -> None:
        """The scheduler has processed that answer."""

    def was_reset(self, ok: bool, active: set[str]) -> None:
        """The connector's cache was reset; `ok`: vLLM's own reset succeeded too; `active`: requests with KV then."""

    def hook_raised(self, name: str, error: Exception) -> None:
        """A hook of the outermost connector's scheduler side raised."""

    def tier_called(self, tier: str, method: str, req_id: str) -> None:
        """A tier behind is about to be called for a request."""

    def tier_raised(self, tier: str, method: str) -> None:
        """A tier behind raised."""

    def tier_submitted(self, flight: "Flight") -> None:
        """A tier behind accepted a job."""

    def tier_late(self, flight: "Flight") -> None:
        """A tier job's deadline has passed; its result may still come."""

    def tier_ended(self, flight: "Flight", result: JobResult) -> None:
        """A tier behind gave a job's result. What the hierarchy makes of it comes after this call."""

    def converged(self) -> None:
        """The engine is idle, faults are off."""


class Watchers:
    """The checkers of one simulation. An event reaches those alone that have something to say about it."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        self._told = {
            event: [getattr(checker, event) for checker in checkers if event in _overridden(type(checker))]
            for event in EVENTS
        }

    def tell(self, event: str, *args: Any) -> None:
        """Something happened: the method `event` of every checker that overrides it is called, in their order."""
        for told in self._told[event]:
            told(*args)


EVENTS = [name for name in vars(Checker) if not name.startswith("_") and name not in ("name", "broken")]


def _overridden(kind: type[Checker]) -> set[str]:
    return {event for event in EVENTS if getattr(kind, event) is not getattr(Checker, event)}


def spy(target: Any, method: str, before: Callable[..., None], after: Callable[..., None] | None = None) -> None:
    """Wrap one method of one instance: `before(*args)`, the call, `after(result, *args)`."""
    call = getattr(target, method)

    def spied(*args: Any) -> Any:
        before(*args)
        result = call(*args)
        if after is not None:
            after(result, *args)
        return result

    setattr(target, method, spied)


class AckCounter:
    """Counts acknowledgements per job until every rank has given one."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[int, tuple[int, str | None]] = {}  # job id -> (a bit for each rank that ended it, first error)

    def count(self, step: "Step") -> list[tuple[int, str | None]]:
        """(job, first error) of each job that the report of `step` ends."""
        ended = []
        for job_id, ack in (step.report.acks if step.report is not None else {}).items():
            ranks, error = self._open.pop(job_id, (0, None))
            ranks, error = ranks | ack.ranks, error or ack.error
            if ranks.bit_count() >= self._ranks:
                ended.append((job_id, error))
            else:
                self._open[job_id] = (ranks, error)
        return ended
