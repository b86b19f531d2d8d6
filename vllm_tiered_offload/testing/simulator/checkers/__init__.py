"""One checker per invariant that shows from outside the connector, named after its id in DESIGN.

The bytes themselves are checked by the runner on every read, calls to files and sockets by `guard` and `hooks`.
"""

from vllm_tiered_offload.testing.simulator.checkers.base import Checker, Watchers
from vllm_tiered_offload.testing.simulator.checkers.blocks import D1WrittenSlots, D2PinnedBlocks
from vllm_tiered_offload.testing.simulator.checkers.requests import (
    D7OneReceive,
    L1Lifecycle,
    L2FinalStores,
    V1BoundedWaiting,
    V5NothingLeft,
)
from vllm_tiered_offload.testing.simulator.checkers.rows import D4RowReuse, D8ReadableRows, L6Reset
from vllm_tiered_offload.testing.simulator.checkers.tiers import (
    D4TierRows,
    D6FailedBlocks,
    L3TierLifecycle,
    V2Promotions,
    V4Contained,
    V6OwnPrefix,
)

ALL_CHECKERS: tuple[type[Checker], ...] = (
    L1Lifecycle,
    L2FinalStores,
    L3TierLifecycle,
    L6Reset,
    D1WrittenSlots,
    D2PinnedBlocks,
    D4RowReuse,
    D4TierRows,
    D6FailedBlocks,
    D7OneReceive,
    D8ReadableRows,
    V1BoundedWaiting,
    V2Promotions,
    V4Contained,
    V5NothingLeft,
    V6OwnPrefix,
)

__all__ = ["ALL_CHECKERS", "Checker", "Watchers"]
