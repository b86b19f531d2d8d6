"""CPU tiers that are broken on purpose, one mistake each."""

from collections.abc import Collection, Sequence

from vllm_tiered_offload import (
    Lease,
    LookupResult,
    OffloadKey,
    PreparedLoad,
    PreparedStore,
    PrimaryTier,
    ReqContext,
)
from vllm_tiered_offload.tiers.cpu.tier import CpuTier


class UsesPinnedRows(CpuTier):
    """Forgets that a row may be read by more than one load."""

    def complete_load(self, prepared: PreparedLoad, failed_keys: Collection[OffloadKey] = ()) -> None:
        super().complete_load(prepared, failed_keys)
        for row in prepared.block_ids:
            if self._rows.pins[row]:
                self._rows.unpin([row])
                self._rows.pins[row] = 0


class LeasesPinNothing(CpuTier):
    def lease(self, keys: Sequence[OffloadKey]) -> Lease:
        lease = super().lease(keys)
        super().release(lease)
        return lease


class LooksUpWithATouch(CpuTier):
    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        if req_context.req_id in self._accesses:
            self.touch(keys, req_context)
        return super().lookup(keys, req_context)


class KeepsFailedKeys(CpuTier):
    def complete_load(self, prepared: PreparedLoad, failed_keys: Collection[OffloadKey] = ()) -> None:
        super().complete_load(prepared, ())


class LoadsAroundGaps(CpuTier):
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PreparedLoad:
        return super().prepare_load([key for key in keys if key in self._leases.readable], req_context)


class StoresTailFirst(CpuTier):
    """What fits is the wrong end."""

    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PreparedStore:
        return super().prepare_store(keys[::-1], req_context)


class AllOrNothingStores(CpuTier):
    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PreparedStore:
        new = [key for key in keys if LookupResult.MISS in super(AllOrNothingStores, self).lookup([key], req_context)]
        if len(new) > self.num_unpinned_rows:
            return PreparedStore((), (), 0, self.generation)
        return super().prepare_store(keys, req_context)


class AbandonFreesRows(CpuTier):
    def abandon(self, prepared: PreparedStore) -> None:
        super().complete_store(prepared, prepared.keys)


class LateStoresCount(CpuTier):
    """A completion from before a reset makes its keys readable."""

    def complete_store(self, prepared: PreparedStore, failed_keys: Collection[OffloadKey] = ()) -> None:
        old = prepared.generation != self.generation
        super().complete_store(prepared, failed_keys)
        if old:
            self._leases.readable.update(zip(prepared.keys, prepared.block_ids, strict=True))


class ResetFreesRows(CpuTier):
    """At once, whoever reads or writes them."""

    def reset_cache(self) -> None:
        super().reset_cache()
        for row in list(self._rows.orphaned):
            self._rows.pins[row] = 0
            self._rows.settle(row)


BROKEN_PRIMARIES: dict[type[PrimaryTier], str] = {
    UsesPinnedRows: "test_two_loads_of_one_row",
    LeasesPinNothing: "test_lease_from_another_thread",
    LooksUpWithATouch: "test_lookup_has_no_effect_on_the_order",
    KeepsFailedKeys: "test_failed_key_of_a_load_is_a_miss",
    LoadsAroundGaps: "test_load_ends_before_the_first_gap",
    StoresTailFirst: "test_longest_prefix_that_fits",
    AllOrNothingStores: "test_longest_prefix_that_fits",
    AbandonFreesRows: "test_keys_are_forgotten_rows_stay_taken",
    LateStoresCount: "test_store_in_flight_leaves_nothing",
    ResetFreesRows: "test_store_in_flight_leaves_nothing",
}
"""Each broken tier, and the test of the suite that finds it."""
