"""Errors of the tiers room."""


class ContractError(RuntimeError):
    """A caller broke a tier's contract: a handle completed twice or never handed out, a request never announced."""


class RegistryError(ValueError):
    """A tier or policy cannot be had by that name. The text is one line and says what to do."""
