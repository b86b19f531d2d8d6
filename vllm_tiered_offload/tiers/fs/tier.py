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

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
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
from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.settings import SettingsError, validate_block
from vllm_tiered_offload.tiers.block_frame import HEADER_BYTES
from vllm_tiered_offload.tiers.errors import RegistryError
from vllm_tiered_offload.tiers.fs.block_io import BlockIo, FreeSpace, IoMode
from vllm_tiered_offload.tiers.fs.counters import LOAD, LOOKUP, STORE, FsCounters
from vllm_tiered_offload.tiers.fs.economy import Economy
from vllm_tiered_offload.tiers.fs.faults import Fault, NamespaceError
from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.holdings import Holdings
from vllm_tiered_offload.tiers.fs.index import KeyIndex, Write
from vllm_tiered_offload.tiers.fs.jobs import JobTable
from vllm_tiered_offload.tiers.fs.lanes import Lanes
from vllm_tiered_offload.tiers.fs.lookups import Lookups
from vllm_tiered_offload.tiers.fs.medium import Medium
from vllm_tiered_offload.tiers.fs.messages import (
    Answers,
    Found,
    GenerationRemoved,
    Loaded,
    Message,
    Opened,
    ScanEnded,
    Stored,
    Trimmed,
)
from vllm_tiered_offload.tiers.fs.namespace import Namespace, try_root
from vllm_tiered_offload.tiers.fs.settings import FsTierSettings
from vllm_tiered_offload.tiers.fs.tasks import Tasks
from vllm_tiered_offload.tiers.fs.trouble import StoreTrouble
from vllm_tiered_offload.tiers.registry import load_eviction_policy
from vllm_tiered_offload.tiers.residency import ResidencyLog

_BLOCK_LEVEL = RequestOffloadingContext()
_REQUEST_LEVEL = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)

SHUTDOWN_SECONDS = 5.0  # for what is in flight, and again for removing a private generation
SCANNED_FILES_A_PASS = 1024


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
        files = files or Files()
        self._mode = IoMode(settings.io != "buffered")
        space = None if settings.min_free is None else FreeSpace(files, settings.min_free)
        io = BlockIo(files, self._mode, sync_data=settings.fsync == "data", ttl=settings.ttl, space=space)
        self._medium = Medium(io, keep_bad_files=settings.on_corrupt == "quarantine", clock=clock)
        self._residency = ResidencyLog(self.medium, kept=events)
        self._trouble = StoreTrouble(clock)
        self._economy = Economy(settings.store_threshold, settings.write_bytes_per_day, clock)
        self._lookups = Lookups(settings.share_refresh, clock)
        self._jobs = JobTable()
        self._counters = FsCounters()
        # Loaded before there are threads: an unknown policy leaves none behind.
        policy_class = load_eviction_policy(settings.eviction_policy)
        self._tasks = Tasks(lanes or Lanes.start(settings), self._medium.stop)
        self._holdings = Holdings(
            settings,
            policy_class,
            partial(Namespace, files, settings.root, engine_id=engine_id),
            medium=self._medium,
            tasks=self._tasks,
            residency=self._residency,
            clock=clock,
        )
        self._rows: Sequence[memoryview] = ()
        self._closed = False

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
            tier._tasks.lanes.background.submit(tier._try_root)
        return tier

    def _try_root(self) -> None:
        """Say at start what stands in the way of storing. On a thread; stores find out for themselves."""
        try:
            try_root(self.settings.root)
        except NamespaceError as error:
            self._trouble.say_why(error.fault, str(error))

    @property
    def namespace_path(self) -> str:
        """The directory that this tier uses now."""
        return self._holdings.namespace.path

    @property
    def _index(self) -> KeyIndex:
        return self._holdings.index

    def bind_region(self, rows: Sequence[memoryview], geometry: RegionGeometry, fingerprint: Fingerprint) -> None:
        """Opens the directory of these bytes; the threads do that, this one touches no file."""
        self._rows = rows
        frame, capacity = HEADER_BYTES + geometry.row_bytes, self.settings.capacity
        self._holdings.open(fingerprint, frame)
        if capacity is not None and capacity < frame:
            self._trouble.say(f"capacity of {capacity} bytes is less than one chunk, {frame} bytes: nothing is stored")

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Chunks that are counted have to be offered every time, also when host memory has them."""
        return _BLOCK_LEVEL if self.settings.store_threshold == 1 else _REQUEST_LEVEL

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._index.end_request(req_context.req_id)

    # Lookup

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:  # noqa: ARG002
        self._absorb()
        results = self._lookups.look_up(keys, self._index, self._closed or self._holdings.is_complete)
        self._counters.looked_up(results)
        return results

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._index.touch(keys, req_context.req_id)

    def on_schedule_end(self) -> None:
        self._absorb()
        for message in self._tasks.inbox.take_bulk(SCANNED_FILES_A_PASS):
            self._receive(message)
        self._holdings.scan_if_due()
        if not self._trouble.device_was_full:
            self._index.ceiling = None
        if keys := self._lookups.take_questions():
            epoch = self._holdings.epoch
            self._tasks.run(
                self._tasks.lanes.lookup,
                partial(self._medium.look_up, self._holdings.namespace, keys, epoch),
                lambda fault: Answers(epoch, keys, absent=keys, fault=fault),
            )

    # Jobs

    def submit_store(self, job: JobMetadata) -> None:
        self._absorb()
        record, rows = self._jobs.begin(job, self._holdings.epoch), self._rows_of(job)
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
            elif economy is not None and (reason := economy.declines(key, self._holdings.frame_bytes)):
                self._counters.skipped(reason)
                skipped.append(part)
            else:
                new[key] = Write(key, rows[part], self._holdings.frame_bytes, [(record, part)])
        self._counters.already_stored(there)
        if refused:
            self._counters.failed(STORE, refusal or Fault.NO_ROOM, len(refused))
        self._jobs.end_parts(record, there, refused, self._holdings.epoch)
        self._jobs.skip_parts(record, skipped, self._holdings.epoch)
        if new:
            self._write(list(new.values()), job)

    def _refusal(self) -> Fault | None:
        """Why nothing is stored now, if that is so."""
        if self._closed:
            return Fault.CANCELLED
        if self._trouble.pauses_stores:
            return Fault.PAUSED
        if self._index.capacity is not None and not self._holdings.scanned:
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
        self._tasks.run_parts(
            self._tasks.lanes.write,
            self.settings.write_threads,
            writes[:count],
            partial(self._medium.store, self._holdings.namespace),
            partial(Stored, self._holdings.epoch),
        )

    def submit_load(self, job: JobMetadata) -> None:
        self._absorb()
        record, rows = self._jobs.begin(job, self._holdings.epoch), self._rows_of(job)
        if rows is None or self._closed:
            parts = range(len(job.keys))
            self._counters.failed(LOAD, Fault.CANCELLED if self._closed else Fault.INTERNAL, len(parts))
            self._jobs.end_parts(record, 0, parts, self._holdings.epoch)
            return
        self._index.begin_reads(job.keys)
        self._tasks.run_parts(
            self._tasks.lanes.read,
            self.settings.read_threads,
            range(len(job.keys)),
            partial(self._medium.load, self._holdings.namespace, rows),
            partial(Loaded, record),
        )

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
            self._tasks.inbox.wait(left)

    def _rows_of(self, job: JobMetadata) -> list[memoryview] | None:
        """The rows of the job's parts; None when there are no such rows."""
        ids, rows = job.block_ids, self._rows
        if len(ids) < len(job.keys) or (ids and not 0 <= min(ids) <= max(ids) < len(rows)):
            return None
        return [rows[row] for row in ids]

    # What the threads tell

    def _absorb(self) -> None:
        inbox = self._tasks.inbox
        if inbox.urgent:
            for message in inbox.take_urgent():
                self._receive(message)

    def _receive(self, message: Message) -> None:
        match message:
            case Stored():
                self._on_stored(message)
            case Loaded():
                self._on_loaded(message)
            case GenerationRemoved():
                self._holdings.generation_removed(message.size)
            case _ if message.epoch != self._holdings.epoch:
                pass
            case Answers():
                self._on_answers(message)
            case Opened():
                self._trouble.met(message.fault, message.problem)
            case Trimmed():
                self._holdings.trimmed(message)
            case Found():
                self._holdings.found(message)
            case ScanEnded():
                self._on_scan_ended(message)

    def _on_stored(self, message: Stored) -> None:
        writes = message.writes
        self._counters.moved(STORE, sum(write.moved for write in writes), message.seconds)
        self._counters.already_stored(sum(write.fault is None and not write.moved for write in writes))
        if message.epoch == self._holdings.epoch:
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
            self._jobs.end_parts(job, count, (), self._holdings.epoch)
        for write in writes:
            if write.fault is not None:
                self._counters.failed(STORE, write.fault)
                for job, part in write.waiters:
                    self._jobs.end_parts(job, 0, (part,), self._holdings.epoch)

    def _on_failed_write(self, write: Write) -> None:
        self._economy.give_back(write.size)
        index = self._index
        if write.fault is Fault.NO_SPACE and index.present and not write.victims:
            # The device has less room than we thought.
            index.ceiling = index.used
            self._trouble.met_full_device(write.problem)
        else:
            self._trouble.met(write.fault, write.problem)

    def _on_loaded(self, message: Loaded) -> None:
        job, bad = message.job, message.bad
        self._counters.moved(LOAD, message.moved, message.seconds)
        for _, fault, discarded in bad:
            self._counters.failed(LOAD, fault)
            self._counters.discarded(discarded)
        if job.epoch == self._holdings.epoch:
            index, keys = self._index, [job.keys[part] for part in message.good]
            index.end_reads(keys)
            if not index.has_all(keys):
                index.add([(key, self._holdings.frame_bytes) for key in keys], job.req_id)
            if bad:
                self._take_note_of_bad([(job.keys[part], fault, discarded) for part, fault, discarded in bad])
        self._jobs.end_parts(job, len(message.good), [part for part, _, _ in bad], self._holdings.epoch)

    def _take_note_of_bad(self, loads: Sequence[tuple[OffloadKey, Fault, bool]]) -> None:
        """(key, fault, whether the file was taken away) of loads that failed."""
        self._index.end_reads([key for key, _, _ in loads])
        gone = [key for key, fault, discarded in loads if discarded or fault.means_absent]
        self._residency.record(self._index.remove(gone), stored=False)
        self._lookups.lost(gone)
        self._lookups.shun([key for key, fault, discarded in loads if not (discarded or fault.means_absent)])
        if self.settings.on_corrupt == "quarantine":
            quarantined = sum(discarded for _, _, discarded in loads)
            self._holdings.set_elsewhere(self._holdings.elsewhere + quarantined * self._holdings.frame_bytes)

    def _on_answers(self, message: Answers) -> None:
        if message.fault is not None:
            self._counters.failed(LOOKUP, message.fault)
        if message.problem is not None:
            self._trouble.say(message.problem)
        self._index.add(message.found)
        self._lookups.answered(message.asked, message.absent)

    def _on_scan_ended(self, message: ScanEnded) -> None:
        if message.problem is not None:
            self._trouble.say(message.problem)
        self._holdings.scan_ended(message)

    # Reset and end

    def reset(self) -> None:
        """Forget every key and go on in a private generation; with `keep_on_reset` only forget what is not there.

        Jobs that are still in flight end as failed.
        """
        self._absorb()
        if self.settings.keep_on_reset or self._closed:
            self._lookups.look_again()
            return
        self._holdings.forget()
        self._lookups.forget()

    def shutdown(self) -> None:
        """End within about twice SHUTDOWN_SECONDS. What has not begun is cancelled, what hangs is left behind."""
        if self._closed:
            return
        self._closed = True
        self._medium.stop.set()
        drained = self.drain(SHUTDOWN_SECONDS)
        self._holdings.close(SHUTDOWN_SECONDS)
        self._tasks.lanes.shutdown()
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
        stats["evictions_total|tier=fs"] = self._holdings.evictions
        stats["tier_bytes_used|tier=fs"] = self._index.used + self._holdings.elsewhere
        stats["fs_elsewhere_bytes"] = self._holdings.elsewhere
        stats["tier_chunks|tier=fs"] = len(self._index.present)
        stats["fs_stores_paused"] = int(self._trouble.pauses_stores)
        return stats

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
