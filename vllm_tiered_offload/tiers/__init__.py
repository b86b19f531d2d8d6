"""Tiers: the registry that finds them, and the built-in ones."""
