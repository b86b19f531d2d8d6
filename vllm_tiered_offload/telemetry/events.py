"""KV events with their payload: which blocks became resident in, or left, which medium.

Tiers report residency by key alone. Consumers (routers that send a prompt to the engine that has its prefix) need the
tokens too, and only a request knows them, so they are noted while a request is at hand:

    a chunk is about to be stored       from the request that computed it
    a chunk was found in some tier      from the request that looked it up (a chunk of an earlier process, say)

An entry lives while some medium has the chunk, or while what noted it (a store in flight, a request) still lives;
memory is bounded by what is resident and what is running. It is dropped at the end of a batch, never inside one: one
batch may tell that host memory lost a chunk and that the disk has it (case 54).

Left out are events of chunks whose tokens nobody knows, and removals of what was not announced: so every removal has
an earlier store of the same blocks and medium, and consumers can count.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_tiered_offload.contract.keys import OffloadKey, split_offload_key
from vllm_tiered_offload.contract.managers import ResidencyEvent

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkPayload:
    """What consumers are told of one chunk. One hash, and one entry of `extra_keys`, for each of its device blocks."""

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None  # of the block before the chunk; None at the start of a prompt
    token_ids: "array[int]"
    block_tokens: int
    group_idx: int = 0
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Announcement:
    """Chunks that became resident in (`stored`) or left (not `stored`) a medium. Never empty."""

    medium: str
    stored: bool
    payloads: tuple[ChunkPayload, ...]


Describe = Callable[[Any, int, int], ChunkPayload]
"""The payload of a request's chunk, by KV group and its index there."""


@dataclass(slots=True)
class _Entry:
    payload: ChunkPayload
    holds: int = 0
    copies: Counter[str] = field(default_factory=Counter)  # announced residencies by medium, all > 0

    @property
    def is_needed(self) -> bool:
        return self.holds > 0 or bool(self.copies)


class EventLedger:
    """Payloads by key, and where each chunk was said to be. Scheduler thread only.

    `describe` reads a chunk's payload from a live request; what it raises costs that chunk its events and nothing
    else. `tiers_by_medium` says how many tiers share a medium's name: each may hold a copy.
    """

    def __init__(self, describe: Describe, tiers_by_medium: Mapping[str, int]) -> None:
        self._describe = describe
        self._tiers_by_medium = tiers_by_medium
        self._entries: dict[OffloadKey, _Entry] = {}
        # Entries that may not be needed any more: looked at after the next batch. Every unneeded one is in it.
        self._doubtful: set[OffloadKey] = set()
        self._told_of_trouble = False

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_held(self) -> int:
        """Entries that a request or a store in flight holds."""
        return sum(entry.holds > 0 for entry in self._entries.values())

    def hold(self, request: Any, chunks: Iterable[tuple[int, OffloadKey]]) -> None:
        """Know these chunks (index, key) of `request` until `release`. Never raises."""
        for chunk, key in chunks:
            entry = self._entries.get(key)
            if entry is None:
                payload = self._read(request, key, chunk)
                if payload is None:
                    continue
                entry = self._entries[key] = _Entry(payload)
            entry.holds += 1

    def _read(self, request: Any, key: OffloadKey, chunk: int) -> ChunkPayload | None:
        try:
            return self._describe(request, split_offload_key(key)[1], chunk)
        except Exception:  # events are an extra: they must not cost a store, which is half made at this point
            if not self._told_of_trouble:
                self._told_of_trouble = True
                logger.warning("a chunk's KV event is left out; later ones silently", exc_info=True)
            return None

    def release(self, keys: Collection[OffloadKey]) -> None:
        """End one hold of each key."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.holds:
                entry.holds -= 1
                self._doubtful.add(key)

    def announce(self, events: Sequence[ResidencyEvent]) -> list[Announcement]:
        """One batch of the tiers' events, told in full. Call it for empty batches too: it tidies up."""
        announcements = []
        for event in events:
            tell = self._stored if event.stored else self._removed
            payloads = tuple(payload for key in event.keys if (payload := tell(key, event.medium)) is not None)
            if payloads:
                announcements.append(Announcement(event.medium, event.stored, payloads))
        if self._doubtful:
            self._tidy()
        return announcements

    def _stored(self, key: OffloadKey, medium: str) -> ChunkPayload | None:
        entry = self._entries.get(key)
        if entry is None or entry.copies[medium] >= self._tiers_by_medium.get(medium, 1):
            return None
        entry.copies[medium] += 1
        return entry.payload

    def _removed(self, key: OffloadKey, medium: str) -> ChunkPayload | None:
        entry = self._entries.get(key)
        if entry is None or not entry.copies[medium]:
            return None
        entry.copies[medium] -= 1
        if not entry.copies[medium]:
            del entry.copies[medium]
        self._doubtful.add(key)
        return entry.payload

    def _tidy(self) -> None:
        for key in self._doubtful:
            entry = self._entries.get(key)
            if entry is not None and not entry.is_needed:
                del self._entries[key]
        self._doubtful.clear()

    def check(self) -> None:
        """Assert the invariants beside the declarations. O(entries): for tests."""
        for key, entry in self._entries.items():
            assert entry.is_needed or key in self._doubtful, "an entry that nobody needs"
            assert all(0 < n <= self._tiers_by_medium.get(medium, 1) for medium, n in entry.copies.items())
