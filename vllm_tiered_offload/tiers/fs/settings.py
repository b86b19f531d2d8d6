"""The filesystem tier's own settings block."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from vllm_tiered_offload.settings import Block, ByteSize


class FsTierSettings(Block):
    """One `{"type": "fs", ...}` block. Sizes are bytes, times are seconds."""

    root: str = Field(description="Directory for the chunks; made if it is not there. Engines may share it.")
    capacity: Annotated[ByteSize, Field(gt=0)] | None = Field(
        default=None,
        description="Bytes that chunks may take there, frames included and whosever they are; without it, as many as"
        " there are. What is not this model's is evicted only when nobody has used it for an hour.",
    )
    min_free: ByteSize | None = Field(
        default=None, description="Bytes that are left free on the device; stores evict, and then pause, before that."
    )
    eviction_policy: str = Field(
        default="lru", description='Which chunks go first: "lru", "arc", or the name of an installed policy.'
    )
    ttl: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Seconds after which a chunk is not used any more and removed."
    )
    scan_period: float = Field(
        default=60.0,
        ge=1,
        description="Seconds between two looks at the whole directory, which find what others stored, evicted and"
        " removed there. A long one is made less often, so that looking takes a twentieth of the time at most.",
    )
    store_threshold: int = Field(
        default=1,
        ge=1,
        description="A chunk is stored when this many requests had it: 2 keeps prompts that never come back off the"
        " disk. With more than 1 every request offers all of its chunks.",
    )
    write_bytes_per_day: Annotated[ByteSize, Field(gt=0)] | None = Field(
        default=None,
        description="Bytes that may be written in a day, so that the device lasts; an hour's share at once at most.",
    )
    # While some threads wait for the interpreter or compute a checksum, rows of others have to be on their way: with 16
    # readers and 32 writers, jobs of 16 small rows took up to a tenth longer. Writers do more for each row.
    read_threads: int = Field(default=64, ge=1, le=256, description="Threads that load; stores never hold them up.")
    write_threads: int = Field(default=96, ge=1, le=256, description="Threads that store.")
    fsync: Literal["none", "data"] = Field(
        default="none",
        description="Whether a chunk is flushed to the device before it becomes visible. Without it a power failure may"
        " cost chunks (the checksum finds them), never correctness.",
    )
    io: Literal["auto", "direct", "buffered"] = Field(
        default="auto",
        description='"direct" goes past the page cache (O_DIRECT) where the filesystem allows it and is buffered'
        ' otherwise; "buffered" uses the page cache, which is fast while it lasts but takes RAM beside the host region,'
        ' where what is hot is already; so "auto" is "direct".',
    )
    keep_on_reset: bool = Field(
        default=False,
        description="Keep using the chunks after a cache reset. Only right if the weights are the same afterwards.",
    )
    on_corrupt: Literal["remove", "quarantine"] = Field(
        default="remove", description="What happens to a file that is not what it should be."
    )
    share_refresh: float = Field(
        default=5.0, ge=0.1, description="Seconds after which a chunk that was not there is looked for again."
    )

    @field_validator("root")
    @classmethod
    def _usable_path(cls, root: str) -> str:
        if not root.strip() or "\0" in root:
            raise PydanticCustomError("path", "the path of a directory")
        return str(Path(root).expanduser().absolute())
