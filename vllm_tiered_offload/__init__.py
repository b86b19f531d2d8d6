"""vllm-tiered-offload: a KV-cache offloading connector for vLLM.

What tier authors may import is exported here. Importing this package imports neither vLLM nor torch.
"""

from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.contract.geometry import GroupGeometry, RegionGeometry
from vllm_tiered_offload.contract.jobs import (
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadPolicy,
    PreparedLoad,
    PreparedStore,
    ReqContext,
    RequestOffloadingContext,
)
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import (
    Lease,
    OffloadingManager,
    PrimaryTier,
    ResidencyEvent,
    SecondaryTierManager,
    StoreOffer,
)

__version__ = "0.1.0"

__all__ = [
    "Fingerprint",
    "GroupGeometry",
    "JobMetadata",
    "JobResult",
    "Lease",
    "LookupResult",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingManager",
    "PreparedLoad",
    "PreparedStore",
    "PrimaryTier",
    "RegionGeometry",
    "ReqContext",
    "RequestOffloadingContext",
    "ResidencyEvent",
    "SecondaryTierManager",
    "StoreOffer",
    "__version__",
]
