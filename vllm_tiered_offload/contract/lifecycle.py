"""The submission contract as a table (L1, L2).

`on_request_finished` at a layer means: the layer gets no more submit-side calls (prepare_store, prepare_load,
submit_store, submit_load) for this request. Completions may still come. Every layer that wants the contract checked
keeps one `RequestLifecycle` per request and tells it what happens; the table alone decides what is allowed.
"""

from dataclasses import dataclass, field
from enum import Enum


class Phase(Enum):
    """Where a request is, seen from one layer."""

    TRACKED = "tracked"  # known, may submit
    FINISHING = "finishing"  # vLLM finished it; its last stores are still being built
    SIGNALLED = "signalled"  # the layer below was told; only completions may come

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call


class Event(Enum):
    """What can happen to a request at a layer."""

    SUBMIT = "submit"  # a store or load was handed to the layer below
    COMPLETE = "complete"  # a store or load ended
    FINISH = "finish"  # vLLM says that the request is over
    SIGNAL = "signal"  # on_request_finished goes to the layer below

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    (Phase.TRACKED, Event.SUBMIT): Phase.TRACKED,
    (Phase.TRACKED, Event.COMPLETE): Phase.TRACKED,
    (Phase.TRACKED, Event.FINISH): Phase.FINISHING,
    (Phase.FINISHING, Event.SUBMIT): Phase.FINISHING,
    (Phase.FINISHING, Event.COMPLETE): Phase.FINISHING,
    (Phase.FINISHING, Event.SIGNAL): Phase.SIGNALLED,
    (Phase.SIGNALLED, Event.COMPLETE): Phase.SIGNALLED,
}

# The table by row: what may happen in a phase, and where it leads.
_ROWS: dict[Phase, dict[Event, Phase]] = {
    phase: {event: after for (before, event), after in TRANSITIONS.items() if before is phase} for phase in Phase
}

_SUBMIT = Event.SUBMIT  # a member costs more to look up than most of what is done with it here


class InvalidTransition(RuntimeError):
    """An event that the table does not allow; the text tells the request's story."""

    def __init__(self, req_id: str, phase: Phase, event: Event, history: list[str]) -> None:
        super().__init__(f"request {req_id}: {event.value} while {phase.value}; history: {' '.join(history) or '-'}")


@dataclass(slots=True)
class RequestLifecycle:
    """One request at one layer."""

    req_id: str
    phase: Phase = Phase.TRACKED
    story: list[str] = field(default_factory=list)  # up to the last change of phase
    submits: int = 0  # since then
    completes: int = 0

    @property
    def history(self) -> list[str]:
        """What happened, phase by phase; for texts. Events that change no phase are counted, not listed."""
        counts = {Event.SUBMIT: self.submits, Event.COMPLETE: self.completes}
        repeated = [f"{count}*{event.value}" if count > 1 else event.value for event, count in counts.items() if count]
        return [*self.story, *repeated]

    def allows(self, event: Event) -> bool:
        """Whether the table has a row for `event` now; changes nothing."""
        return event in _ROWS[self.phase]

    def advance(self, event: Event) -> None:
        """Follow the table. Raises InvalidTransition and changes nothing when it has no row."""
        after = _ROWS[self.phase].get(event)
        if after is None:
            raise InvalidTransition(self.req_id, self.phase, event, self.history)
        if after is not self.phase:
            self.story, self.submits, self.completes = [*self.history, event.value], 0, 0
            self.phase = after
        elif event is _SUBMIT:
            self.submits += 1
        else:
            self.completes += 1
