"""Eviction policies of the CPU tier, found through the entry point group `vllm_tiered_offload.eviction_policies`."""
