"""What the tier's threads do. Each function does I/O and returns the message that tells the scheduler thread."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.seams import Clock
from vllm_tiered_offload.tiers.block_frame import HEADER_BYTES, FrameError
from vllm_tiered_offload.tiers.fs.block_io import BlockIo
from vllm_tiered_offload.tiers.fs.faults import ExpiredError, Fault, NamespaceError, classify
from vllm_tiered_offload.tiers.fs.files import remove_file
from vllm_tiered_offload.tiers.fs.index import Write
from vllm_tiered_offload.tiers.fs.messages import Answers, Found, Loaded, Opened, ScanEnded, Stored, Trimmed
from vllm_tiered_offload.tiers.fs.namespace import Namespace
from vllm_tiered_offload.tiers.fs.scan import Known, Scan

logger = logging.getLogger(__name__)

_REMOVE_ATTEMPTS = 5
_REMOVE_PAUSE = 0.05


class Medium:
    """The files, seen from the tier's threads. Thread-safe; every method blocks and none raises."""

    def __init__(self, io: BlockIo, *, keep_bad_files: bool, clock: Clock) -> None:
        self._io = io
        self._files = io.files
        self._keep_bad_files = keep_bad_files
        self._clock = clock
        # Long work ends early once this is set.
        self.stop = threading.Event()

    def open(self, namespace: Namespace, epoch: int) -> Opened:
        """Try out whether chunks can be stored."""
        try:
            namespace.try_out()
        except NamespaceError as error:
            return Opened(epoch, error.fault, str(error))
        return Opened(epoch, None)

    def store(self, namespace: Namespace, write: Write, report: Stored) -> None:
        """Unlink the victims, then write: in this order the directory never holds more than was reserved."""
        began = self._clock()
        victims = [victim for victim, _ in write.victims]
        try:
            while victims:
                remove_file(self._files, namespace.file_path(victims[0]))
                del victims[0]
            if self._io.write(namespace, write.key, write.row):
                write.moved = write.size
        except (OSError, NamespaceError) as error:
            write.fault = classify(error)
            write.problem = str(error) if isinstance(error, NamespaceError) else f"{namespace.path}: {error.strerror}"
        write.kept = victims
        report.writes.append(write)
        report.seconds += self._clock() - began

    def load(self, namespace: Namespace, rows: Sequence[memoryview], part: int, report: Loaded) -> None:
        """Read into the part's row and verify; a bad file is taken out of sight."""
        began = self._clock()
        key, row = report.job.keys[part], rows[part]
        try:
            self._io.read(namespace, key, row)
        except (OSError, FrameError, ExpiredError) as error:
            fault = classify(error)
            report.fail(part, fault, fault.condemns_file and self._discard(namespace, key, error))
            if fault is Fault.EXPIRED:
                with suppress(OSError):
                    remove_file(self._files, namespace.file_path(key))
        else:
            report.good.append(part)
            report.moved += HEADER_BYTES + row.nbytes
        report.seconds += self._clock() - began

    def look_up(self, namespace: Namespace, keys: Sequence[OffloadKey], epoch: int) -> Answers:
        """One stat a key. A file that cannot be seen counts as absent."""
        answers, absent = Answers(epoch, keys, absent=keys), []
        try:
            namespace.check()
        except (OSError, NamespaceError) as error:
            answers.fault = classify(error)
            answers.problem = str(error) if isinstance(error, NamespaceError) else None
            return answers
        for key in keys:
            size = None
            try:
                size = None if self.stop.is_set() else self._io.size(namespace, key)
            except OSError as error:
                answers.fault = classify(error)
            if size is None:
                absent.append(key)
            else:
                answers.found.append((key, size))
        answers.absent = absent
        return answers

    def scan(self, namespace: Namespace, known: Known, epoch: int) -> Iterator[Found | ScanEnded]:
        """What is there and was not known, what is gone, and the end."""
        end = ScanEnded(epoch, False, self._clock())
        try:
            namespace.check()
            scan = Scan(namespace, known, self._io.ttl, self.stop)
            for files, gone in scan.run():
                yield Found(epoch, files, gone)
            end.complete, end.elsewhere = not self.stop.is_set(), scan.elsewhere
        except NamespaceError as error:
            end.problem = str(error)
        except OSError as error:
            logger.info("fs tier: %s could not be scanned: %s", namespace.path, error.strerror)
        end.seconds = self._clock() - end.started
        yield end

    def unlink(self, namespace: Namespace, victim: tuple[OffloadKey, int], report: Trimmed) -> None:
        """Unlink one victim."""
        try:
            remove_file(self._files, namespace.file_path(victim[0]))
        except OSError:
            report.kept.append(victim[0])
        report.victims.append(victim)

    def remove(self, namespace: Namespace) -> bool:
        """Remove a private generation; late writes may hold it up for a moment."""
        for _ in range(_REMOVE_ATTEMPTS):
            try:
                namespace.remove()
            except OSError as error:
                trouble = error
                time.sleep(_REMOVE_PAUSE)
            else:
                return True
        logger.info("fs tier: %s stays behind until the next start: %s", namespace.path, trouble.strerror)
        return False

    def _discard(self, namespace: Namespace, key: OffloadKey, why: Exception) -> bool:
        path = namespace.file_path(key)
        logger.info("fs tier: %s is bad (%s)", path, why)
        try:
            namespace.discard(path, keep=self._keep_bad_files)
        except OSError as error:
            logger.info("fs tier: %s is bad and stays: %s", path, error.strerror)
            return False
        return True
