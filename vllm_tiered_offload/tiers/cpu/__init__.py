"""The primary tier: rows of the shared host region."""
