"""Opens the host region in this process, away from the scheduler thread, for the tiers that move its bytes."""

import logging
import threading
from collections.abc import Callable

from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.region.host_region import HostRegion

logger = logging.getLogger(__name__)

RunAside = Callable[[Callable[[], None]], None]


def run_in_thread(job: Callable[[], None]) -> None:
    """Run `job` on a thread of its own."""
    threading.Thread(target=job, name="open-region", daemon=True).start()


class RegionAccess:
    """`start` once, then ask `take`: the open region, exactly once, or None while there is none (yet)."""

    def __init__(self, run_aside: RunAside = run_in_thread) -> None:
        self._run_aside = run_aside
        self._opened: HostRegion | None = None  # set by the other thread, taken by the scheduler thread
        self._region: HostRegion | None = None  # taken, ours to close
        self.failed = False  # it could not be opened and never will be

    def start(self, announcement: RegionAnnouncement) -> None:
        """Open the announced region aside. A failure is logged, and `take` answers None for ever."""
        self._run_aside(lambda: self._open(announcement))

    def _open(self, announcement: RegionAnnouncement) -> None:
        try:
            self._opened = HostRegion.open(announcement)
        except Exception as error:
            self.failed = True
            logger.error("secondary tiers stay off: the host region cannot be opened here: %s", error)

    def take(self) -> HostRegion | None:
        """The region, the first time that it is there."""
        if self._region is None and self._opened is not None:
            self._region = self._opened
            return self._region
        return None

    def close(self) -> None:
        """Let go of the region."""
        region = self._region or self._opened
        if region is not None:
            region.close()
