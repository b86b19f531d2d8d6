"""vLLM's in-tree filesystem tier, driven directly, and ours beside it: for fs.py."""

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _intree as b
import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload import base as intree_offload
from vllm.v1.kv_offload.tiering.base import TransferJob

from vllm_tiered_offload.contract.fingerprint import FIELDS, Fingerprint
from vllm_tiered_offload.contract.jobs import JobMetadata, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.region import HostRegion
from vllm_tiered_offload.tiers.fs.tier import FsTier

_LAYER_PAGE = 32 * 1024  # bytes of one layer in a row
_job_ids = itertools.count(1)


class Side(ABC):
    """One tier: jobs go in, and it says which have ended."""

    name: str
    rows: np.ndarray  # (row, byte): the region that it moves

    @abstractmethod
    def submit(self, keys: Sequence[OffloadKey], rows: range, *, load: bool) -> None:
        """One job."""

    @abstractmethod
    def num_finished(self) -> int:
        """Jobs that ended since the last call; all of them well."""

    @abstractmethod
    def path(self, key: OffloadKey) -> Path:
        """A chunk's file."""

    @abstractmethod
    def shutdown(self) -> None: ...


class InTreeFs(Side):
    """vLLM's own, with its own region."""

    name = "in-tree"

    def __init__(self, model: str, root: str, num_rows: int, row_bytes: int) -> None:
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": num_rows * row_bytes,
                "secondary_tiers": [{"type": "fs", "root_dir": root}],
            },
        }
        self._connector: Any = KVConnectorFactory.create_connector(
            b.vllm_config(model, transfer), KVConnectorRole.SCHEDULER, _kv_cache_config(row_bytes)
        )
        manager = self._connector.connector_scheduler.manager
        self._tier = manager.secondary_tiers[0]
        self.rows = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        assert self.rows.shape == (num_rows, row_bytes), self.rows.shape

    def submit(self, keys: Sequence[OffloadKey], rows: range, *, load: bool) -> None:
        number = next(_job_ids)
        job = TransferJob(number, list(keys), np.arange(rows.start, rows.stop), load, _intree_request(number))
        (self._tier.submit_load if load else self._tier.submit_store)(job)

    def num_finished(self) -> int:
        results = list(self._tier.get_finished_jobs())
        assert all(result.success for result in results)
        return len(results)

    def path(self, key: OffloadKey) -> Path:
        return Path(self._tier.file_mapper.get_file_name(key))

    def shutdown(self) -> None:
        del self.rows
        self._connector.shutdown()


class OurFs(Side):
    """Ours, over a region that somebody else closes."""

    name = "ours"

    def __init__(self, root: str, region: HostRegion, **settings: Any) -> None:
        self.rows = region.array
        self.tier = FsTier.from_settings({"root": root, **settings}, engine_id=f"bench-{os.getpid()}")
        self.tier.bind_region(region.rows(), region.geometry, Fingerprint.of(dict.fromkeys(FIELDS, "bench")))

    def submit(self, keys: Sequence[OffloadKey], rows: range, *, load: bool) -> None:
        number = next(_job_ids)
        job = JobMetadata(number, tuple(keys), tuple(rows), load, ReqContext(f"r{number}"))
        (self.tier.submit_load if load else self.tier.submit_store)(job)

    def num_finished(self) -> int:
        results = list(self.tier.get_finished_jobs())
        assert all(result.success for result in results), self.tier.get_stats()
        return len(results)

    def path(self, key: OffloadKey) -> Path:
        return Path(self.tier._holdings.namespace.file_path(key))

    def shutdown(self) -> None:
        del self.rows
        self.tier.shutdown()


def _intree_request(number: int) -> Any:
    return intree_offload.ReqContext(req_id=f"r{number}")


def _kv_cache_config(row_bytes: int) -> KVCacheConfig:
    """One full-attention group, one block of which is a row."""
    spec = FullAttentionSpec(block_size=b.BLOCK, num_kv_heads=8, head_size=64, dtype=torch.bfloat16)
    assert spec.page_size_bytes == _LAYER_PAGE
    names = [f"model.layers.{index}.self_attn.attn" for index in range(row_bytes // _LAYER_PAGE)]
    return KVCacheConfig(num_blocks=1 << 16, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
