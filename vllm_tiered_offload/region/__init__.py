"""The host region: rows of shared memory, handed between the processes of one engine. No vLLM, no torch."""

from vllm_tiered_offload.region.errors import (
    CapacityError,
    RegionClosedError,
    RegionError,
    RegionGoneError,
    RegionMemoryError,
)
from vllm_tiered_offload.region.host_region import HostRegion
from vllm_tiered_offload.region.limits import (
    CAPACITY_SETTING,
    MemoryBudget,
    check_capacity,
    fit_geometry,
    read_memory_budget,
)

__all__ = [
    "CAPACITY_SETTING",
    "CapacityError",
    "HostRegion",
    "MemoryBudget",
    "RegionClosedError",
    "RegionError",
    "RegionGoneError",
    "RegionMemoryError",
    "check_capacity",
    "fit_geometry",
    "read_memory_budget",
]
