"""Leases: alone, and from real threads against a busy scheduler thread."""

import threading

import pytest
from tier_kit import assert_idle, begin, fill, keys_of, make_tier

from vllm_tiered_offload.contract.jobs import LookupResult


def test_a_leased_row_is_not_evicted_and_returns_to_its_place():
    """Mutation: without `is_held(row)` in _make_room a leased key is a miss afterwards."""
    tier = make_tier(2)
    keys = fill(tier, "a", 2)
    lease = tier.lease([keys[0], keys[1], *keys_of("b", 1)])
    assert lease.keys == tuple(keys)
    req = begin(tier, "r")
    assert tier.prepare_store(keys_of("b", 1), req).num_accepted == 0
    assert tier.lookup(keys, req) == [LookupResult.HIT] * 2
    assert tier.get_stats()["rows_pinned"] == 2
    tier.release(lease)
    tier.release(lease)
    store = tier.prepare_store(keys_of("b", 1), req)
    assert store.num_accepted == 1
    assert tier.take_events()[-1].keys == (keys[1],)
    tier.complete_store(store)
    tier.on_request_finished(req)
    assert_idle(tier)


def test_two_leases_on_one_row_end_one_by_one():
    tier = make_tier(1)
    keys = fill(tier, "a", 1)
    first, second = tier.lease(keys), tier.lease(keys)
    req = begin(tier, "r")
    tier.release(first)
    assert tier.prepare_store(keys_of("b", 1), req).keys == ()
    tier.release(second)
    tier.complete_store(tier.prepare_store(keys_of("b", 1), req), keys_of("b", 1))
    tier.on_request_finished(req)
    assert_idle(tier)


def test_eviction_holds_the_lock_that_a_lease_takes():
    """A lease that starts while victims are chosen sees the cache after the eviction, never a row that is going.

    Forced with events: the policy, asked for victims, waits until the other thread stands before the lock.
    Mutation: without `with self._leases.lock` in _make_room the lease gets the victim, and the last assertion fails.
    """
    tier = make_tier(1)
    keys = fill(tier, "a", 1)
    asked, leases = threading.Event(), []
    peer = threading.Thread(target=lambda: (asked.set(), leases.append(tier.lease(keys))))
    evict = tier._policy.evict

    def slow_evict(count, is_pinned):
        victims = evict(count, is_pinned)
        peer.start()
        assert asked.wait(5)
        peer.join(0.1)  # without the lock it ends here, with the victim in hand
        return victims

    tier._policy.evict = slow_evict
    req = begin(tier, "r")
    store = tier.prepare_store(keys_of("b", 1), req)
    peer.join(5)
    assert leases[0].keys == ()
    assert store.num_accepted == 1
    tier.complete_store(store)
    tier.on_request_finished(req)
    assert_idle(tier)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_peers_never_see_a_row_change_under_their_lease(policy):
    """Each row carries the key whose store wrote it; while a lease lasts, its rows keep carrying its keys.

    Mutation: `is_held` that always says False makes `torn` non-empty.
    """
    tier, carried, stop, torn = make_tier(16, policy, events=False), {}, threading.Event(), []

    def peer(number: int) -> None:
        while not stop.is_set():
            lease = tier.lease(keys_of("abcd"[number % 4], 6))
            for _ in range(3):
                if any(carried[row] != key for key, row in zip(lease.keys, lease.block_ids, strict=True)):
                    torn.append(lease)
            tier.release(lease)

    peers = [threading.Thread(target=peer, args=(number,)) for number in range(3)]
    for thread in peers:
        thread.start()
    try:
        for step in range(1500):
            req = begin(tier, f"r{step}")
            prepared = tier.prepare_store(keys_of("abcdef"[step % 6], 6), req)
            carried.update(zip(prepared.block_ids, prepared.keys, strict=True))
            tier.complete_store(prepared)
            tier.on_request_finished(req)
            if step % 100 == 99:
                tier.reset_cache()
    finally:
        stop.set()
        for thread in peers:
            thread.join(5)
    assert not torn
    assert_idle(tier)
