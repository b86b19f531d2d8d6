"""The command `vllm-tiered-offload`. Imports neither vLLM nor torch, so that it answers at once."""
