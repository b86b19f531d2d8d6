"""What every eviction policy must do; a policy's test file is a subclass with a `make` method."""

import random

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.cpu.policies.base import EvictionPolicy


def keys_of(name: str, count: int, start: int = 0) -> list[OffloadKey]:
    """Keys of one prefix, head first."""
    return [OffloadKey(f"{name}{i:03d}".encode()) for i in range(start, start + count)]


def nobody(_: OffloadKey) -> bool:
    """No key is pinned."""
    return False


class EvictionPolicyContract:
    """Subclass it and say how to make the policy."""

    def make(self, capacity: int) -> EvictionPolicy:
        raise NotImplementedError

    def test_holds_what_was_inserted_until_it_is_removed_or_evicted(self):
        policy, keys = self.make(8), keys_of("a", 4)
        policy.open(1)
        policy.insert(keys, 1)
        policy.insert(keys, 1)
        assert len(policy) == 4
        assert all(key in policy for key in keys)
        policy.remove([keys[1], OffloadKey(b"unknown")])
        assert keys[1] not in policy
        victims = policy.evict(10, nobody)
        assert sorted(victims) == [keys[0], keys[2], keys[3]]
        assert len(policy) == 0
        assert policy.evict(1, nobody) == []

    def test_tail_goes_before_head_within_one_access(self):
        policy, keys = self.make(8), keys_of("a", 6)
        policy.open(1)
        policy.insert(keys[:2], 1)
        policy.insert(keys[2:], 1)
        assert policy.evict(6, nobody) == keys[::-1]

    def test_a_head_stored_again_still_goes_after_its_tail(self):
        policy, keys = self.make(8), keys_of("a", 4)
        policy.open(1)
        policy.insert(keys, 1)
        policy.remove(keys[:2])
        policy.insert(keys, 1)
        assert policy.evict(4, nobody) == keys[::-1]

    def test_older_access_goes_first(self):
        policy = self.make(8)
        for access, name in enumerate("abc", start=1):
            policy.open(access)
            policy.insert(keys_of(name, 2), access)
            policy.close(access)
        assert policy.evict(4, nobody) == [*keys_of("a", 2)[::-1], *keys_of("b", 2)[::-1]]

    def test_a_key_used_again_outlives_one_that_was_not(self):
        policy = self.make(8)
        for access, name in enumerate("ab", start=1):
            policy.open(access)
            policy.insert(keys_of(name, 2), access)
        policy.open(3)
        policy.touch(keys_of("a", 2), 3)
        assert policy.evict(2, nobody) == keys_of("b", 2)[::-1]

    def test_repeated_touches_of_one_access_change_nothing(self):
        """Case 22. Mutation: `<=` for `<` in RecencyOrder.touch makes the second assertion fail."""
        once, often = self.make(8), self.make(8)
        for policy in (once, often):
            for access, name in enumerate("ab", start=1):
                policy.open(access)
                policy.insert(keys_of(name, 3), access)
        for _ in range(100):
            often.touch(keys_of("a", 3)[1:], 1)
            often.touch(keys_of("a", 1), 1)
        expected = once.evict(6, nobody)
        assert often.evict(6, nobody) == expected

    def test_pinned_keys_stay_and_return_to_their_place(self):
        """Unpinning order is not eviction order. Mutation: `_return` with rank (0, 0) makes the last assertion fail."""
        policy, old, new = self.make(8), keys_of("a", 4), keys_of("b", 2)
        policy.open(1)
        policy.insert(old, 1)
        policy.open(2)
        policy.insert(new, 2)
        pinned = set(old[1:])
        assert policy.evict(2, pinned.__contains__) == [old[0], new[1]]
        for key in old[:0:-1]:  # tail first: the trap is that the head would then be the most stale one
            policy.unpinned([key])
        for key in old[1:]:
            policy.unpinned([key])
        assert policy.evict(4, nobody) == [old[3], old[2], old[1], new[0]]

    def test_nothing_changes_when_everything_is_pinned(self):
        policy, keys = self.make(8), keys_of("a", 4)
        policy.open(1)
        policy.insert(keys, 1)
        assert policy.evict(2, lambda _: True) == []
        assert len(policy) == 4
        policy.unpinned(keys)
        assert policy.evict(4, nobody) == keys[::-1]

    def test_a_pinned_key_is_met_once(self):
        """No search scans pins again. Mutation: looking at all of `_aside` again in each pop_victims fails here."""
        policy, pinned = self.make(1100), keys_of("a", 999)
        policy.open(1)
        policy.insert(pinned, 1)
        policy.open(2)
        policy.insert(keys_of("b", 100), 2)
        met = []

        def is_pinned(key):
            met.append(key)
            return key.startswith(b"a")

        for _ in range(100):
            assert len(policy.evict(1, is_pinned)) == 1
        assert len(met) <= 999 + 100 + 2

    def test_tail_of_an_old_open_access_goes_before_its_shared_head(self):
        """Two requests share a prefix; what the first one adds later is older than the prefix it hangs on."""
        policy, head = self.make(16), keys_of("a", 2)
        policy.open(1)
        policy.insert(head, 1)
        policy.open(2)
        policy.touch(head, 2)
        policy.insert(keys_of("x", 1), 2)
        policy.evict(0, nobody)
        policy.insert(keys_of("y", 2), 1)
        order = policy.evict(5, nobody)
        assert order.index(keys_of("y", 2)[1]) < order.index(keys_of("y", 1)[0]) < order.index(head[0])

    def test_clear_forgets_keys_and_accesses(self):
        policy = self.make(8)
        policy.open(1)
        policy.insert(keys_of("a", 4), 1)
        policy.clear()
        assert len(policy) == 0
        policy.open(2)
        policy.insert(keys_of("a", 2), 2)
        assert policy.evict(4, nobody) == keys_of("a", 2)[::-1]

    def test_bookkeeping_stays_bounded(self):
        """A long life with few rows leaves no more than a few entries for each row, whatever happened."""
        rng, capacity = random.Random(7), 16
        policy = self.make(capacity)
        for access in range(1, 3000):
            policy.open(access)
            name = rng.choice("abcdefgh")
            keys = keys_of(name, rng.randint(1, 8))
            policy.touch(keys, access)
            new = [key for key in keys if key not in policy]
            lacking = len(policy) + len(new) - capacity
            pinned = {key for key in keys if key in policy}
            if lacking > 0 and len(policy.evict(lacking, pinned.__contains__)) < lacking:
                new = []
            policy.unpinned(pinned)
            policy.insert(new, access)
            if rng.random() < 0.2:
                policy.remove(new)
            policy.close(access)
            assert len(policy) <= capacity
        assert self.entries(policy) < 3000

    def entries(self, policy: EvictionPolicy) -> int:
        """Entries of every collection reachable from the policy."""
        total, todo, seen = 0, [policy], set()
        while todo:
            item = todo.pop()
            if id(item) in seen or isinstance(item, bytes | str | int | float | type):
                continue
            seen.add(id(item))
            if isinstance(item, dict):
                total += len(item)
                todo.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                total += len(item)
                todo.extend(item)
            elif hasattr(item, "__dict__"):
                todo.extend(vars(item).values())
            else:
                todo.extend(getattr(item, name) for name in getattr(type(item), "__slots__", ()))
        return total
