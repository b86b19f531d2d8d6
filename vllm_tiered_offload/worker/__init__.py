"""The worker half: KV tensor layout, copy plans, copy engines. Runs with torch and numpy alone, without vLLM."""
