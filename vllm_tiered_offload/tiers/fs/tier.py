"""The filesystem tier.

Theory of operation
- The scheduler thread owns index, job table and counters, and touches no file. What it wants done it hands to lanes;
  what was done comes back through the inbox, which it empties at the beginning of each of its calls. So: no locks.
- A job is one batch of rows, and all threads of its lane take from it. A row belongs to the batch until a message says
  that it has ended; a job's result is made of its last message, so after it no thread touches its rows.
- What the scheduler thread does for a chunk is a few lines of loops over plain objects: with a thousand of them in a
  job, microseconds count.
- Several engines may share the directory, so not being in the index means "not known": the question goes to the lookup
  lane, one batch a scheduling pass, and the answer is there by the next. Scans in the background fill the index after a
  start and keep it true to what others do; right after one, and always in a private generation, an unknown key is a
  miss at once.
- The capacity bounds the whole root: the index may use what is not elsewhere in it. A file's victims are chosen when it
  is submitted and unlinked before it is written. A device that is full before that lowers the bound for a while.
- `reset` leaves the shared directory as it is and goes on in a private one, which nobody else reads and which is
  removed at shutdown (by the next start, if the process is killed).
- Whatever the filesystem does ends as a failed or missed chunk and a counter.
"""

import json
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, Self

from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import (
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
)
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import ResidencyEvent, SecondaryTierManager
from vllm_tiered_offload.contract.seams import Clock, JobExecutor, monotonic
from vllm_tiered_offload.settings import SettingsError, validate_block
from vllm_tiered_offload.tiers.block_frame import HEADER_BYTES
from vllm_tiered_offload.tiers.errors import RegistryError
from vllm_tiered_offload.tiers.fs.batch import Batch
from vllm_tiered_offload.tiers.fs.block_io import BlockIo, FreeSpace, IoMode
from vllm_tiered_offload.tiers.fs.counters import LOAD, LOOKUP, STORE, FsCounters
from vllm_tiered_offload.tiers.fs.economy import Economy
from vllm_tiered_offload.tiers.fs.faults import Fault, NamespaceError
from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.index import KeyIndex, Write
from vllm_tiered_offload.tiers.fs.jobs import JobTable
from vllm_tiered_offload.tiers.fs.lanes import Lanes
from vllm_tiered_offload.tiers.fs.lookups import Lookups
from vllm_tiered_offload.tiers.fs.medium import Medium
from vllm_tiered_offload.tiers.fs.messages import (
    Answers,
    Found,
    GenerationRemoved,
    Inbox,
    Loaded,
    Message,
    Opened,
    ScanEnded,
    Stored,
    Trimmed,
)
from vllm_tiered_offload.tiers.fs.namespace import Namespace, collect_private_generations, try_root
from vllm_tiered_offload.tiers.fs.scan import Known
from vllm_tiered_offload.tiers.fs.settings import FsTierSettings
from vllm_tiered_offload.tiers.registry import load_eviction_policy
from vllm_tiered_offload.tiers.residency import ResidencyLog

logger = logging.getLogger(__name__)

_BLOCK_LEVEL = RequestOffloadingContext()
_REQUEST_LEVEL = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)

PAUSE_SECONDS = 10.0  # how long stores pause after the medium refused one
CEILING_SECONDS = 60.0  # how long a device that was full is taken to be as small as it was
RESCAN_SECONDS = 60.0  # after a scan that failed
SHUTDOWN_SECONDS = 5.0  # for what is in flight, and again for removing a private generation
SCANNED_FILES_A_PASS = 1024
SCAN_PAUSE = 19.0  # times as long as a scan took, at least, before the next
UNBOUNDED = 1 << 40  # bytes; what an eviction policy is told without a capacity


class FsTier(SecondaryTierManager):
    """Secondary tier over a directory. Never raises because of the filesystem.

    Residency events are kept only with `events`, and then somebody has to take them. `lanes`, `files` and `clock` are
    seams for tests; `lanes` belong to the tier, which shuts them down.
    """

    medium = "fs"

    def __init__(
        self,
        settings: FsTierSettings,
        *,
        engine_id: str,
        events: bool = False,
        lanes: Lanes | None = None,
        files: Files | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._files = files or Files()
        self._engine_id = engine_id
        self._mode = IoMode(settings.io != "buffered")
        self._policy_class = load_eviction_policy(settings.eviction_policy)
        space = None if settings.min_free is None else FreeSpace(self._files, settings.min_free)
        io = BlockIo(self._files, self._mode, sync_data=settings.fsync == "data", ttl=settings.ttl, space=space)
        self._medium = Medium(io, keep_bad_files=settings.on_corrupt == "quarantine", clock=clock)
        self._lanes = lanes or Lanes.start(settings)
        self._inbox = Inbox()
        self._closed = False
        self._rows: Sequence[memoryview] = ()
        self._frame_bytes = 1  # of one chunk's file, once there are rows
        self._jobs = JobTable()
        self._counters = FsCounters()
        self._residency = ResidencyLog(self.medium, kept=events)
        # What the user has been told, by topic. The one collection that a thread may add to, once, at start.
        self._said: set[object] = set()
        self._paused_until = -inf
        self._ceiling_until = -inf
        self._economy = Economy(settings.store_threshold, settings.write_bytes_per_day, clock)
        # Counts resets; messages of an older epoch end their jobs and do nothing else.
        self._epoch = 0
        # Bytes in the root that are not of the directory in use: what a reset left behind, and what a scan found.
        self._elsewhere = 0
        self._evictions_before_reset = 0
        self._lookups = Lookups(settings.share_refresh, clock)
        # The directory in use; there is none before bind_region, which says whose bytes these are.
        self._namespace: Namespace | None = None
        self._index = self._new_index()
        self._scanned = False
        self._complete_until = -inf
        self._rescan_at = inf

    @classmethod
    def from_settings(
        cls,
        raw: Mapping[str, Any],
        path: str = "tiers[0]",
        *,
        engine_id: str,
        events: bool = False,
        lanes: Lanes | None = None,
        files: Files | None = None,
        clock: Clock = monotonic,
    ) -> Self:
        """From the tier's own settings block (without `type`). Starts threads; touches no file on this one.

        Raises SettingsError, one line for each mistake, each beginning with `path`.
        """
        settings = validate_block(FsTierSettings, raw, path)
        try:
            tier = cls(settings, engine_id=engine_id, events=events, lanes=lanes, files=files, clock=clock)
        except RegistryError as error:
            raise SettingsError([f"{path}.eviction_policy: {error}"]) from error
        if lanes is None:
            tier._lanes.background.submit(tier._try_root)
        return tier

    def _try_root(self) -> None:
        """Say at start what stands in the way of storing. On a thread; stores find out for themselves."""
        try:
            try_root(self.settings.root)
        except NamespaceError as error:
            self._say_store_trouble(error.fault, str(error))

    @property
    def namespace_path(self) -> str:
        """The directory that this tier uses now."""
        return self._in_use.path

    @property
    def _in_use(self) -> Namespace:
        """The directory in use. Raises RuntimeError before bind_region: the contract has that come first."""
        if self._namespace is None:
            raise RuntimeError("fs tier: bind_region comes before any lookup or job")
        return self._namespace

    def bind_region(self, rows: Sequence[memoryview], geometry: RegionGeometry, fingerprint: Fingerprint) -> None:
        """Opens the directory of these bytes; the threads do that, this one touches no file."""
        self._rows = rows
        self._frame_bytes = HEADER_BYTES + geometry.row_bytes
        self._enter(Namespace(self._files, self.settings.root, fingerprint, self._engine_id, private=False))
        self._start_background()
        frame, capacity = self._frame_bytes, self.settings.capacity
        if capacity is not None and capacity < frame:
            self._say(f"capacity of {capacity} bytes is less than one chunk, {frame} bytes: nothing is stored")

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Chunks that are counted have to be offered every time, also when host memory has them."""
        return _BLOCK_LEVEL if self.settings.store_threshold == 1 else _REQUEST_LEVEL

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._index.end_request(req_context.req_id)

    # Lookup

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:  # noqa: ARG002
        self._absorb()
        is_complete = self._closed or self._clock() < self._complete_until
        results = self._lookups.look_up(keys, self._index, is_complete)
        self._counters.looked_up(results)
        return results

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._index.touch(keys, req_context.req_id)

    def on_schedule_end(self) -> None:
        self._absorb()
        for message in self._inbox.take_bulk(SCANNED_FILES_A_PASS):
            self._receive(message)
        now = self._clock()
        if now >= self._rescan_at:
            self._start_scan()
        if now >= self._ceiling_until:
            self._index.ceiling = None
        if keys := self._lookups.take_questions():
            self._run(
                self._lanes.lookup,
                partial(self._medium.look_up, self._in_use, keys, self._epoch),
                lambda fault: Answers(self._epoch, keys, absent=keys, fault=fault),
            )

    # Jobs

    def submit_store(self, job: JobMetadata) -> None:
        self._absorb()
        record, rows = self._jobs.begin(job, self._epoch), self._rows_of(job)
        refusal = self._refusal() if rows is not None else Fault.INTERNAL
        index, economy = self._index, self._economy if self._economy.is_asked_for else None
        present, leaving, writing = index.present, index.leaving, index.writing
        new: dict[OffloadKey, Write] = {}
        there, refused, skipped = 0, [], []
        for part, key in enumerate(job.keys):
            if key in present:
                there += 1
            elif (write := writing.get(key) or new.get(key)) is not None:
                write.waiters.append((record, part))
            elif rows is None or refusal is not None or key in leaving:
                refused.append(part)
            elif economy is not None and (reason := economy.declines(key, self._frame_bytes)):
                self._counters.skipped(reason)
                skipped.append(part)
            else:
                new[key] = Write(key, rows[part], self._frame_bytes, [(record, part)])
        self._counters.already_stored(there)
        if refused:
            self._counters.failed(STORE, refusal or Fault.NO_ROOM, len(refused))
        self._jobs.end_parts(record, there, refused, self._epoch)
        self._jobs.skip_parts(record, skipped, self._epoch)
        if new:
            self._write(list(new.values()), job)

    def _refusal(self) -> Fault | None:
        """Why nothing is stored now, if that is so."""
        if self._closed:
            return Fault.CANCELLED
        if self._clock() < self._paused_until:
            return Fault.PAUSED
        if self._index.capacity is not None and not self._scanned:
            return Fault.NOT_READY
        return None

    def _write(self, writes: list[Write], job: JobMetadata) -> None:
        """Write as many of these as there is room for."""
        count = self._index.reserve(writes, job.keys, job.req_context.req_id)
        for write in writes[count:]:
            write.fault = Fault.NO_ROOM
            self._economy.give_back(write.size)
        self._end_waiters(writes[count:])
        victims = [victim for write in writes[:count] for victim, _ in write.victims]
        self._residency.record(victims, stored=False)
        Batch(
            writes[:count],
            partial(self._medium.store, self._in_use),
            partial(Stored, self._epoch),
            self._inbox.put,
            self._medium.stop,
        ).start(self._lanes.write, self.settings.write_threads)

    def submit_load(self, job: JobMetadata) -> None:
        self._absorb()
        record, rows = self._jobs.begin(job, self._epoch), self._rows_of(job)
        if rows is None or self._closed:
            parts = range(len(job.keys))
            self._counters.failed(LOAD, Fault.CANCELLED if self._closed else Fault.INTERNAL, len(parts))
            self._jobs.end_parts(record, 0, parts, self._epoch)
            return
        self._index.begin_reads(job.keys)
        Batch(
            range(len(job.keys)),
            partial(self._medium.load, self._in_use, rows),
            partial(Loaded, record),
            self._inbox.put,
            self._medium.stop,
        ).start(self._lanes.read, self.settings.read_threads)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._absorb()
        return self._jobs.take_results()

    def has_pending_work(self) -> bool:
        """Whether a job has no result, or its result was not taken."""
        return self._jobs.pending

    def drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while True:
            self._absorb()
            left = deadline - time.monotonic()
            if not self._jobs.num_open or left <= 0:
                return not self._jobs.num_open
            self._inbox.wait(left)

    def _rows_of(self, job: JobMetadata) -> list[memoryview] | None:
        """The rows of the job's parts; None when there are no such rows."""
        ids, rows = job.block_ids, self._rows
        if len(ids) < len(job.keys) or (ids and not 0 <= min(ids) <= max(ids) < len(rows)):
            return None
        return [rows[row] for row in ids]

    def _run(self, lane: JobExecutor, work: Callable[[], Message], failed: Callable[[Fault], Message]) -> None:
        """Have `work` done on a lane. Whatever happens, exactly one message comes of it."""

        def task() -> None:
            try:
                message = failed(Fault.CANCELLED) if self._medium.stop.is_set() else work()
            except Exception:
                logger.exception("fs tier: a task failed in a way that nobody thought of")
                message = failed(Fault.INTERNAL)
            self._inbox.put(message)

        try:
            lane.submit(task)
        except RuntimeError:  # the lane is closed
            self._inbox.put(failed(Fault.CANCELLED))

    # What the threads tell

    def _absorb(self) -> None:
        urgent = self._inbox.urgent
        while urgent:
            self._receive(urgent.popleft())

    def _receive(self, message: Message) -> None:
        match message:
            case Stored():
                self._on_stored(message)
            case Loaded():
                self._on_loaded(message)
            case GenerationRemoved():
                self._set_elsewhere(max(0, self._elsewhere - message.size))
            case _ if message.epoch != self._epoch:
                pass
            case Answers():
                self._on_answers(message)
            case Opened():
                self._on_store_trouble(message.fault, message.problem)
            case Trimmed():
                self._index.end_trim(message.victims, message.kept)
                self._residency.record(message.kept, stored=True)
            case Found():
                self._residency.record(self._index.take_scanned(message.files, message.gone), stored=False)
            case ScanEnded():
                self._on_scan_ended(message)

    def _on_stored(self, message: Stored) -> None:
        writes = message.writes
        self._counters.moved(STORE, sum(write.moved for write in writes), message.seconds)
        self._counters.already_stored(sum(write.fault is None and not write.moved for write in writes))
        if message.epoch == self._epoch:
            self._settle(writes)
        self._end_waiters(writes)

    def _settle(self, writes: Sequence[Write]) -> None:
        """What is there now, and what not, of this epoch's writes."""
        self._index.settle(writes)
        stored = [write.key for write in writes if write.fault is None]
        self._lookups.stored(stored)
        self._residency.record(stored, stored=True)
        for write in writes:
            if write.fault is not None:
                self._on_failed_write(write)
            elif not write.moved:
                self._economy.give_back(write.size)
            if write.kept:
                self._residency.record(write.kept, stored=True)

    def _end_waiters(self, writes: Sequence[Write]) -> None:
        """Tell the jobs that asked for these keys."""
        good = Counter([job for write in writes if write.fault is None for job, _ in write.waiters])
        for job, count in good.items():
            self._jobs.end_parts(job, count, (), self._epoch)
        for write in writes:
            if write.fault is not None:
                self._counters.failed(STORE, write.fault)
                for job, part in write.waiters:
                    self._jobs.end_parts(job, 0, (part,), self._epoch)

    def _on_failed_write(self, write: Write) -> None:
        self._economy.give_back(write.size)
        index = self._index
        if write.fault is Fault.NO_SPACE and index.present and not write.victims:
            # The device has less room than we thought: from now on something goes for whatever comes.
            index.ceiling = index.used
            self._ceiling_until = self._clock() + CEILING_SECONDS
            self._say(f"{write.problem}; as long as that is so, chunks are evicted to make room", Fault.NO_SPACE)
        else:
            self._on_store_trouble(write.fault, write.problem)

    def _on_store_trouble(self, fault: Fault | None, problem: str | None) -> None:
        """The next store would fail like this one: pause, so that nobody waits for it."""
        if fault is None or not fault.pauses_stores:
            return
        self._paused_until = self._clock() + PAUSE_SECONDS
        self._say_store_trouble(fault, problem)

    def _say_store_trouble(self, fault: Fault, problem: str | None) -> None:
        if fault is Fault.REFUSED:
            self._say(str(problem))
        else:
            self._say(f"{problem}; nothing is stored until that is better, what is there can be loaded", fault)

    def _on_loaded(self, message: Loaded) -> None:
        job, bad = message.job, message.bad
        self._counters.moved(LOAD, message.moved, message.seconds)
        for _, fault, discarded in bad:
            self._counters.failed(LOAD, fault)
            self._counters.discarded(discarded)
        if job.epoch == self._epoch:
            index, keys = self._index, [job.keys[part] for part in message.good]
            index.end_reads(keys)
            if not index.has_all(keys):
                index.add([(key, self._frame_bytes) for key in keys], job.req_id)
            if bad:
                self._take_note_of_bad([(job.keys[part], fault, discarded) for part, fault, discarded in bad])
        self._jobs.end_parts(job, len(message.good), [part for part, _, _ in bad], self._epoch)

    def _take_note_of_bad(self, loads: Sequence[tuple[OffloadKey, Fault, bool]]) -> None:
        """(key, fault, whether the file was taken away) of loads that failed."""
        self._index.end_reads([key for key, _, _ in loads])
        gone = [key for key, fault, discarded in loads if discarded or fault.means_absent]
        self._residency.record(self._index.remove(gone), stored=False)
        self._lookups.lost(gone)
        self._lookups.shun([key for key, fault, discarded in loads if not (discarded or fault.means_absent)])
        if self.settings.on_corrupt == "quarantine":
            quarantined = sum(discarded for _, _, discarded in loads)
            self._set_elsewhere(self._elsewhere + quarantined * self._frame_bytes)

    def _on_answers(self, message: Answers) -> None:
        if message.fault is not None:
            self._counters.failed(LOOKUP, message.fault)
        if message.problem is not None:
            self._say(message.problem)
        self._index.add(message.found)
        self._lookups.answered(message.asked, message.absent)

    def _on_scan_ended(self, message: ScanEnded) -> None:
        if message.problem is not None:
            self._say(message.problem)
        self._index.end_scan()
        if not message.complete:
            self._rescan_at = self._clock() + RESCAN_SECONDS
            return
        self._scanned = True
        if not self._in_use.private:
            self._complete_until = message.started + self.settings.share_refresh
        self._rescan_at = self._clock() + max(self.settings.scan_period, SCAN_PAUSE * message.seconds)
        self._set_elsewhere(message.elsewhere)

    def _set_elsewhere(self, size: int) -> None:
        """So much of the root is not the directory in use; what is too much for the rest goes."""
        self._elsewhere = size
        if self.settings.capacity is not None:
            self._index.capacity = max(0, self.settings.capacity - size)
        victims = self._index.trim()
        if victims:
            self._residency.record([victim for victim, _ in victims], stored=False)
            Batch(
                victims,
                partial(self._medium.unlink, self._in_use),
                partial(Trimmed, self._epoch),
                self._inbox.put,
                self._medium.stop,
            ).start(self._lanes.background, 1)

    # Background work

    def _start_background(self) -> None:
        """Try the directory out, collect what dead engines left, and scan."""
        namespace, epoch = self._in_use, self._epoch
        self._run(self._lanes.background, partial(self._medium.open, namespace, epoch), partial(Opened, epoch))
        self._start_scan()

    def _start_scan(self) -> None:
        self._rescan_at = inf
        namespace, epoch, medium, index = self._in_use, self._epoch, self._medium, self._index
        known = Known(index.snapshot, lambda: index.used, self.settings.capacity)
        index.begin_scan()

        def scan() -> ScanEnded:
            collect_private_generations(self._files, self.settings.root, namespace.owner)
            for message in medium.scan(namespace, known, epoch):
                if isinstance(message, ScanEnded):
                    return message
                self._inbox.put(message)
            return ScanEnded(epoch, False, 0.0)

        self._run(self._lanes.background, scan, lambda _: ScanEnded(epoch, False, 0.0))

    # Reset and end

    def reset(self) -> None:
        """Forget every key and go on in a private generation; with `keep_on_reset` only forget what is not there.

        Jobs that are still in flight end as failed.
        """
        self._absorb()
        if self.settings.keep_on_reset or self._closed:
            self._lookups.look_again()
            return
        self._epoch += 1
        old, size = self._in_use, self._index.used
        self._residency.record(self._index.snapshot() if self._residency.kept else (), stored=False)
        self._evictions_before_reset += self._index.evictions
        self._elsewhere += size
        if old.private:
            self._remove_generation(old, size)
        self._lookups.forget()
        fingerprint = private_fingerprint(old.fingerprint)
        self._enter(Namespace(self._files, self.settings.root, fingerprint, self._engine_id, private=True))

    def _enter(self, namespace: Namespace) -> None:
        """Begin with an empty index; that of a private directory knows all there is."""
        self._namespace = namespace
        self._index = self._new_index()
        self._set_elsewhere(self._elsewhere)
        self._scanned = namespace.private
        # Until then (clock), a key that the index does not know is nowhere.
        self._complete_until = inf if namespace.private else -inf
        self._rescan_at = self._clock() + self.settings.scan_period if namespace.private else inf

    def _new_index(self) -> KeyIndex:
        frames = (self.settings.capacity or UNBOUNDED) // self._frame_bytes
        return KeyIndex(self.settings.capacity, self._frame_bytes, self._policy_class(max(1, frames)))

    def _remove_generation(self, namespace: Namespace, size: int) -> threading.Event:
        """Remove it in the background; the event tells when that has ended."""
        ended = threading.Event()

        def remove() -> None:
            try:
                if self._medium.remove(namespace):
                    self._inbox.put(GenerationRemoved(size))
            finally:
                ended.set()

        try:
            self._lanes.background.submit(remove)
        except RuntimeError:
            ended.set()
        return ended

    def shutdown(self) -> None:
        """End within about twice SHUTDOWN_SECONDS. What has not begun is cancelled, what hangs is left behind."""
        if self._closed:
            return
        self._closed = True
        self._medium.stop.set()
        drained = self.drain(SHUTDOWN_SECONDS)
        if self._namespace is not None and self._namespace.private:
            self._remove_generation(self._namespace, self._index.used).wait(SHUTDOWN_SECONDS)
        self._lanes.shutdown()
        self._lookups.forget()  # nobody will answer what was asked
        if drained:
            self._rows = ()

    # Telling

    def take_events(self) -> list[ResidencyEvent]:
        return self._residency.take()

    def get_stats(self) -> Mapping[str, int | float]:
        """Counters since the start; gauges of what the directory in use holds, as far as it is known (bytes)."""
        self._absorb()
        stats = self._counters.snapshot()
        for reason, count in self._mode.fallbacks().items():
            stats[f"fs_buffered_io_total|reason={reason}"] = count
        stats["evictions_total|tier=fs"] = self._evictions_before_reset + self._index.evictions
        stats["tier_bytes_used|tier=fs"] = self._index.used + self._elsewhere
        stats["fs_elsewhere_bytes"] = self._elsewhere
        stats["tier_chunks|tier=fs"] = len(self._index.present)
        stats["fs_stores_paused"] = int(self._clock() < self._paused_until)
        return stats

    def _say(self, text: str, topic: object = None) -> None:
        """One warning, once for its topic (the text itself, where none is given)."""
        topic = topic or text
        if topic not in self._said:
            self._said.add(topic)
            logger.warning("fs tier: %s", text)

    def leftovers(self) -> dict[str, int]:
        """What is still going on, by name; all zero when every job's result was taken and every question answered."""
        self._absorb()
        return {
            "jobs": self._jobs.num_open,
            "pending": int(self._jobs.pending),
            "writing": len(self._index.writing),
            "leaving": len(self._index.leaving),
            "reading": self._index.num_reads,
            **self._lookups.leftovers(),
        }

    def check(self) -> None:
        """Assert the invariants beside the declarations. O(keys): for tests."""
        self._absorb()
        self._index.check()
        self._lookups.check()
        assert all(write.waiters for write in self._index.writing.values())


def private_fingerprint(fingerprint: Fingerprint) -> Fingerprint:
    """The same bytes-deciding facts, and a generation that nobody else has (L6)."""
    fields = dict(fingerprint.fields)
    fields["generation"] = json.dumps(uuid.uuid4().hex)
    return Fingerprint(tuple(sorted(fields.items())))
