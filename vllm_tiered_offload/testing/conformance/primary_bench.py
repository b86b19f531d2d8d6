"""One primary tier and the book of who uses which row.

Every handle that the tier gives out is entered, and every row it hands to a store is checked against the book: a row
that a load, a store or a lease still uses is never handed out again, whatever was evicted, abandoned or reset (D4).
What leases say of a row's version is checked against the stores into it.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeVar

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import (
    LookupResult,
    PreparedLoad,
    PreparedStore,
    ReqContext,
    RequestOffloadingContext,
)
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import Lease, PrimaryTier, StoreOffer
from vllm_tiered_offload.testing.conformance.material import keys_of

Handle = PreparedStore | PreparedLoad | Lease
H = TypeVar("H", PreparedStore, PreparedLoad, Lease)


class PrimaryBench:
    """Drives one tier as the hierarchy does."""

    def __init__(self, tier: PrimaryTier, num_rows: int) -> None:
        self.tier = tier
        self.num_rows = num_rows
        self.requests: dict[str, ReqContext] = {}  # announced, not finished
        self._book: dict[int, Handle] = {}  # handles in use, by identity
        self._written: Counter[int] = Counter()  # stores into each row
        self._seen: dict[tuple[int, int], int] = {}  # by row and its version: the stores into it by then
        tier.bind_region(RegionGeometry(num_rows, (4096,), 1))

    # ---- requests ----------------------------------------------------------------------------------------------

    def begin(self, req_id: str = "req") -> ReqContext:
        """Announce a request."""
        req = self.requests[req_id] = ReqContext(req_id)
        answer = self.tier.on_new_request(req)
        assert isinstance(answer, RequestOffloadingContext), f"on_new_request answered {answer!r}"
        return req

    def finish(self, req: ReqContext) -> None:
        self.tier.on_request_finished(req)
        del self.requests[req.req_id]

    def lookup(self, keys: Sequence[OffloadKey], req: ReqContext | None = None) -> list[LookupResult]:
        """One answer a key, from memory: never RETRY."""
        answers = self.tier.lookup(keys, req or ReqContext("anybody"))
        assert isinstance(answers, list)
        assert len(answers) == len(keys), f"lookup of {len(keys)} keys gave {len(answers)} answers"
        assert LookupResult.RETRY not in answers, "a primary tier knows what it has"
        return answers

    def present(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those of `keys` that are readable."""
        return [key for key, answer in zip(keys, self.lookup(keys), strict=True) if answer is LookupResult.HIT]

    # ---- handles -----------------------------------------------------------------------------------------------

    @property
    def rows_in_use(self) -> set[int]:
        """Rows of every handle that has not come back."""
        return {row for handle in self._book.values() for row in handle.block_ids}

    def prepare_store(self, keys: Sequence[OffloadKey], req: ReqContext) -> PreparedStore:
        """A reservation that is in order: leading keys, own rows, rows that nobody uses."""
        return self.prepare_stores((keys, req))

    def prepare_stores(self, *offers: StoreOffer) -> PreparedStore:
        """The same for offers of several requests in one call."""
        prepared = self.tier.prepare_stores(offers)
        self._check_rows(prepared.keys, prepared.block_ids)
        assert len(prepared.accepted) == len(prepared.taken) == len(offers), "not one answer for each offer"
        assert sum(prepared.taken) == len(prepared.keys)
        parts = iter(prepared.parts())
        for (keys, _), accepted, taken in zip(offers, prepared.accepted, prepared.taken, strict=True):
            assert 0 <= accepted <= len(keys)
            self._check_part(list(keys[:accepted]), next(parts) if taken else ())
        used = self.rows_in_use & set(prepared.block_ids)
        assert not used, f"rows {sorted(used)} are still used by a load, a store or a lease"
        return self._enter(prepared)

    def _check_part(self, accepted: list[OffloadKey], chosen: Sequence[OffloadKey]) -> None:
        order = [accepted.index(key) for key in chosen if key in accepted]
        assert len(order) == len(chosen), "a key got a row, but counts as declined"
        assert order == sorted(order), "keys are not in prefix order"

    def prepare_load(self, keys: Sequence[OffloadKey], req: ReqContext) -> PreparedLoad:
        """Pins on a leading part of `keys`."""
        prepared = self.tier.prepare_load(keys, req)
        self._check_rows(prepared.keys, prepared.block_ids)
        assert prepared.keys == tuple(keys[: len(prepared.keys)]), "not a leading part of what was asked for"
        return self._enter(prepared)

    def lease(self, keys: Sequence[OffloadKey]) -> Lease:
        """Scheduler thread's lease; see LeaseTests for other threads."""
        lease = self.tier.lease(keys)
        self._check_rows(lease.keys, lease.block_ids)
        assert lease.keys == tuple(keys[: len(lease.keys)]), "not a leading part of what was asked for"
        for row, version in zip(lease.block_ids, lease.versions, strict=True):
            stores = self._seen.setdefault((row, version), self._written[row])
            assert stores == self._written[row], f"row {row} was written again, and its version is still {version}"
        return self._enter(lease)

    def complete_store(self, prepared: PreparedStore, failed: Collection[OffloadKey] = ()) -> None:
        self._book.pop(id(prepared), None)
        self._written.update(prepared.block_ids)
        self.tier.complete_store(prepared, failed)

    def complete_load(self, prepared: PreparedLoad, failed: Collection[OffloadKey] = ()) -> None:
        self._book.pop(id(prepared), None)
        self.tier.complete_load(prepared, failed)

    def release(self, lease: Lease) -> None:
        self._book.pop(id(lease), None)
        self.tier.release(lease)

    def _enter(self, handle: H) -> H:
        if handle.keys:
            self._book[id(handle)] = handle
        return handle

    def _check_rows(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        assert len(keys) == len(rows), f"{len(keys)} keys and {len(rows)} rows"
        assert len(set(rows)) == len(rows), f"a row twice: {rows}"
        assert all(0 <= row < self.num_rows for row in rows), f"rows {rows} of {self.num_rows}"

    # ---- whole moves -------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[OffloadKey], req: ReqContext) -> PreparedStore:
        """Store and complete what is accepted."""
        prepared = self.prepare_store(keys, req)
        self.complete_store(prepared)
        return prepared

    def fill(self, name: str, count: int) -> list[OffloadKey]:
        """Keys stored by a request of their own, which is over."""
        req, keys = self.begin(f"fill {name}"), keys_of(name, count)
        assert self.put(keys, req).num_accepted == count, f"there was no room for {count} rows"
        self.finish(req)
        return keys

    def close(self) -> None:
        """Hand everything back and finish everything: the tier is then empty of work, and shuts down twice."""
        for handle in list(self._book.values()):
            if isinstance(handle, PreparedStore):
                self.complete_store(handle)
            elif isinstance(handle, PreparedLoad):
                self.complete_load(handle)
            else:
                self.release(handle)
        for req in list(self.requests.values()):
            self.finish(req)
        assert self.tier.num_unpinned_rows == self.num_rows, "a row is pinned although nobody uses it"
        left = {name: size for name, size in self.tier.leftovers().items() if size}
        assert not left, f"something is left at the end: {left}"
        assert not self.tier.has_pending_work()
        self.tier.shutdown()
        self.tier.shutdown()
