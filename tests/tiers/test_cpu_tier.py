"""The CPU tier, one behaviour a test."""

import logging

import pytest
from tier_kit import assert_idle, begin, fill, keys_of, make_tier

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import LookupResult, PreparedLoad, ReqContext
from vllm_tiered_offload.contract.managers import ResidencyEvent
from vllm_tiered_offload.settings import SettingsError
from vllm_tiered_offload.tiers.cpu.tier import CpuTier
from vllm_tiered_offload.tiers.errors import ContractError

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING

pytestmark = pytest.mark.parametrize("policy", ["lru", "arc"])


@pytest.fixture
def tier(policy):
    tier = make_tier(4, policy)
    yield tier
    assert_idle(tier)


def test_a_key_is_missing_then_pending_then_readable(tier):
    req, keys = begin(tier, "r"), keys_of("a", 3)
    assert tier.lookup(keys, req) == [MISS] * 3
    prepared = tier.prepare_store(keys[:2], req)
    assert prepared.keys == tuple(keys[:2])
    assert len(set(prepared.block_ids)) == 2
    assert tier.lookup(keys, req) == [PENDING, PENDING, MISS]
    assert tier.prepare_load(keys, req).keys == ()
    tier.complete_store(prepared)
    assert tier.lookup(keys, req) == [HIT, HIT, MISS]
    load = tier.prepare_load(keys, req)
    assert (load.keys, load.block_ids) == (prepared.keys, prepared.block_ids)
    tier.complete_load(load)
    tier.on_request_finished(req)
    stats = tier.get_stats()
    assert stats["block_lookups_total|tier=cpu|result=hit"] == 2
    assert stats["block_lookups_total|tier=cpu|result=miss"] == 5
    assert stats["block_lookups_total|tier=cpu|result=hit_pending"] == 2
    assert stats["rows_used"] == 2


def test_a_prompt_larger_than_the_tier_keeps_the_prefix_that_fits(tier):
    """V3. Its later chunks are declined instead of pushing out its own head; another request may evict them.

    Mutation: without the access test in _make_room the second store evicts the first one's tail.
    """
    req, keys = begin(tier, "r"), keys_of("a", tier.num_rows + 2)
    first = tier.prepare_store(keys[: tier.num_rows - 1], req)
    tier.complete_store(first)
    second = tier.prepare_store(keys[tier.num_rows - 1 :], req)
    assert (len(second.keys), second.num_accepted) == (1, 1)
    tier.complete_store(second)
    assert tier.prepare_store(keys[tier.num_rows :], req).num_accepted == 0
    assert tier.lookup(keys[: tier.num_rows], req) == [HIT] * tier.num_rows
    tier.on_request_finished(req)
    other = begin(tier, "o")
    third = tier.prepare_store(keys_of("b", 2), other)
    assert len(third.keys) == 2
    tier.complete_store(third)
    tier.on_request_finished(other)


def test_failed_store_leaves_nothing(tier):
    req, keys = begin(tier, "r"), keys_of("a", 2)
    tier.complete_store(tier.prepare_store(keys, req), keys)
    assert tier.lookup(keys, req) == [MISS] * 2
    assert tier.get_stats()["rows_used"] == 0
    tier.on_request_finished(req)


def test_unbound_tier_misses_and_declines(policy):
    tier = CpuTier.from_settings({"capacity": "1MiB", "eviction_policy": policy}, strict=True)
    req = begin(tier, "r")
    assert tier.num_rows == 0
    assert tier.lookup(keys_of("a", 2), req) == [MISS] * 2
    tier.touch(keys_of("a", 2), req)
    assert tier.prepare_store(keys_of("a", 2), req).num_accepted == 0
    assert tier.lease(keys_of("a", 2)).keys == ()
    tier.bind_region(RegionGeometry.fit(1 << 20, [4000], 1))
    assert tier.num_rows == 256
    with pytest.raises(ContractError, match="bind_region"):
        tier.bind_region(RegionGeometry.fit(1 << 20, [4000], 1))
    tier.on_request_finished(req)
    assert_idle(tier)


def test_present_keys_count_as_accepted_and_are_not_evicted_by_the_call(tier):
    """V3. Mutation: without `key in kept` in _make_room a present key loses its row: `keys` has both new ones."""
    old = fill(tier, "a", 2)
    req, filler = begin(tier, "r"), fill(tier, "b", 1)
    load = tier.prepare_load(filler, req)
    prepared = tier.prepare_store([*old, *keys_of("c", 2)], req)
    assert prepared.keys == (keys_of("c", 1)[0],)
    assert prepared.num_accepted == 3
    assert tier.lookup(old, req) == [HIT, HIT]
    assert tier.get_stats()["declined_chunks_total|tier=cpu"] == 1
    tier.complete_store(prepared)
    tier.complete_load(load)
    tier.on_request_finished(req)


def test_a_present_key_behind_the_new_ones_is_not_evicted_either(tier):
    old = fill(tier, "a", 4)
    req = begin(tier, "r")
    prepared = tier.prepare_store([*keys_of("b", 2), *old], req)
    assert prepared.keys == ()
    assert prepared.num_accepted == 0
    assert tier.lookup(old, req) == [HIT] * 4
    assert tier.get_stats()["evictions_total|tier=cpu"] == 0
    tier.on_request_finished(req)


def test_all_rows_pinned_then_unpinned(tier):
    """Case 15: 4 rows, all pinned, a request of 8 blocks in three chunked-prefill steps; unpin; go on.

    Mutation: `row is None or key in kept` alone in `is_pinned` evicts what is being read: the pinned keys are
    no longer hits.
    """
    pinned = fill(tier, "p", 4)
    reader, req, keys = begin(tier, "reader"), begin(tier, "r"), keys_of("a", 8)
    load = tier.prepare_load(pinned, reader)
    stored, offset = [], 0
    for end in (3, 6):
        prepared = tier.prepare_store(keys[offset:end], req)
        assert prepared.num_accepted == 0
        assert prepared.keys == ()
    assert tier.lookup(pinned, reader) == [HIT] * 4
    tier.complete_load(load)
    while offset < 4:
        prepared = tier.prepare_store(keys[offset:8], req)
        assert prepared.keys == tuple(keys[offset : offset + prepared.num_accepted])
        offset += prepared.num_accepted
        stored.append(prepared)
    assert tier.prepare_store(keys[4:8], req).num_accepted == 0
    for prepared in stored:
        tier.complete_store(prepared)
    assert tier.lookup(keys, req) == [HIT] * 4 + [MISS] * 4
    for request in (req, reader):
        tier.on_request_finished(request)


def test_store_between_lookup_and_load_shortens_the_load(policy):
    """Case 20: tier full; look up A (8 blocks), a store for B evicts 2, allocate A: shorter. Look up and abort A."""
    tier = make_tier(8, policy)
    a = fill(tier, "a", 8)
    for_a, for_b = begin(tier, "A"), begin(tier, "B")
    assert tier.lookup(a, for_a) == [HIT] * 8
    store = tier.prepare_store(keys_of("b", 2), for_b)
    assert store.num_accepted == 2
    load = tier.prepare_load(a, for_a)
    assert load.keys == tuple(a[:6])
    assert tier.lookup(a, for_a) == [HIT] * 6 + [MISS] * 2
    assert set(load.block_ids).isdisjoint(store.block_ids)
    tier.on_request_finished(for_a)
    tier.complete_load(load)
    tier.complete_store(store)
    tier.on_request_finished(for_b)
    assert_idle(tier)


def test_one_decoding_request_is_one_access(tier):
    """Case 22: 100 tokens over 4 blocks, touched each token, stores completed last first; tails go before heads."""
    req, keys, stores = begin(tier, "r"), keys_of("a", 4), []
    for token in range(100):
        if token % 25 == 0:
            stores.append(tier.prepare_store(keys[len(stores) : len(stores) + 1], req))
        tier.touch(keys[: len(stores)], req)
    for store in reversed(stores):
        tier.complete_store(store)
    tier.take_events()
    other, gone = begin(tier, "other"), []
    for i in range(4):
        prepared = tier.prepare_store(keys_of("b", 1, i), other)
        gone += tier.take_events()[0].keys
        tier.complete_store(prepared)
        tier.take_events()
    assert gone == keys[::-1]
    for request in (req, other):
        tier.on_request_finished(request)


def test_failed_load_makes_a_miss_of_that_key_alone(tier):
    """D7, and a row that another load still reads is reused only after that one ended."""
    keys = fill(tier, "a", 3)
    req = begin(tier, "r")
    first, second = tier.prepare_load(keys, req), tier.prepare_load(keys, req)
    tier.complete_load(first, failed_keys={keys[1]})
    assert tier.lookup(keys, req) == [HIT, MISS, HIT]
    assert tier.get_stats()["rows_orphaned"] == 1
    again = tier.prepare_store(keys, req)
    assert again.keys == (keys[1],)
    assert again.block_ids[0] not in first.block_ids
    tier.complete_store(again)
    tier.complete_load(second, failed_keys={keys[1]})
    assert tier.lookup(keys, req) == [HIT] * 3
    assert tier.get_stats()["rows_orphaned"] == 0
    tier.on_request_finished(req)


def test_reset_forgets_at_once_and_frees_rows_as_they_are_let_go(tier):
    """L6. Mutation: without the generation test in complete_store the late store makes its key readable again."""
    old = fill(tier, "a", 2)
    req = begin(tier, "r")
    load, store, lease = tier.prepare_load(old[:1], req), tier.prepare_store(keys_of("b", 1), req), tier.lease(old[1:])
    tier.reset_cache()
    tier.check()
    assert tier.lookup([*old, *keys_of("b", 1)], req) == [MISS] * 3
    assert tier.get_stats()["rows_orphaned"] == 3
    fresh = tier.prepare_store(keys_of("b", 2), req)
    assert fresh.num_accepted == 1
    assert fresh.generation == store.generation + 1
    tier.complete_store(store)
    assert tier.lookup(keys_of("b", 1), req) == [PENDING]
    tier.complete_load(load, failed_keys=old[:1])
    tier.release(lease)
    tier.complete_store(fresh)
    assert tier.lookup(keys_of("b", 1), req) == [HIT]
    assert tier.get_stats()["rows_orphaned"] == 0
    tier.on_request_finished(req)


@pytest.mark.parametrize("gone", ["evicted", "failed", "reset"])
def test_what_was_found_is_not_believed_once_a_row_was_given_up(tier, gone):
    """D8: the rows of the last prompt that was found are remembered until then.

    Mutation: not forgetting them where rows are given up answers with rows that belong to other keys.
    """
    keys, req = fill(tier, "a", 2), begin(tier, "r")
    assert tier.lookup(keys, req) == [HIT] * 2
    if gone == "evicted":
        fill(tier, "b", 4)
    elif gone == "failed":
        tier.complete_load(tier.prepare_load(keys, req), failed_keys=keys)
    else:
        tier.reset_cache()
    assert tier.lookup(keys, req) == [MISS] * 2
    assert not tier.prepare_load(keys, req).keys
    tier.on_request_finished(req)


def test_events_tell_residency_and_only_when_wanted(policy):
    tier, silent = make_tier(2, policy), make_tier(2, policy, events=False)
    for each in (tier, silent):
        fill(each, "a", 2)
        fill(each, "b", 1)
        each.reset_cache()
    a, b = keys_of("a", 2), keys_of("b", 1)
    assert tier.take_events() == [
        ResidencyEvent(tuple(a), "cpu", True),
        ResidencyEvent((a[1],), "cpu", False),
        ResidencyEvent(tuple(b), "cpu", True),
        ResidencyEvent((a[0], b[0]), "cpu", False),
    ]
    assert tier.take_events() == []
    assert silent.take_events() == []


def test_strict_tier_raises_on_a_broken_contract(tier):
    req = begin(tier, "r")
    with pytest.raises(ContractError, match="on_new_request"):
        tier.on_new_request(req)
    store = tier.prepare_store(keys_of("a", 1), req)
    tier.complete_store(store)
    with pytest.raises(ContractError, match="completed before"):
        tier.complete_store(store)
    with pytest.raises(ContractError, match="not this tier's"):
        tier.complete_load(PreparedLoad(tuple(keys_of("a", 1)), (0,)))
    tier.on_request_finished(req)
    for call in (tier.prepare_load, tier.prepare_store, tier.touch):
        with pytest.raises(ContractError, match="request r"):
            call(keys_of("a", 1), req)
    with pytest.raises(ContractError, match="on_request_finished"):
        tier.on_request_finished(req)


def test_tolerant_tier_counts_warns_once_and_goes_on(policy, caplog):
    tier = make_tier(4, policy, strict=False)
    keys, stranger = fill(tier, "a", 2), ReqContext("stranger")
    with caplog.at_level(logging.WARNING):
        assert tier.prepare_load(keys, stranger).keys == ()
        assert tier.prepare_store(keys, stranger).num_accepted == 0
        tier.touch(keys, stranger)
        tier.complete_load(PreparedLoad(tuple(keys), (0, 1)))
        tier.on_request_finished(stranger)
    assert tier.get_stats()["contract_violations_total"] == 5
    assert len(caplog.records) == 1
    assert_idle(tier)


def test_completions_after_shutdown_are_harmless(policy):
    tier = make_tier(4, policy)
    req = begin(tier, "r")
    store = tier.prepare_store(keys_of("a", 2), req)
    tier.shutdown()
    tier.shutdown()
    tier.complete_store(store)
    tier.on_request_finished(req)
    assert_idle(tier)


def test_settings_mistakes_are_one_line(policy):
    for raw, text in (
        ({"capacity": "1GiB", "eviction_polcy": policy}, "eviction_policy"),
        ({"capacity": "1GiB", "eviction_policy": "lrx"}, "cpu.eviction_policy: unknown eviction policy 'lrx'"),
        ({"eviction_policy": policy}, "capacity"),
    ):
        with pytest.raises(SettingsError, match=text) as error:
            CpuTier.from_settings(raw)
        assert "\n" not in str(error.value)
