"""vLLM moves recurrent state to the next block with a Triton kernel, and Triton has no CPU backend in its wheel.

Where a block's state goes and when is vLLM's; this is the memcpy alone.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def replace_kernel() -> None:
    """Entry point of vLLM's plugins, called in every process."""
    from vllm.v1.worker import mamba_utils

    mamba_utils.batch_memcpy = copy_each


def copy_each(src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor) -> None:
    """Addresses and lengths in bytes, one of each a copy."""
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
