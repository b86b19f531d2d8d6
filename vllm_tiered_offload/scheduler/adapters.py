"""What may be kept of a request with a LoRA adapter.

vLLM's block hashes tell adapters apart by name and path, not by their weights, so the same key can mean other bytes
once an adapter was exchanged in place [53495]. An engine that loaded it in place says so with each request; that a file
was replaced between two engines, nobody says. Hence by default: nothing that was computed with an adapter leaves the
process, and nothing at all is kept of one that was loaded in place.
"""

from enum import Enum
from typing import Any


class Keep(Enum):
    """Where chunks of a request may go."""

    NOWHERE = "off"
    IN_MEMORY = "memory"  # the primary tier, which ends with the process
    EVERYWHERE = "everywhere"


def what_to_keep(lora_request: Any | None, setting: str) -> Keep:
    """`lora_request` is vLLM's, None without an adapter; `setting` the one called `lora`."""
    if lora_request is None:
        return Keep.EVERYWHERE
    if getattr(lora_request, "load_inplace", False):
        return Keep.NOWHERE
    return Keep(setting)
