"""CPU tiers that are broken on purpose, one mistake each."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from vllm_tiered_offload import (
    Lease,
    LookupResult,
    OffloadKey,
    PreparedLoad,
    PreparedStore,
    PrimaryTier,
    ReqContext,
    StoreOffer,
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


class VersionsNeverChange(CpuTier):
    def lease(self, keys: Sequence[OffloadKey]) -> Lease:
        lease = super().lease(keys)
        return replace(lease, versions=(0,) * len(lease.block_ids))


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

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> PreparedStore:
        return super().prepare_stores([(keys[::-1], ctx) for keys, ctx in offers])


class AllOrNothingStores(CpuTier):
    def prepare_stores(self, offers: Sequence[StoreOffer]) -> PreparedStore:
        new = [key for keys, ctx in offers for key in keys if LookupResult.MISS in self.lookup([key], ctx)]
        if len(new) > self.num_unpinned_rows:
            return super().prepare_stores([((), ctx) for _, ctx in offers])
        return super().prepare_stores(offers)


class StoresKeyTwice(CpuTier):
    """Offers of one call do not know of each other."""

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> PreparedStore:
        prepared = super().prepare_stores(offers)
        again = sum(len(keys) for keys, _ in offers) - len(prepared.keys)
        prepared.keys += prepared.keys[:again]
        prepared.block_ids += prepared.block_ids[:again]
        return prepared


class MixesUpOffers(CpuTier):
    """Says of the first offer what is true of the last."""

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> PreparedStore:
        prepared = super().prepare_stores(offers)
        prepared.accepted, prepared.taken = prepared.accepted[::-1], prepared.taken[::-1]
        return prepared


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
    VersionsNeverChange: "test_a_version_tells_what_a_row_held_from_what_it_holds",
    LooksUpWithATouch: "test_lookup_has_no_effect_on_the_order",
    KeepsFailedKeys: "test_failed_key_of_a_load_is_a_miss",
    LoadsAroundGaps: "test_load_ends_before_the_first_gap",
    StoresTailFirst: "test_longest_prefix_that_fits",
    AllOrNothingStores: "test_longest_prefix_that_fits",
    StoresKeyTwice: "test_a_key_of_two_offers_gets_one_row",
    MixesUpOffers: "test_several_offers_share_what_fits",
    AbandonFreesRows: "test_keys_are_forgotten_rows_stay_taken",
    LateStoresCount: "test_store_in_flight_leaves_nothing",
    ResetFreesRows: "test_store_in_flight_leaves_nothing",
}
"""Each broken tier, and the test of the suite that finds it."""
