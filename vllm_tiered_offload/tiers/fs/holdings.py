"""What the root holds, as far as the scheduler thread knows: the directory in use by its keys, the rest by its bytes.

    shared directory --reset--> private generation --reset--> another one, and the one before is removed

Each of them begins with an empty index. Scans in the background fill that of a shared one, and keep either true to what
others do. The capacity is the root's: the index may use what is not elsewhere in it.

The scheduler thread owns it, and touches no file: what does is a task.
"""

import json
import threading
import uuid
from collections.abc import Callable
from functools import partial
from math import inf

from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.contract.seams import Clock
from vllm_tiered_offload.tiers.cpu.policies.base import EvictionPolicy
from vllm_tiered_offload.tiers.fs.index import KeyIndex
from vllm_tiered_offload.tiers.fs.medium import Medium
from vllm_tiered_offload.tiers.fs.messages import Found, GenerationRemoved, Opened, ScanEnded, Trimmed
from vllm_tiered_offload.tiers.fs.namespace import Namespace, collect_private_generations
from vllm_tiered_offload.tiers.fs.scan import Known
from vllm_tiered_offload.tiers.fs.settings import FsTierSettings
from vllm_tiered_offload.tiers.fs.tasks import Tasks
from vllm_tiered_offload.tiers.residency import ResidencyLog

RESCAN_SECONDS = 60.0  # after a scan that failed
SCAN_PAUSE = 19.0  # times as long as a scan took, at least, before the next
UNBOUNDED = 1 << 40  # bytes; what an eviction policy is told without a capacity


class Holdings:
    """The index in use, its bounds, and the scans. `new_namespace(fingerprint, private=...)` makes a directory."""

    def __init__(
        self,
        settings: FsTierSettings,
        policy_class: Callable[[int], EvictionPolicy],
        new_namespace: Callable[..., Namespace],
        *,
        medium: Medium,
        tasks: Tasks,
        residency: ResidencyLog,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._policy_class = policy_class
        self._new_namespace = new_namespace
        self._medium = medium
        self._tasks = tasks
        self._residency = residency
        self._clock = clock
        self.frame_bytes = 1  # of one chunk's file, once there are rows
        # Counts resets; messages of an older epoch end their jobs and do nothing else.
        self.epoch = 0
        # Bytes in the root that are not of the directory in use: what a reset left behind, and what a scan found.
        self.elsewhere = 0
        self._evictions_before_reset = 0
        # The directory in use; there is none before `open`, which says whose bytes these are.
        self._namespace: Namespace | None = None
        self.index = self._new_index()
        self.scanned = False  # all that the directory held at some time is in the index
        self._complete_until = -inf
        self._rescan_at = inf

    @property
    def namespace(self) -> Namespace:
        """The directory in use. Raises RuntimeError before `open`: the contract has that come first."""
        if self._namespace is None:
            raise RuntimeError("fs tier: bind_region comes before any lookup or job")
        return self._namespace

    @property
    def is_complete(self) -> bool:
        """Whether a key that the index does not know is nowhere."""
        return self._clock() < self._complete_until

    @property
    def evictions(self) -> int:
        """Since the start."""
        return self._evictions_before_reset + self.index.evictions

    # Directories come and go

    def open(self, fingerprint: Fingerprint, frame_bytes: int) -> None:
        """Begin with the shared directory of these bytes: try it out, collect what dead engines left, and scan."""
        self.frame_bytes = frame_bytes
        self._enter(self._new_namespace(fingerprint, private=False))
        work = partial(self._medium.open, self.namespace, self.epoch)
        self._tasks.run(self._tasks.lanes.background, work, partial(Opened, self.epoch))
        self._start_scan()

    def forget(self) -> None:
        """Go on in a private generation. The directory in use stays as it is, if it is a shared one."""
        self.epoch += 1
        old, size = self.namespace, self.index.used
        self._residency.record(self.index.snapshot() if self._residency.kept else (), stored=False)
        self._evictions_before_reset += self.index.evictions
        self.elsewhere += size
        if old.private:
            self._remove_generation(old, size)
        self._enter(self._new_namespace(private_fingerprint(old.fingerprint), private=True))

    def close(self, timeout: float) -> None:
        """Remove a private generation; waits for that at most `timeout` seconds."""
        if self._namespace is not None and self._namespace.private:
            self._remove_generation(self._namespace, self.index.used).wait(timeout)

    def generation_removed(self, size: int) -> None:
        """So many bytes are gone from the disk."""
        self.set_elsewhere(max(0, self.elsewhere - size))

    def _enter(self, namespace: Namespace) -> None:
        """Begin with an empty index; that of a private directory knows all there is."""
        self._namespace = namespace
        self.index = self._new_index()
        self.set_elsewhere(self.elsewhere)
        self.scanned = namespace.private
        self._complete_until = inf if namespace.private else -inf
        self._rescan_at = self._clock() + self._settings.scan_period if namespace.private else inf

    def _new_index(self) -> KeyIndex:
        frames = (self._settings.capacity or UNBOUNDED) // self.frame_bytes
        return KeyIndex(self._settings.capacity, self.frame_bytes, self._policy_class(max(1, frames)))

    def _remove_generation(self, namespace: Namespace, size: int) -> threading.Event:
        """Remove it in the background; the event tells when that has ended."""
        ended = threading.Event()

        def remove() -> None:
            try:
                if self._medium.remove(namespace):
                    self._tasks.inbox.put(GenerationRemoved(size))
            finally:
                ended.set()

        try:
            self._tasks.lanes.background.submit(remove)
        except RuntimeError:
            ended.set()
        return ended

    # Capacity

    def set_elsewhere(self, size: int) -> None:
        """So much of the root is not the directory in use; what is too much for the rest goes."""
        self.elsewhere = size
        if self._settings.capacity is not None:
            self.index.capacity = max(0, self._settings.capacity - size)
        victims = self.index.trim()
        if victims:
            self._residency.record([victim for victim, _ in victims], stored=False)
            unlink, report = partial(self._medium.unlink, self.namespace), partial(Trimmed, self.epoch)
            self._tasks.run_parts(self._tasks.lanes.background, 1, victims, unlink, report)

    def trimmed(self, message: Trimmed) -> None:
        """Victims are gone, or not."""
        self.index.end_trim(message.victims, message.kept)
        self._residency.record(message.kept, stored=True)

    # Scans

    def scan_if_due(self) -> None:
        """Begin the next look at the whole root, if it is time."""
        if self._clock() >= self._rescan_at:
            self._start_scan()

    def found(self, message: Found) -> None:
        """A part of what a scan saw."""
        self._residency.record(self.index.take_scanned(message.files, message.gone), stored=False)

    def scan_ended(self, message: ScanEnded) -> None:
        """Everything was seen, or it could not be."""
        self.index.end_scan()
        if not message.complete:
            self._rescan_at = self._clock() + RESCAN_SECONDS
            return
        self.scanned = True
        if not self.namespace.private:
            self._complete_until = message.started + self._settings.share_refresh
        self._rescan_at = self._clock() + max(self._settings.scan_period, SCAN_PAUSE * message.seconds)
        self.set_elsewhere(message.elsewhere)

    def _start_scan(self) -> None:
        self._rescan_at = inf
        namespace, epoch, index = self.namespace, self.epoch, self.index
        known = Known(index.snapshot, lambda: index.used, self._settings.capacity)
        index.begin_scan()

        def scan() -> ScanEnded:
            collect_private_generations(namespace.files, self._settings.root, namespace.owner)
            for message in self._medium.scan(namespace, known, epoch):
                if isinstance(message, ScanEnded):
                    return message
                self._tasks.inbox.put(message)
            return ScanEnded(epoch, False, 0.0)

        self._tasks.run(self._tasks.lanes.background, scan, lambda _: ScanEnded(epoch, False, 0.0))


def private_fingerprint(fingerprint: Fingerprint) -> Fingerprint:
    """The same bytes-deciding facts, and a generation that nobody else has (L6)."""
    fields = dict(fingerprint.fields)
    fields["generation"] = json.dumps(uuid.uuid4().hex)
    return Fingerprint(tuple(sorted(fields.items())))
