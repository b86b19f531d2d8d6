"""What a root holds, compared with what was known of it: the directory in use by its keys, everything else by bytes.

A scan lists names; only a name that is news costs a stat. So a scan of what is known is a few system calls a directory.
What is found is told at the end, in the order of its last use, so that it is evicted in that order. What is elsewhere
in the root (other models, older generations, the quarantine) counts against the capacity, too, and may be nobody's any
more: where there would be no room otherwise, chunks go that nobody has read or written for an hour, oldest first.

Everything here blocks, and any thread but the scheduler's may call it.
"""

import heapq
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.fs.files import remove_file
from vllm_tiered_offload.tiers.fs.namespace import QUARANTINE, Namespace, is_digest, is_fan_out, key_of
from vllm_tiered_offload.tiers.fs.owner import Owner

IDLE_SECONDS = 3600.0  # what is elsewhere and was not used for so long may go
ROOM = 0.05  # share of the capacity that is made free elsewhere, at most, by one scan
FILES_A_PART = 256  # of the same age, more or less: an access of the eviction policy's

_MOST_IDLE = 1 << 14  # paths remembered in one scan

Found = list[tuple[OffloadKey, int]]


@dataclass(frozen=True, slots=True)
class Known:
    """What a scan is compared with. Called on the scan's thread, when it begins and when it has to make room."""

    snapshot: Callable[[], Sequence[OffloadKey]]
    used: Callable[[], int]
    capacity: int | None


class Scan:
    """One pass over a root for the engine that uses `namespace`. `ttl` in seconds."""

    def __init__(self, namespace: Namespace, known: Known, ttl: float | None, stop: threading.Event) -> None:
        self._namespace = namespace
        self._files = namespace.files
        self._known = known
        self._ttl = ttl
        self._stop = stop
        self._now = time.time()
        # Age (the exponent of its seconds) -> what is there and was not known.
        self._new: defaultdict[int, Found] = defaultdict(list)
        self._gone: list[OffloadKey] = []
        self.elsewhere = 0  # bytes in the root that are not the namespace's
        # A heap: (last use negated, path, bytes) of the oldest of them.
        self._idle: list[tuple[float, str, int]] = []

    def run(self) -> Iterator[tuple[Found, list[OffloadKey]]]:
        """(new files, vanished keys) of the namespace, in parts, oldest first. Raises OSError when it cannot be read.

        Stale temporaries and what is older than the ttl are removed on the way. Ends early when it is told to stop.
        """
        by_directory = defaultdict(set)
        for key in self._known.snapshot():
            by_directory[f"{key[0]:02x}"].add(key)
        for directory in self._look_around(self._namespace.path):
            if self._stop.is_set():
                return
            self._compare(directory, by_directory.pop(directory, set()))
        self._gone += [key for keys in by_directory.values() for key in keys]
        self._look_elsewhere()
        for age in sorted(self._new, reverse=True):
            files = self._new[age]
            for begin in range(0, len(files), FILES_A_PART):
                yield files[begin : begin + FILES_A_PART], []
        for begin in range(0, len(self._gone), FILES_A_PART):
            yield [], self._gone[begin : begin + FILES_A_PART]

    def _look_around(self, path: str) -> list[str]:
        """The directories of chunks in a namespace; stale temporaries beside them go, and the quarantine counts."""
        try:
            names = self._files.listdir(path)
        except FileNotFoundError:
            return []
        for name in names:
            self._collect(path, name)
        if QUARANTINE in names:
            self._count(f"{path}/{QUARANTINE}")
        return [name for name in names if is_fan_out(name)]

    def _compare(self, directory: str, known: set[OffloadKey]) -> None:
        path = f"{self._namespace.path}/{directory}"
        there = set()
        with suppress(FileNotFoundError, NotADirectoryError):
            for name in self._files.listdir(path):
                key = key_of(directory, name)
                if key is None:
                    self._collect(path, name)
                elif (key in known and self._ttl is None) or self._is_usable(key, f"{path}/{name}", key not in known):
                    there.add(key)
        self._gone += known - there

    def _is_usable(self, key: OffloadKey, path: str, is_news: bool) -> bool:
        """Whether the file is there and young enough; takes a note of one that is news. In doubt nothing changes."""
        try:
            found = self._files.info(path)
            if self._ttl is not None and self._now - found.mtime > self._ttl:
                remove_file(self._files, path)
                return False
        except FileNotFoundError:
            return False
        except OSError:
            return not is_news
        if is_news:
            age = max(1.0, self._now - found.used)
            self._new[int(math.log2(age) * 4)].append((key, found.size))
        return True

    def _collect(self, directory: str, name: str) -> None:
        """Remove a temporary that nobody will finish."""
        maker = Owner.of_temporary(name)
        if maker is None:
            return
        with suppress(OSError):
            age = self._now - self._files.info(f"{directory}/{name}").mtime
            if self._namespace.owner.finds_stale(maker, age):
                remove_file(self._files, f"{directory}/{name}")

    # Elsewhere

    def _look_elsewhere(self) -> None:
        parent = os.path.dirname(self._namespace.path)
        with suppress(FileNotFoundError):
            for name in self._files.listdir(parent):
                if name != os.path.basename(self._namespace.path) and is_digest(name) and not self._stop.is_set():
                    self._count_namespace(f"{parent}/{name}")
        self._make_room()

    def _count_namespace(self, path: str) -> None:
        with suppress(OSError):  # another user's, perhaps: what cannot be seen is not counted
            for name in self._files.listdir(path):
                if is_fan_out(name):
                    self._count(f"{path}/{name}", chunks_of=name)
                elif name == QUARANTINE:
                    self._count(f"{path}/{name}")

    def _count(self, directory: str, chunks_of: str | None = None) -> None:
        """Count the bytes of a directory that is not in use here, and remember the oldest files that may go.

        These are chunks; in the quarantine, which has no `chunks_of`, all.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            for name in self._files.listdir(directory):
                path = f"{directory}/{name}"
                with suppress(FileNotFoundError):
                    found = self._files.info(path)
                    self.elsewhere += found.size
                    is_chunk = chunks_of is None or key_of(chunks_of, name) is not None
                    if is_chunk and self._now - found.used > IDLE_SECONDS:
                        push = heapq.heappush if len(self._idle) < _MOST_IDLE else heapq.heappushpop
                        push(self._idle, (-found.used, path, found.size))

    def _make_room(self) -> None:
        """Where the root is as full as it may be, unlink the oldest idle chunks elsewhere."""
        if self._known.capacity is None:
            return
        most = self._known.capacity * (1 - ROOM)
        for _, path, size in sorted(self._idle, reverse=True):
            if self.elsewhere + self._known.used() <= most:
                break
            with suppress(OSError):
                remove_file(self._files, path)
                self.elsewhere -= size
