"""The manager that the scheduler half talks to, over one primary and any number of secondary tiers."""
