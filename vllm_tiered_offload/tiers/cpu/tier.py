"""The CPU tier: which key is in which row of the host region.

It moves no bytes. A store reserves rows, and its keys become readable when it completes; a load pins rows, and what
it could not read is forgotten. Generations keep a reset apart from what was in flight: `reset_cache` forgets every key
at once, the rows of old loads, stores and leases become free one by one as these end, and nothing else comes of them.

    key:  absent --prepare_store--> writing --complete_store--> readable --evicted, failed load, reset--> absent
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, Self

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import (
    LookupResult,
    PreparedLoad,
    PreparedStore,
    ReqContext,
    RequestOffloadingContext,
)
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import Lease, PrimaryTier, ResidencyEvent, StoreOffer
from vllm_tiered_offload.settings import Block, ByteSize, SettingsError, validate_block
from vllm_tiered_offload.tiers.cpu.leases import LeaseTable
from vllm_tiered_offload.tiers.cpu.policies.base import EvictionPolicy
from vllm_tiered_offload.tiers.cpu.rows import RowAllocator
from vllm_tiered_offload.tiers.errors import ContractError, RegistryError
from vllm_tiered_offload.tiers.registry import load_eviction_policy
from vllm_tiered_offload.tiers.residency import ResidencyLog

logger = logging.getLogger(__name__)

_BLOCK_LEVEL = RequestOffloadingContext()

# An Enum's member costs more to look up than most of what is done with it here.
_HIT, _MISS, _PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING

# In place of the row of a key that was chosen and gets it before the call is over.
_NO_ROW_YET = -1

# What the lookup counters are called, by result; RETRY never comes from memory.
_LOOKUP_STAT = {result: f"block_lookups_total|tier=cpu|result={result.value}" for result in (_HIT, _MISS, _PENDING)}


class CpuTierSettings(Block):
    """The `cpu` block. `capacity` is the size of the region in bytes, all ranks together."""

    capacity: ByteSize
    eviction_policy: str = "lru"


class CpuTier(PrimaryTier):
    """Primary tier over the rows of the host region.

    A broken contract (a handle completed twice, a request that was never announced) raises ContractError when
    `strict`; otherwise it is logged once, counted and ignored. Residency events are kept only with `events`, and then
    somebody has to take them.
    """

    medium = "cpu"

    def __init__(self, settings: CpuTierSettings, *, strict: bool = False, events: bool = False) -> None:
        self.settings = settings
        self._strict = strict
        self._policy_class = load_eviction_policy(settings.eviction_policy)
        self._bind_rows(0)
        # Keys whose store is in flight, of this generation -> row. Disjoint from readable keys; the policy holds
        # exactly both. Every such row is pinned by its store.
        self._writing: dict[OffloadKey, int] = {}
        # Keys that were all readable when they were last asked for, with their rows; None once a row was given up.
        self._found: tuple[list[OffloadKey], list[int]] | None = None
        # Handles given out and not handed back, of any generation.
        self._in_flight: set[PreparedLoad | PreparedStore] = set()
        # Stores in flight whose keys were forgotten in this generation; a subset of _in_flight.
        self._abandoned: set[PreparedLoad | PreparedStore] = set()
        # Announced requests -> their access, None until they first use a key in this generation.
        self._accesses: dict[str, int | None] = {}
        self._last_access = 0
        self._generation = 0
        self._residency = ResidencyLog(self.medium, kept=events)
        self._lookups = dict.fromkeys(_LOOKUP_STAT, 0)
        self._evictions = 0
        self._declined = 0
        self._violations = 0

    @classmethod
    def from_settings(
        cls, raw: Mapping[str, Any], path: str = "cpu", *, strict: bool = False, events: bool = False
    ) -> Self:
        """From the tier's own settings block. Raises SettingsError, one line that begins with `path`."""
        settings = validate_block(CpuTierSettings, raw, path)
        try:
            return cls(settings, strict=strict, events=events)
        except RegistryError as error:
            raise SettingsError([f"{path}.eviction_policy: {error}"]) from error

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    @property
    def num_unpinned_rows(self) -> int:
        with self._leases.lock:
            leased_only = self._leases.count_rows(lambda row: not self._rows.pins[row])
        return self._rows.num_rows - self._rows.num_pinned - leased_only

    @property
    def generation(self) -> int:
        """Counts resets."""
        return self._generation

    def bind_region(self, geometry: RegionGeometry) -> None:
        if self.num_rows:
            self._violation("bind_region was called twice")
            return
        self._bind_rows(geometry.num_rows)

    def _bind_rows(self, num_rows: int) -> None:
        self._leases = LeaseTable(num_rows)
        self._rows = RowAllocator(num_rows, self._leases.is_held)
        self._policy: EvictionPolicy = self._policy_class(num_rows)

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if req_context.req_id in self._accesses:
            self._violation(f"request {req_context.req_id}: on_new_request before on_request_finished")
        else:
            self._accesses[req_context.req_id] = None
        return _BLOCK_LEVEL

    def on_request_finished(self, req_context: ReqContext) -> None:
        if not self._is_announced(req_context, "on_request_finished"):
            return
        access = self._accesses.pop(req_context.req_id)
        if access is not None:
            self._policy.close(access)

    def _is_announced(self, req_context: ReqContext, call: str) -> bool:
        if req_context.req_id in self._accesses:
            return True
        self._violation(f"request {req_context.req_id}: {call} outside on_new_request .. on_request_finished")
        return False

    def _access(self, req_context: ReqContext) -> int:
        """The request's access, opened now if this is its first use of a key."""
        access = self._accesses[req_context.req_id]
        if access is None:
            self._last_access += 1
            access = self._accesses[req_context.req_id] = self._last_access
            self._policy.open(access)
        return access

    # Lookup

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:  # noqa: ARG002
        counts = self._lookups
        if self._rows_of(keys) is not None:
            counts[_HIT] += len(keys)
            return [_HIT] * len(keys)
        readable, writing = self._leases.readable, self._writing
        results = [_HIT if key in readable else _PENDING if key in writing else _MISS for key in keys]
        for result in (_HIT, _MISS, _PENDING):
            counts[result] += results.count(result)
        return results

    def _rows_of(self, keys: Sequence[OffloadKey]) -> list[int] | None:
        """The rows of `keys` if all of them are readable. A prompt is looked up and then pinned: that is one search."""
        found = self._found
        if found is not None and found[0] == keys:
            return found[1]
        try:
            rows = list(map(self._leases.readable.__getitem__, keys))
        except KeyError:
            return None
        self._found = list(keys), rows
        return rows

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if not self._is_announced(req_context, "touch"):
            return
        # A request whose keys are all unknown has used nothing yet; its access begins with its first store.
        if self._accesses[req_context.req_id] is None and not any(key in self._policy for key in keys):
            return
        self._policy.touch(keys, self._access(req_context))

    # Loads

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PreparedLoad:
        if not self._is_announced(req_context, "prepare_load"):
            return PreparedLoad((), (), self._generation)
        rows = self._rows_of(keys)
        if rows is None:
            readable = self._leases.readable
            keys = list(takewhile(readable.__contains__, keys))
            rows = [readable[key] for key in keys]
        self._rows.pin(rows)
        prepared = PreparedLoad(tuple(keys), tuple(rows), self._generation)
        if rows:
            self._in_flight.add(prepared)
        return prepared

    def complete_load(self, prepared: PreparedLoad, failed_keys: Collection[OffloadKey] = ()) -> None:
        if not prepared.keys or not self._take_back(prepared):
            return
        self._rows.unpin(prepared.block_ids)
        if prepared.generation != self._generation:
            return
        self._policy.unpinned(prepared.keys)
        if failed_keys:
            self._forget_failed(prepared, failed_keys)

    def _forget_failed(self, prepared: PreparedLoad, failed_keys: Collection[OffloadKey]) -> None:
        """Failed keys are misses, unless their row is another one by now (somebody else failed on it before)."""
        readable = self._leases.readable
        rows = dict(zip(prepared.keys, prepared.block_ids, strict=True))
        gone = [key for key in failed_keys if key in rows and readable.get(key) == rows[key]]
        self._drop(gone)
        self._policy.remove(gone)

    # Stores

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> PreparedStore:
        readable, writing, accesses = self._leases.readable, self._writing, self._accesses
        chosen: list[OffloadKey] = []
        block_ids: list[int] = []  # of the leading part of `chosen` that has its rows
        accepted, taken = [], []
        free = self._rows.num_free
        for keys, ctx in offers:
            if ctx.req_id not in accesses:
                self._is_announced(ctx, "prepare_stores")
                accepted.append(0)
                taken.append(0)
                continue
            new = [key for key in keys if key not in readable and key not in writing]
            num_accepted = len(keys)
            if len(new) > 1:
                new = list(dict.fromkeys(new))
            if len(new) > free - len(chosen) + len(block_ids):
                block_ids += self._reserve(chosen[len(block_ids) :])
                num_accepted = self._cut_to_room(new, keys, accesses[ctx.req_id])
                free = self._rows.num_free
            if new:
                used = new if len(new) == len(keys) else keys[keys.index(new[0]) : num_accepted]
                self._policy.insert(used, accesses[ctx.req_id] or self._access(ctx))
                for key in new:
                    writing[key] = _NO_ROW_YET
                chosen += new
            accepted.append(num_accepted)
            taken.append(len(new))
        block_ids += self._reserve(chosen[len(block_ids) :])
        prepared = PreparedStore(tuple(chosen), tuple(block_ids), accepted, taken, self._generation)
        if chosen:
            self._in_flight.add(prepared)
        return prepared

    def _reserve(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Rows for keys that are about to be written, of which there are enough."""
        rows = self._rows.reserve(len(keys))
        self._writing.update(zip(keys, rows, strict=True))
        return rows

    def _cut_to_room(self, new: list[OffloadKey], keys: Sequence[OffloadKey], access: int | None) -> int:
        """Shorten `new` to the rows that can be had; how many leading ones of `keys` that serves."""
        self._make_room(len(new), keys, access)
        fitting = min(len(new), self._rows.num_free)
        accepted = len(keys) if fitting == len(new) else keys.index(new[fitting])
        self._declined += len(new) - fitting
        del new[fitting:]
        return accepted

    def complete_store(self, prepared: PreparedStore, failed_keys: Collection[OffloadKey] = ()) -> None:
        if not prepared.keys or not self._take_back(prepared):
            return
        self._rows.unpin(prepared.block_ids)
        if prepared.generation != self._generation or prepared in self._abandoned:
            self._abandoned.discard(prepared)
            return
        stored = dict(zip(prepared.keys, prepared.block_ids, strict=True))
        for key in stored:
            del self._writing[key]
        failed = {key: stored.pop(key) for key in failed_keys if key in stored}
        self._leases.readable.update(stored)
        self._policy.unpinned(stored)
        self._residency.record(stored, stored=True)
        self._policy.remove(failed)
        for row in failed.values():
            self._rows.give(row)

    def abandon(self, prepared: PreparedStore) -> None:
        if prepared.generation != self._generation or prepared not in self._in_flight:
            return
        self._abandoned.add(prepared)
        for key in prepared.keys:
            del self._writing[key]
        self._policy.remove(prepared.keys)
        for row in prepared.block_ids:
            self._rows.give(row)  # pinned by the store: orphaned until it ends

    def _make_room(self, wanted: int, protected: Sequence[OffloadKey], access: int | None) -> None:
        """Evict until `wanted` rows are free, as far as unpinned rows go.

        Never evicts one of `protected`, nor what `access` used: a prompt that is larger than the tier keeps the prefix
        that fits, instead of pushing out its own head with its tail (V3).
        """
        self._collect_leases()
        lacking = wanted - self._rows.num_free
        if lacking <= 0:
            return
        readable, pins, is_held = self._leases.readable, self._rows.pins, self._leases.is_held
        kept = set(protected)
        last_used_by = self._policy.access_of
        spared = list(protected)

        def is_pinned(key: OffloadKey) -> bool:
            row = readable.get(key)
            if row is None or pins[row] > 0 or key in kept or is_held(row):
                return True
            if last_used_by(key) == access:
                spared.append(key)
                return True
            return False

        with self._leases.lock:
            victims = self._policy.evict(lacking, is_pinned)
            rows = self._leases.take_away(victims)
        self._found = None
        for row in rows:
            self._rows.give(row)
        self._policy.unpinned(spared)
        self._evictions += len(victims)
        self._residency.record(victims, stored=False)

    def _drop(self, keys: Collection[OffloadKey]) -> None:
        """Readable keys are no longer readable; the policy is the caller's business."""
        with self._leases.lock:
            rows = self._leases.take_away(keys)
        self._found = None
        for row in rows:
            self._rows.give(row)
        self._residency.record(keys, stored=False)

    # Leases

    def lease(self, keys: Sequence[OffloadKey]) -> Lease:
        return self._leases.lease(keys)

    def release(self, lease: Lease) -> None:
        self._leases.release(lease)

    def _collect_leases(self) -> None:
        """What released leases leave to the scheduler thread: rows that became free, keys that may be evicted again."""
        for lease in self._leases.collect():
            for row in lease.block_ids:
                self._rows.settle(row)
            self._policy.unpinned(lease.keys)

    # The whole tier

    def reset_cache(self) -> None:
        self._collect_leases()
        self._residency.record(self._leases.readable, stored=False)
        with self._leases.lock:
            self._leases.take_all_away()
        self._found = None
        self._writing.clear()
        self._abandoned.clear()
        self._rows.give_all()
        self._policy.clear()
        self._accesses = dict.fromkeys(self._accesses)
        self._generation += 1

    def take_events(self) -> list[ResidencyEvent]:
        return self._residency.take()

    def get_stats(self) -> Mapping[str, int | float]:
        """Rows by use, and what happened since the start. `rows_pinned` counts loads, stores and leases."""
        self._collect_leases()
        rows = self._rows
        with self._leases.lock:
            leased_only = self._leases.count_rows(lambda row: not rows.pins[row])
        return {
            "rows_total": rows.num_rows,
            "rows_used": rows.num_used,
            "rows_orphaned": len(rows.orphaned),
            "rows_pinned": rows.num_pinned + leased_only,
            "evictions_total|tier=cpu": self._evictions,
            "declined_chunks_total|tier=cpu": self._declined,
            "contract_violations_total": self._violations,
            **{name: self._lookups[result] for result, name in _LOOKUP_STAT.items()},
        }

    def shutdown(self) -> None:
        self.reset_cache()

    # Helpers

    def _take_back(self, prepared: PreparedLoad | PreparedStore) -> bool:
        if prepared in self._in_flight:
            self._in_flight.remove(prepared)
            return True
        self._violation(f"{type(prepared).__name__} was completed before, or is not this tier's")
        return False

    def _violation(self, text: str) -> None:
        if self._strict:
            raise ContractError(text)
        self._violations += 1
        if self._violations == 1:
            logger.warning("CPU tier: %s. Ignored; later ones are only counted.", text)

    def leftovers(self) -> dict[str, int]:
        """What is still going on, by name; all zero when every request finished and every handle came back."""
        self._collect_leases()
        return {
            "requests": len(self._accesses),
            "handles": len(self._in_flight),
            "leases": self._leases.num_open,
            "writing": len(self._writing),
            "pinned": self._rows.num_pinned,
            "orphaned": len(self._rows.orphaned),
        }

    def check(self) -> None:
        """Assert the invariants beside the declarations. O(rows): for tests."""
        self._collect_leases()
        rows, readable, writing = self._rows, self._leases.readable, self._writing
        assert readable.keys().isdisjoint(writing), "a key is readable and being written"
        used = [*readable.values(), *writing.values()]
        everything = [*used, *rows.free_rows(), *rows.orphaned]
        assert len(everything) == len(set(everything)), "a row is in two places"
        assert sorted(everything) == list(range(rows.num_rows)), "free + used + orphaned are not all rows"
        assert rows.num_used == len(used)
        assert rows.num_free == len(rows.free_rows())
        expected_pins = [0] * rows.num_rows
        for prepared in self._in_flight:
            for row in prepared.block_ids:
                expected_pins[row] += 1
        assert rows.pins == expected_pins, "pins differ from the handles in flight"
        assert rows.num_pinned == sum(map(bool, rows.pins))
        assert not any(rows.pins[row] for row in rows.free_rows()), "a free row is pinned"
        assert not any(self._leases.is_held(row) for row in rows.free_rows()), "a free row is leased"
        assert all(rows.pins[row] or self._leases.is_held(row) for row in rows.orphaned), "an orphan that nobody uses"
        assert all(rows.pins[row] for row in writing.values()), "a row being written is not pinned"
        assert len(self._policy) == len(used), "the policy holds other keys than the tier"
        assert all(key in self._policy for key in (*readable, *writing))
