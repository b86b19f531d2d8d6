"""Warnings about what others do: as many as they like to cause, few of them written."""

import logging
from collections import Counter

from vllm_tiered_offload.contract.seams import Clock, monotonic

EVERY_SECONDS = 30.0
MAX_TOPICS = 64


class BoundedLog:
    """One line for each topic in EVERY_SECONDS, with the number of those that were left out. One thread owns it."""

    def __init__(self, logger: logging.Logger, clock: Clock = monotonic) -> None:
        self._logger = logger
        self._clock = clock
        # Topic -> when it may be written again. At most MAX_TOPICS, then they share one.
        self._next: dict[str, float] = {}
        # Lines left out since the topic's last one.
        self._left_out: Counter[str] = Counter()

    def warning(self, topic: str, text: str) -> None:
        """Write `text`, unless the topic had its line lately. Topics come from us or are few; texts are one line."""
        if topic not in self._next and len(self._next) >= MAX_TOPICS:
            topic = "others"
        now = self._clock()
        if now < self._next.get(topic, now):
            self._left_out[topic] += 1
            return
        self._next[topic] = now + EVERY_SECONDS
        left_out = self._left_out.pop(topic, 0)
        more = f" (and {left_out} more like it before)" if left_out else ""
        self._logger.warning("p2p tier: %s%s", text, more)
