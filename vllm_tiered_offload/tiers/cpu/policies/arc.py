"""ARC: N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.

T1 holds keys that one request has used, T2 those that at least two have; B1 and B2 remember the names of what was
evicted from each. A name that comes back moves the target size of T1 towards the list it was evicted from. Two things
differ from the paper: an access is a whole request (V6), and a list whose keys are all pinned gives way to the other.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.cpu.policies.base import EvictionPolicy
from vllm_tiered_offload.tiers.cpu.policies.recency import RecencyOrder


class ArcPolicy(EvictionPolicy):
    """Balances recency against frequency. A scan of prompts that never return does not flush those that do."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        # A held key is in exactly one of _t1 and _t2; |_t1| + |_t2| <= capacity.
        self._t1 = RecencyOrder()
        self._t2 = RecencyOrder()
        # Evicted names, oldest first; none is held. |_t1| + |_b1| <= capacity and all four together <= 2 * capacity.
        self._b1: OrderedDict[OffloadKey, None] = OrderedDict()
        self._b2: OrderedDict[OffloadKey, None] = OrderedDict()
        # The paper's p, 0 <= _target <= capacity: keys that T1 should hold.
        self._target = 0.0

    def __contains__(self, key: object) -> bool:
        return key in self._t1 or key in self._t2

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def open(self, access: int) -> None:
        self._t1.open(access)
        self._t2.open(access)

    def close(self, access: int) -> None:
        self._t1.close(access)
        self._t2.close(access)

    def insert(self, keys: Sequence[OffloadKey], access: int) -> None:
        t1, t2 = self._t1, self._t2
        placed = False
        for key in keys:
            owner = t1.access_of(key)
            if owner is not None:
                if placed and owner == access:
                    t1.place(key, access)
                continue
            owner = t2.access_of(key)
            if owner is not None:
                if placed and owner == access:
                    t2.place(key, access)
                continue
            (t2 if self._recall(key) else t1).place(key, access)
            placed = True
        self._trim_ghosts()

    def touch(self, keys: Sequence[OffloadKey], access: int) -> None:
        t1, t2 = self._t1, self._t2
        for key in keys:
            owner = t1.access_of(key)
            if owner is not None and owner != access:
                t1.remove(key)
                t2.place(key, access)
        # Raises what was in T2 already, and puts those just moved where they belong between them.
        t2.touch(keys, access)

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            if key in self._t1:
                self._t1.remove(key)
            elif key in self._t2:
                self._t2.remove(key)

    def access_of(self, key: OffloadKey) -> int | None:
        owner = self._t1.access_of(key)
        return self._t2.access_of(key) if owner is None else owner

    def evict(self, count: int, is_pinned: Callable[[OffloadKey], bool]) -> list[OffloadKey]:
        victims: list[OffloadKey] = []
        while len(victims) < count:
            key = self._replace(is_pinned)
            if key is None:
                break
            victims.append(key)
        self._trim_ghosts()
        return victims

    def unpinned(self, keys: Iterable[OffloadKey]) -> None:
        keys = list(keys)
        self._t1.unpinned(keys)
        self._t2.unpinned(keys)

    def _recall(self, key: OffloadKey) -> bool:
        """Whether the key was evicted not long ago; adapts the target if so."""
        b1, b2 = self._b1, self._b2
        if key in b1:
            self._target = min(float(self._capacity), self._target + max(1.0, len(b2) / len(b1)))
            del b1[key]
            return True
        if key in b2:
            self._target = max(0.0, self._target - max(1.0, len(b1) / len(b2)))
            del b2[key]
            return True
        return False

    def _replace(self, is_pinned: Callable[[OffloadKey], bool]) -> OffloadKey | None:
        """The paper's REPLACE, with the other list as the fallback."""
        first, second = (self._t1, self._b1), (self._t2, self._b2)
        if not len(self._t1) or len(self._t1) <= self._target:
            first, second = second, first
        for order, ghosts in (first, second):
            for key in order.pop_victims(1, is_pinned):
                ghosts[key] = None
                return key
        return None

    def _trim_ghosts(self) -> None:
        capacity, b1, b2 = self._capacity, self._b1, self._b2
        while b1 and len(self._t1) + len(b1) > capacity:
            b1.popitem(last=False)
        while b2 and len(self) + len(b1) + len(b2) > 2 * capacity:
            b2.popitem(last=False)
