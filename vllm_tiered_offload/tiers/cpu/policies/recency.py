"""Keys in the order in which they should be evicted, shared by the policies.

A key's rank is (access, -position): the access that used it last, and how far down that access's prefix it lies. The
lowest rank goes first, so an older access goes before a newer one, and within an access the tail before the head.

Theory of operation. Keys of one access sit in one group, a dict in prefix order, so that the tail is `popitem()`;
groups sit in one ordered dict, oldest first. Everything is O(1) as long as no key is pinned and every access appends
to a group that is still listed. Two things do not fit that scheme, and go through a heap of exact ranks instead:

- A pinned key that a search for victims meets is set aside, so that it is met once per pin and never scanned again.
  When it is unpinned it returns with the rank it had, not with a new one: completion order never becomes eviction
  order.
- An access that is still open may lose all its keys, to eviction or to newer accesses. Its empty group is unlisted
  when the search passes it; a key that it adds later has a rank older than the groups that are listed.

Keys point to accesses by number, not to groups: a dict of bytes to ints is nothing that Python's garbage collector
follows, and one of a million keys to objects holds up whoever is under way for 15 ms, each time.

The heap deletes lazily: an entry whose key has moved on is popped when its rank comes up, which is soon, because
whatever is in the heap is older than nearly everything that is listed. A heap that is stale for the most part all the
same (keys that keep failing while nothing is evicted) is swept; that costs as much as the entries it drops.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from vllm_tiered_offload.contract.keys import OffloadKey

Rank = tuple[int, int]  # (access, -position)

# Stale heap entries that are tolerated beside as many as there are live ones.
_STALE_ALLOWANCE = 1024


class _Group:
    """Keys last used by one access."""

    __slots__ = ("access", "is_listed", "is_open", "keys", "next_position")

    def __init__(self, access: int) -> None:
        self.access = access
        # Key -> position, ascending. Holds the keys of this group that are neither aside nor returned.
        self.keys: dict[OffloadKey, int] = {}
        self.next_position = 0
        self.is_open = True
        self.is_listed = True


class RecencyOrder:
    """Keys by rank. Each key is in exactly one of: its group's `keys`, `_aside`, `_returned`."""

    def __init__(self) -> None:
        # Every key held -> the access that used it last.
        self._access_of: dict[OffloadKey, int] = {}
        # Listed groups by access, ascending. An empty one is open. A group with keys is listed.
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        # Open accesses, listed or not.
        self._open: dict[int, _Group] = {}
        # Pinned keys that a search has met, with their rank.
        self._aside: dict[OffloadKey, Rank] = {}
        # Keys whose rank cannot be told from a group any more. Each has its entry in `_heap`, (*rank, key).
        self._returned: dict[OffloadKey, Rank] = {}
        # Entries that differ from `_returned` are stale.
        self._heap: list[tuple[int, int, OffloadKey]] = []

    def __contains__(self, key: object) -> bool:
        return key in self._access_of

    def __len__(self) -> int:
        return len(self._access_of)

    def access_of(self, key: OffloadKey) -> int | None:
        """The access that used `key` last; None when it is not held."""
        return self._access_of.get(key)

    def rank_of(self, key: OffloadKey) -> Rank:
        """The rank of a held key (for checks and tests)."""
        access = self._access_of[key]
        group = self._groups.get(access)
        position = None if group is None else group.keys.get(key)
        if position is not None:
            return access, -position
        return self._aside.get(key) or self._returned[key]

    def open(self, access: int) -> None:
        """An access begins; its number is above all earlier ones."""
        self._open[access] = self._groups[access] = _Group(access)

    def close(self, access: int) -> None:
        """The access places no more keys."""
        group = self._open.pop(access)
        group.is_open = False
        if group.is_listed and not group.keys:
            del self._groups[access]

    def place(self, key: OffloadKey, access: int) -> None:
        """Put a key at the end of an open access, taking it from where it is if it is held."""
        old = self._access_of.get(key)
        if old is not None:
            self._unlink(key, old)
        group = self._open[access]
        position = group.next_position
        group.next_position = position + 1
        self._access_of[key] = access
        if group.is_listed:
            group.keys[key] = position
        else:
            self._return(key, (access, -position))

    def insert(self, keys: Sequence[OffloadKey], access: int) -> None:
        """Place those that are not held. A held key of this access behind a new one moves behind it."""
        access_of, mine = self._access_of, self._open[access]
        placed = False
        for key in keys:
            last = access_of.get(key)
            if last is None and mine.is_listed:  # by far the most frequent case: place(), spelt out
                access_of[key] = access
                mine.keys[key] = mine.next_position
                mine.next_position += 1
                placed = True
            elif last is None or (placed and last == access):
                self.place(key, access)
                placed = True

    def touch(self, keys: Sequence[OffloadKey], access: int) -> None:
        """Raise held keys to `access` where that is newer. What is behind a raised key stays behind it."""
        access_of = self._access_of
        moved = False
        for key in keys:
            last = access_of.get(key)
            if last is None:
                continue
            if last < access or (moved and last == access):
                self.place(key, access)
                moved = True

    def remove(self, key: OffloadKey) -> None:
        """Forget a held key."""
        self._unlink(key, self._access_of.pop(key))

    def _unlink(self, key: OffloadKey, access: int) -> None:
        """Take a key from where it is but leave its entry in `_access_of`, which `place` overwrites: taking it out and
        putting it back would make the dict copy itself, all keys in one call, now and then."""
        group = self._groups.get(access)
        if group is None or group.keys.pop(key, None) is None:
            if self._aside.pop(key, None) is None:
                del self._returned[key]
        elif not group.keys and not group.is_open:
            del self._groups[access]

    def unpinned(self, keys: Iterable[OffloadKey]) -> None:
        """Consider these keys again if they had been set aside."""
        aside = self._aside
        if not aside:
            return
        for key in keys:
            rank = aside.pop(key, None)
            if rank is not None:
                self._return(key, rank)

    def pop_victims(self, count: int, is_pinned: Callable[[OffloadKey], bool]) -> list[OffloadKey]:
        """Remove and return up to `count` unpinned keys, lowest rank first; fewer only when no other one is held."""
        victims: list[OffloadKey] = []
        while len(victims) < count:
            front = self._front()
            if self._heap_is_next(front):
                self._take_returned(victims, is_pinned)
            elif front is not None:
                self._take_tail(front, victims, count, is_pinned)
            else:
                break
        return victims

    def _take_returned(self, victims: list[OffloadKey], is_pinned: Callable[[OffloadKey], bool]) -> None:
        """Take the heap's first entry as a victim, or set its key aside."""
        access, negative, key = heapq.heappop(self._heap)
        del self._returned[key]
        if is_pinned(key):
            self._aside[key] = (access, negative)
        else:
            del self._access_of[key]
            victims.append(key)

    def _take_tail(
        self, front: _Group, victims: list[OffloadKey], count: int, is_pinned: Callable[[OffloadKey], bool]
    ) -> None:
        """Take victims from the tail of `front`; one step only while the heap has something to say."""
        keys, access_of = front.keys, self._access_of
        while keys and len(victims) < count:
            key, position = keys.popitem()
            if is_pinned(key):
                self._aside[key] = (front.access, -position)
            else:
                del access_of[key]
                victims.append(key)
            if self._heap:
                break
        if not keys and not front.is_open:
            del self._groups[front.access]

    def _front(self) -> _Group | None:
        """The oldest group that has keys. Empty ones before it are unlisted: each costs one look, ever."""
        groups = self._groups
        while groups:
            access = next(iter(groups))
            group = groups[access]
            if group.keys:
                return group
            group.is_listed = False
            del groups[access]
        return None

    def _heap_is_next(self, front: _Group | None) -> bool:
        """Whether the heap's first entry goes before `front`'s tail. Drops stale entries on top."""
        heap, returned = self._heap, self._returned
        while heap:
            access, negative, key = heap[0]
            if returned.get(key) != (access, negative):
                heapq.heappop(heap)
                continue
            if front is None or access < front.access:
                return True
            return access == front.access and -negative > next(reversed(front.keys.values()))
        return False

    def _return(self, key: OffloadKey, rank: Rank) -> None:
        returned, heap = self._returned, self._heap
        returned[key] = rank
        heapq.heappush(heap, (*rank, key))
        if len(heap) > 2 * len(returned) + _STALE_ALLOWANCE:
            self._heap = [(*rank, key) for key, rank in returned.items()]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Assert every invariant above. O(n): for tests."""
        listed = {key for group in self._groups.values() for key in group.keys}
        assert len(listed) == sum(len(group.keys) for group in self._groups.values())
        assert listed.isdisjoint(self._aside)
        assert listed.isdisjoint(self._returned)
        assert self._aside.keys().isdisjoint(self._returned)
        assert listed | self._aside.keys() | self._returned.keys() == self._access_of.keys()
        assert list(self._groups) == sorted(self._groups)
        for access, group in self._groups.items():
            assert group.is_listed
            assert group.keys or group.is_open
            assert group.access == access
            assert list(group.keys.values()) == sorted(group.keys.values())
            assert all(self._access_of[key] == access for key in group.keys)
        assert {(*rank, key) for key, rank in self._returned.items()} <= set(self._heap)
