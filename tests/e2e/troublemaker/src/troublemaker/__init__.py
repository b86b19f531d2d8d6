"""Trouble on order, installed beside vllm-tiered-offload as any third party's package is."""


def make_copies_fail() -> None:
    """Entry point of vLLM's plugins, called in every process: the workers then build the copy engine that fails."""
    from troublemaker.copies import TroubledCopyEngine
    from vllm_tiered_offload.connector import worker_half

    worker_half.HostCopyEngine = TroubledCopyEngine
