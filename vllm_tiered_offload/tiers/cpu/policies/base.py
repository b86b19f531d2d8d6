"""What the CPU tier asks of an eviction policy.

The tier owns rows and pins; a policy owns nothing but an order over the keys that have a row. It learns of keys in
batches, and is asked for victims one batch at a time.

*Access.* A request is one access, however often it touches a key, and however many chunks it adds while it decodes
(V6). The tier numbers accesses upwards, opens one when a request first uses a key, and closes it when the request ends.

*Prefix order.* Keys of one call come in prefix order, and later calls of one access continue the prefix. Within an
access the tail is evicted before the head, whatever the order in which stores complete.

*Pins.* Pinning and unpinning are not reported one by one. `evict` is handed a predicate; a pinned key that it meets
may be set aside, so that no later call meets it again, until `unpinned` names it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from vllm_tiered_offload.contract.keys import OffloadKey


class EvictionPolicy(ABC):
    """An order over resident keys. Called from the scheduler thread only; must not block or raise."""

    @abstractmethod
    def __init__(self, capacity: int) -> None:
        """`capacity` is the number of rows, the most keys that will be held at a time."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether `key` is held."""

    @abstractmethod
    def __len__(self) -> int:
        """How many keys are held."""

    @abstractmethod
    def open(self, access: int) -> None:
        """A new access begins. Numbers only grow."""

    @abstractmethod
    def close(self, access: int) -> None:
        """No more insert or touch for this access; its keys stay."""

    @abstractmethod
    def insert(self, keys: Sequence[OffloadKey], access: int) -> None:
        """Hold those of `keys` that are not held yet. The held ones between them are context for the prefix order."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], access: int) -> None:
        """`access` uses `keys`; those that are not held are skipped. A repetition by one access changes nothing."""

    @abstractmethod
    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Forget `keys` without a trace: they never became readable, or cannot be read. Unknown ones are skipped."""

    @abstractmethod
    def access_of(self, key: OffloadKey) -> int | None:
        """The access that used `key` last; None when the key is not held."""

    @abstractmethod
    def evict(self, count: int, is_pinned: Callable[[OffloadKey], bool]) -> list[OffloadKey]:
        """Give up and return up to `count` keys that are not pinned, in the order in which they go.

        Fewer than `count` only when no other unpinned key is held. Changes nothing when there is none.
        """

    @abstractmethod
    def unpinned(self, keys: Iterable[OffloadKey]) -> None:
        """Pins on `keys` have ended; some may be pinned still, or not held at all."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every key and everything learnt. Open accesses are closed."""
