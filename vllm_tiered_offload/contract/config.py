"""What the worker half needs to know of the settings: a frozen dataclass, so that workers import no pydantic."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of the worker half. `capacity` is the size of the whole region in bytes, all ranks together."""

    capacity: int
    blocks_per_chunk: int
    copy_threads: int = 1
    populate: bool = True
