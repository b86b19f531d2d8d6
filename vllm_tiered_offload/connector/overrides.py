"""Seams through which the simulator takes time and copy threads in hand. Production leaves all of them at None."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_tiered_offload.contract.seams import Clock, JobExecutor
from vllm_tiered_offload.hierarchy.region_access import RegionAccess


@dataclass(frozen=True, slots=True)
class Overrides:
    """`clock` replaces monotonic time in both halves, `executor_factory` makes the host copy engine's executor.

    `region_access_factory` makes what opens the host region in the scheduler half's process.
    """

    clock: Clock | None = None
    executor_factory: Callable[[], JobExecutor] | None = None
    region_access_factory: Callable[[], RegionAccess] | None = None


_stack: list[Overrides] = [Overrides()]  # innermost last, never empty


@contextmanager
def use_overrides(overrides: Overrides) -> Iterator[None]:
    """Connectors constructed inside this context use `overrides`."""
    _stack.append(overrides)
    try:
        yield
    finally:
        _stack.remove(overrides)


def current_overrides() -> Overrides:
    """What a connector constructed now uses."""
    return _stack[-1]
