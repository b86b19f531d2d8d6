"""The built-in policies through the contract, and what is ARC's own."""

import gc
import random

import pytest
from policy_contract import EvictionPolicyContract, keys_of, nobody

from vllm_tiered_offload.tiers.cpu.policies.arc import ArcPolicy
from vllm_tiered_offload.tiers.cpu.policies.lru import LruPolicy
from vllm_tiered_offload.tiers.cpu.policies.recency import RecencyOrder


class TestLru(EvictionPolicyContract):
    def make(self, capacity):
        return LruPolicy(capacity)


class TestArc(EvictionPolicyContract):
    def make(self, capacity):
        return ArcPolicy(capacity)


class TestArcAlone:
    def test_a_scan_does_not_flush_what_was_used_twice(self):
        policy, hot = ArcPolicy(8), keys_of("hot", 4)
        policy.open(1)
        policy.insert(hot, 1)
        policy.open(2)
        policy.touch(hot, 2)
        for access in range(3, 50):
            policy.open(access)
            if len(policy) == 8:
                policy.evict(1, nobody)
            policy.insert([keys_of("scan", 1, access)[0]], access)
            policy.close(access)
        assert all(key in policy for key in hot)

    def test_one_request_does_not_make_a_key_frequent(self):
        """Case 22: what one request inserts and touches a hundred times stays in T1."""
        policy, keys = ArcPolicy(8), keys_of("a", 4)
        policy.open(1)
        for n in range(100):
            policy.insert(keys[: n // 25 + 1], 1)
            policy.touch(keys[: n // 25 + 1], 1)
        assert len(policy._t1) == 4
        assert len(policy._t2) == 0

    def test_t1_gives_way_when_t2_is_pinned_and_the_other_way_round(self):
        """Case 22. Mutation: a loop over `first` alone in _replace fails on both."""
        for pinned_name, other in (("a", "b"), ("b", "a")):
            policy = ArcPolicy(4)
            policy.open(1)
            policy.insert(keys_of("a", 2), 1)
            policy.open(2)
            policy.touch(keys_of("a", 2), 2)
            policy.insert(keys_of("b", 2), 2)
            victims = policy.evict(2, lambda key, name=pinned_name: key.startswith(name.encode()))
            assert victims == keys_of(other, 2)[::-1]

    def test_a_ghost_that_returns_is_frequent_and_moves_the_target(self):
        policy = ArcPolicy(4)
        policy.open(1)
        policy.insert(keys_of("a", 2), 1)
        policy.open(2)
        policy.touch(keys_of("a", 1), 2)
        assert policy.evict(1, nobody) == [keys_of("a", 2)[1]]
        policy.insert([keys_of("a", 2)[1]], 2)
        assert policy._target == 1.0
        assert len(policy._t2) == 2

    @pytest.mark.parametrize("seed", range(3))
    def test_the_papers_bounds_hold(self, seed):
        rng, capacity = random.Random(seed), 10
        policy = ArcPolicy(capacity)
        for access in range(1, 2000):
            policy.open(access)
            key = keys_of("k", 1, min(int(rng.expovariate(0.05)), 200))[0]
            policy.touch([key], access)
            if key not in policy and len(policy) == capacity:
                policy.evict(1, nobody)
            policy.insert([key], access)
            policy.close(access)
            assert len(policy._t1) + len(policy._b1) <= capacity
            assert len(policy) + len(policy._b1) + len(policy._b2) <= 2 * capacity
            assert not any(key in policy for key in (*policy._b1, *policy._b2))
            assert 0 <= policy._target <= capacity


@pytest.mark.parametrize("seed", range(8))
def test_recency_order_is_the_sorted_order_of_ranks(seed):
    """Every victim is the unpinned key of lowest rank, through any mix of pins, shared prefixes and late appends.

    Mutation: returning False from `_heap_is_next` when `access == front.access` fails in the victims' assertion.
    """
    rng, order = random.Random(seed), RecencyOrder()
    pinned, open_accesses, last = set(), [], 0
    for _ in range(3000):
        held = list(order._access_of)
        action = rng.random()
        if action < 0.2 or not open_accesses:
            last += 1
            order.open(last)
            open_accesses.append(last)
        elif action < 0.3 and len(open_accesses) > 3:
            order.close(open_accesses.pop(rng.randrange(len(open_accesses))))
        elif action < 0.5:
            start = rng.randrange(8)
            order.insert(keys_of(rng.choice("abc"), 8)[start : start + 3], rng.choice(open_accesses))
        elif action < 0.6:
            order.touch(keys_of(rng.choice("abc"), 8)[: rng.randrange(9)], rng.choice(open_accesses))
        elif action < 0.7 and held:
            pinned.add(rng.choice(held))
        elif action < 0.8 and pinned:
            key = rng.choice(sorted(pinned))
            pinned.discard(key)
            order.unpinned([key])
        elif action < 0.85 and held:
            key = rng.choice(held)
            order.remove(key)
            pinned.discard(key)
        else:
            count = rng.randrange(4)
            ranked = sorted((key for key in held if key not in pinned), key=order.rank_of)
            assert order.pop_victims(count, pinned.__contains__) == ranked[:count]
        order.check()


class TestRecencyOrder:
    def test_a_garbage_collection_does_not_look_at_the_keys(self):
        """With a million of them it would hold up the scheduler's thread for 15 ms, in whatever call it falls.

        Made to fail by a dict of keys to groups.
        """
        order = RecencyOrder()
        for access in range(1, 4):
            order.open(access)
            for count in (1, 100):
                order.insert(keys_of(f"{access} {count}", count), access)
        order.touch(keys_of("1 100", 50), 3)
        order.close(1)
        groups = list(order._groups.values())
        assert len(groups) == 3
        assert not any(gc.is_tracked(held) for held in (order._access_of, *(group.keys for group in groups)))
