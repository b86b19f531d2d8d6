"""What a tier tells of its chunks' coming and going."""

from collections.abc import Iterable

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import ResidencyEvent


class ResidencyLog:
    """Events of one medium that nobody took yet. Only with `kept`: then somebody has to take them."""

    def __init__(self, medium: str, *, kept: bool) -> None:
        self.kept = kept
        self._medium = medium
        # Oldest first, none of them empty.
        self._events: list[ResidencyEvent] = []

    def record(self, keys: Iterable[OffloadKey], *, stored: bool) -> None:
        """These came (`stored`) or went."""
        if self.kept and (listed := tuple(keys)):
            self._events.append(ResidencyEvent(listed, self._medium, stored))

    def take(self) -> list[ResidencyEvent]:
        """What came since the last call, oldest first."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events
