"""Vocabulary shared by every room: no vLLM, no device, no I/O."""
