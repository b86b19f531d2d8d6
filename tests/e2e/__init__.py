"""End-to-end tests: a real `vllm serve`, real HTTP clients, and a tiny model that the tests make."""
