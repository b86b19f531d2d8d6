"""One checker per invariant, named after its id in DESIGN. Each says what it does not check.

The bytes themselves are checked when a load has ended and by the runner on every read, calls to files and sockets by
`guard` and `hooks`. Two invariants do not show here: copies run between steps, so no order of streams (D3: the fake
device of tests/worker/test_copy_driver.py), and in one process, so nothing is killed (V7:
tests/region/test_processes.py).
"""

from vllm_tiered_offload.testing.simulator.checkers.base import Checker, Watchers
from vllm_tiered_offload.testing.simulator.checkers.blocks import D1WrittenSlots, D2PinnedBlocks, LoadedBytes
from vllm_tiered_offload.testing.simulator.checkers.cascades import L4CascadesFirst, L5WholeRequests
from vllm_tiered_offload.testing.simulator.checkers.offers import D5OwnKeys, L7NothingSkipped, V3PartialStores
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
    L4CascadesFirst,
    L5WholeRequests,
    L6Reset,
    L7NothingSkipped,
    D1WrittenSlots,
    D2PinnedBlocks,
    D4RowReuse,
    D4TierRows,
    D5OwnKeys,
    D6FailedBlocks,
    D7OneReceive,
    D8ReadableRows,
    V1BoundedWaiting,
    V2Promotions,
    V3PartialStores,
    V4Contained,
    V5NothingLeft,
    V6OwnPrefix,
    LoadedBytes,
)

__all__ = ["ALL_CHECKERS", "Checker", "Watchers"]
