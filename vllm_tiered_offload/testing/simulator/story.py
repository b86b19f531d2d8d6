"""What happened, for the one who reads a failure: the last events and each request's own story."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

EVENTS_KEPT = 60
STORY_KEPT = 80


class Violation(AssertionError):
    """An invariant broke. The text names the checker, what was seen, and the story of the request."""


class Story:
    """A bounded journal. Events are tuples and become text only when somebody reads them."""

    def __init__(self) -> None:
        self.step = 0
        self.counts: Counter[str] = Counter()  # steps in which a kind of event happened
        self._broken: Violation | None = None  # the first one
        self._kinds: set[str] = set()  # kinds that happened in the current step
        self._events: deque[tuple[object, ...]] = deque(maxlen=EVENTS_KEPT)
        self._requests: dict[str, deque[tuple[object, ...]]] = defaultdict(lambda: deque(maxlen=STORY_KEPT))

    def tell(self, kind: str, req_ids: Iterable[str] = (), *details: object) -> None:
        """Something happened, to these requests if to any."""
        self._kinds.add(kind)
        event = (self.step, kind, *details)
        for req_id in req_ids:
            self._requests[req_id].append(event)
            self._events.append((self.step, kind, req_id, *details))
        if not req_ids:
            self._events.append(event)

    def of(self, req_id: str) -> list[str]:
        """The story of one request, oldest first."""
        return [_text(event) for event in self._requests[req_id]]

    def next_step(self, counted: bool) -> None:
        """A step ends. Its kinds count when the step had tokens or jobs; else they move to the next one that has."""
        self.step += 1
        if counted:
            self.counts["steps"] += 1
            self.counts.update(self._kinds)
            self._kinds.clear()

    def violation(self, checker: str, text: str, req_id: str | None = None) -> Violation:
        """An error that carries the story."""
        lines = [f"[{checker}] {text}", "last events:"]
        lines += [f"  {_text(event)}" for event in self._events]
        if req_id is not None:
            lines += [f"story of {req_id}:", *(f"  {line}" for line in self.of(req_id))]
        violation = Violation("\n".join(lines))
        self._broken = self._broken or violation
        return violation

    def raise_broken(self) -> None:
        """Out with the first violation: where it was raised, the connector may have taken it for its own trouble."""
        if self._broken is not None:
            raise self._broken


def _text(event: tuple[object, ...]) -> str:
    step, *rest = event
    return f"step {step}: {' '.join(str(part) for part in rest)}"
