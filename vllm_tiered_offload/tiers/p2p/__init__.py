"""The peer tier: KV rows of another engine are pulled instead of computed."""
