"""The scheduler half: plans stores and loads from plain data. Knows no vLLM, no device and no I/O."""
