"""What happens to a simulated engine from outside, as data: a run can be told, run again, and made shorter.

An event is a name and plain arguments. One that makes no sense where it stands (an abort of a request that never came,
because its arrival was left out) does nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_tiered_offload.testing.fakes.memory_tier import MemoryTier
    from vllm_tiered_offload.testing.simulator.engine import Simulation


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that somebody did to the engine. `name` is a function in this module."""

    name: str
    args: tuple[Any, ...]

    def perform(self, sim: "Simulation") -> None:
        """Do it."""
        _ACTIONS[self.name](sim, *self.args)


_ACTIONS: dict[str, Callable[..., None]] = {}
_ARGUMENTS: dict[str, list[str]] = {}  # their names, for people


def _action(perform: Callable[..., None]) -> Callable[..., None]:
    _ACTIONS[perform.__name__] = perform
    _ARGUMENTS[perform.__name__] = list(signature(perform).parameters)[1:]
    return perform


@_action
def step(sim: "Simulation", eager: bool) -> None:
    """One turn of the engine loop; `eager` says whether the new batch runs before the next one is scheduled."""
    sim.eager = eager
    if sim.has_work():
        sim.step()


@_action
def time_passes(sim: "Simulation", seconds: float) -> None:
    sim.clock.advance(seconds)


# -- requests ----------------------------------------------------------------------------------------------------------


@_action
def arrive(sim: "Simulation", req_id: str, tokens: Sequence[int], max_tokens: int, options: dict[str, Any]) -> None:
    """`options`: further arguments of `Simulation.add_request`."""
    if req_id not in sim.live and sim.may_reuse_id(req_id):
        sim.add_request(tokens, max_tokens, req_id, **options)


@_action
def more_input(sim: "Simulation", req_id: str, tokens: Sequence[int], max_tokens: int) -> None:
    if req_id in sim.sessions_waiting():
        sim.continue_session(req_id, tokens, max_tokens)


@_action
def abort(sim: "Simulation", req_id: str, while_running: bool) -> None:
    sim.abort(req_id, while_running)


# -- the operator ------------------------------------------------------------------------------------------------------


@_action
def reset(sim: "Simulation", running: bool, new_weights: bool) -> None:
    sim.reset(running, new_weights)


@_action
def reset_when_quiet(sim: "Simulation", new_weights: bool) -> None:
    """What a careful operator does: pause, let everything end, reset, update the weights."""
    _pause(sim)
    if not sim.reset(new_weights=new_weights):
        raise sim.story.violation("l6", "an idle engine could not be reset")


@_action
def sleep_and_wake_up(sim: "Simulation", new_weights: bool) -> None:
    """The device memory is somebody else's for a while; jobs of the tiers behind go on meanwhile."""
    _pause(sim)
    if not sim.sleep():
        raise sim.story.violation("l6", "an idle engine could not be put to sleep")
    sim.tiers.run(2)
    sim.wake_up(new_weights)


def _pause(sim: "Simulation") -> None:
    for req_id in sorted(sim.live):
        sim.abort(req_id)
    sim.release_copies()
    sim.run_until_idle(sessions_end=True)


# -- copies and the neighbour ------------------------------------------------------------------------------------------


@_action
def hold_copies(sim: "Simulation") -> None:
    sim.hold_copies()


@_action
def release_copies(sim: "Simulation") -> None:
    sim.release_copies()


@_action
def run_copies(sim: "Simulation", count: int) -> None:
    sim.run_copies(count, shuffle=True)


@_action
def copies_fail(sim: "Simulation", count: int) -> None:
    sim.copies.faults += count


@_action
def copies_are_refused(sim: "Simulation", count: int) -> None:
    sim.copies.submit_faults += count


@_action
def neighbour(sim: "Simulation", share: float, failure: float, saves: float) -> None:
    """How much the neighbour has, how often its loads fail, how often it holds on to blocks."""
    sim.world.share, sim.world.failure, sim.world.saves = share, failure, saves


# -- the tiers behind --------------------------------------------------------------------------------------------------


@_action
def region_opens(sim: "Simulation", now: bool) -> None:
    sim.tiers.opens = now


@_action
def hold_tiers(sim: "Simulation", held: bool) -> None:
    sim.tiers.held = held


@_action
def run_tier_jobs(sim: "Simulation", count: int) -> None:
    sim.tiers.run(count, shuffle=True)


@_action
def tier_jobs_wake(sim: "Simulation") -> None:
    sim.tiers.wake()


@_action
def tier_jobs(sim: "Simulation", what: str, count: int) -> None:
    """`what`: failing, spoiling or hanging, which the next `count` jobs are, beside those that were to be anyway."""
    setattr(sim.tiers, what, getattr(sim.tiers, what) + count)


@_action
def tier_jobs_heal(sim: "Simulation") -> None:
    sim.tiers.failing = 0


def _of_tier(change: Callable[..., None]) -> Callable[..., None]:
    """An event of one of the tiers behind, by its number."""

    def perform(sim: "Simulation", number: int, *args: Any) -> None:
        change(sim.tiers.tiers[number], *args)

    _ACTIONS[change.__name__] = perform
    _ARGUMENTS[change.__name__] = ["number", *list(signature(change).parameters)[1:]]
    return perform


@_of_tier
def tier_raises(tier: "MemoryTier", methods: Sequence[str]) -> None:
    """These methods raise from now on; none does any more if there are none."""
    tier.raising = set(methods)


@_of_tier
def tier_retries(tier: "MemoryTier", count: int) -> None:
    """Every key is unknown again, for `count` questions."""
    tier.retries = count
    if count:
        tier.ask_anew()


@_of_tier
def tier_loses(tier: "MemoryTier", where: float) -> None:
    """A chunk goes behind its back; `where` among all of them, from 0 to 1."""
    if tier.chunks:
        tier.lose(list(tier.chunks)[int(where * len(tier.chunks))])


@_of_tier
def tier_drains(tier: "MemoryTier", drains: bool) -> None:
    tier.drains = drains


# -- for people --------------------------------------------------------------------------------------------------------


def tell(events: Sequence[Event]) -> list[str]:
    """One line for each event, or for several equal ones in a row."""
    prompts: dict[str, Sequence[int]] = {}
    lines = [_line(event, prompts) for event in events]
    repeated = [(line, len(list(group))) for line, group in groupby(lines)]
    return [line if times == 1 else f"{line}  x{times}" for line, times in repeated]


def _line(event: Event, prompts: dict[str, Sequence[int]]) -> str:
    if event.name != "arrive":
        arguments = zip(_ARGUMENTS[event.name], event.args, strict=True)
        return " ".join([event.name, *(f"{name}={value}" for name, value in arguments)])
    req_id, tokens, max_tokens, options = event.args
    common = {other: _common(tokens, prompt) for other, prompt in prompts.items()}
    prompts[req_id] = tokens
    closest = max(common, key=lambda other: common[other], default=None)
    shared = f", the first {common[closest]} as in {closest}" if closest is not None and common[closest] else ""
    return f"arrive {req_id}: {len(tokens)} tokens{shared}; {max_tokens} to answer {options or ''}".rstrip()


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(first), len(second)))
