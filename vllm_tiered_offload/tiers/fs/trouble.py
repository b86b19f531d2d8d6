"""What stands in the way of storing: said once, and waited out.

The scheduler thread owns it; one other may say something once, at start.
"""

import logging
from math import inf

from vllm_tiered_offload.contract.seams import Clock
from vllm_tiered_offload.tiers.fs.faults import Fault

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 10.0  # how long stores pause after the medium refused one
CEILING_SECONDS = 60.0  # how long a device that was full is taken to be as small as it was


class StoreTrouble:
    """Pauses, and what the user has been told."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._paused_until = -inf
        self._full_until = -inf
        # By topic. Anybody may add to it.
        self._said: set[object] = set()

    @property
    def pauses_stores(self) -> bool:
        """Whether a store would meet the same trouble once more."""
        return self._clock() < self._paused_until

    @property
    def device_was_full(self) -> bool:
        """Whether that was so lately."""
        return self._clock() < self._full_until

    def met(self, fault: Fault | None, problem: str | None) -> None:
        """A store, or a try whether one could be made, ended so."""
        if fault is None or not fault.pauses_stores:
            return
        self._paused_until = self._clock() + PAUSE_SECONDS
        self.say_why(fault, problem)

    def met_full_device(self, problem: str | None) -> None:
        """For a while, something goes for whatever comes."""
        self._full_until = self._clock() + CEILING_SECONDS
        self.say(f"{problem}; as long as that is so, chunks are evicted to make room", Fault.NO_SPACE)

    def say_why(self, fault: Fault, problem: str | None) -> None:
        """Why nothing is stored."""
        if fault is Fault.REFUSED:
            self.say(str(problem))
        else:
            self.say(f"{problem}; nothing is stored until that is better, what is there can be loaded", fault)

    def say(self, text: str, topic: object = None) -> None:
        """One warning, once for its topic (the text itself, where none is given)."""
        topic = topic or text
        if topic not in self._said:
            self._said.add(topic)
            logger.warning("fs tier: %s", text)
