"""Random events from a seed: conversations that share prefixes, aborts, resets, slow and failing copies, neighbours."""

import random
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm_tiered_offload.testing.simulator.chain import FIRST_TOKEN, VOCAB
from vllm_tiered_offload.testing.simulator.events import Event
from vllm_tiered_offload.testing.simulator.tier_weather import TierWeather

if TYPE_CHECKING:
    from vllm_tiered_offload.testing.simulator.engine import Simulation


@dataclass(frozen=True, slots=True)
class Rates:
    """Chance per step of each kind of event."""

    arrival: float = 0.55
    abort: float = 0.05
    abort_while_running: float = 0.5  # share of aborts
    hold: float = 0.08  # copies start to wait
    release: float = 0.1  # waiting copies all run
    fault: float = 0.03  # the next copies fail half way
    submit_fault: float = 0.005  # the next copy is not accepted
    reset: float = 0.003
    reset_while_loading: float = 0.04  # the same, when a load is in flight
    reset_when_quiet: float = 0.002  # the workload pauses until the engine is idle, then resets: this one succeeds
    sleep: float = 0.4  # share of these in which the device memory goes away and comes back
    session: float = 0.06  # share of requests that may get more input under the same id
    jump: float = 0.01  # time passes: a second or two, so that time-outs fire


@dataclass(slots=True)
class Conversation:
    """A prompt that grows: each turn is the previous prompt, its answer, and new tokens."""

    tokens: list[int]
    turns: int = 0


@dataclass(slots=True)
class Workload:
    """Decides what happens to one simulation, and does it. All randomness comes from `rng`."""

    sim: "Simulation"
    rng: random.Random
    rates: Rates = field(default_factory=Rates)
    max_waiting: int = 8
    weather: TierWeather = field(init=False)
    events: list[Event] = field(default_factory=list)  # all that was done so far
    _numbers: "count[int]" = field(default_factory=lambda: count(1))
    _roots: list[list[int]] = field(default_factory=list)  # system prompts that conversations begin with
    _conversations: list[Conversation] = field(default_factory=list)
    _open: dict[str, Conversation] = field(default_factory=dict)  # live request -> its conversation

    def __post_init__(self) -> None:
        self._roots = [self._tokens(self.rng.randint(4, 40)) for _ in range(4)]
        self.weather = TierWeather(self.sim.tiers, random.Random(self.rng.random()), self._do)
        if self.sim.config.neighbour is not None:
            self._do("neighbour", 0.3, 0.3, 0.2)

    def _do(self, name: str, *args: Any) -> None:
        self.events.append(Event(name, args))
        self.events[-1].perform(self.sim)

    def step(self) -> None:
        """Maybe some events, then one engine step (or a little time, when there is nothing to do)."""
        rng, rates, sim = self.rng, self.rates, self.sim
        self._collect()
        if rng.random() < rates.arrival and len(sim.live) < self.max_waiting:
            self._arrive()
        if rng.random() < rates.abort and sim.live:
            self._do("abort", rng.choice(sorted(sim.live)), rng.random() < rates.abort_while_running)
        self._continue_sessions()
        self._copies()
        self.weather.step()
        if rng.random() < (rates.reset_while_loading if sim.is_loading() else rates.reset):
            self._do("reset", rng.random() < 0.5, rng.random() < 0.7)
        if rng.random() < rates.reset_when_quiet:
            new_weights = rng.random() < 0.7
            self._do("sleep_and_wake_up" if rng.random() < rates.sleep else "reset_when_quiet", new_weights)
        if rng.random() < rates.jump:
            self._do("time_passes", round(rng.uniform(0.5, 2.5), 2))
        if sim.has_work():
            self._do("step", sim.config.depth == 1 or rng.random() < 0.5)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(count)]

    def _room(self) -> int:
        """Tokens that one request may have in all: it must fit into the device pool alone."""
        config = self.sim.config
        blocks = (config.num_blocks - 2) // len(config.groups)
        return min(blocks * config.block_size * 3 // 4, config.max_model_len)

    def _arrive(self) -> None:
        rng, sim = self.rng, self.sim
        conversation = self._pick_conversation()
        prompt = conversation.tokens + self._tokens(rng.randint(1, 12))
        answer = rng.randint(1, 14)
        if len(prompt) + answer > self._room():
            conversation = Conversation(list(rng.choice(self._roots)))
            prompt = (conversation.tokens + self._tokens(rng.randint(1, 12)))[: self._room() - answer]
        options: dict[str, Any] = {}
        if rng.random() < 0.05:
            options["params"] = {"max_load_tokens": rng.randint(0, 40)}
        if rng.random() < 0.05:
            options["salt"] = "salt"
        if rng.random() < 0.03:
            options["skip_reading"] = True
        # Not with two batches in flight: vLLM 0.32 loses a session that is preempted and then gets the output of its
        # last batch (it leaves the waiting queue with it, and its prompt is cut to nothing).
        if rng.random() < self.rates.session and sim.config.depth == 1 and sim.sessions_are_sound:
            options["session"] = True
        req_id = self._old_id() or f"r{next(self._numbers)}"
        self._do("arrive", req_id, prompt, answer, options)
        self._open[req_id] = conversation
        conversation.tokens = prompt
        conversation.turns += 1

    def _continue_sessions(self) -> None:
        """Sessions get more input, or end; one that waits too long holds its blocks, so most move on soon."""
        rng, sim = self.rng, self.sim
        for req_id in sim.sessions_waiting():
            if rng.random() < 0.5:
                continue
            answer = rng.randint(1, 8)
            more = self._tokens(rng.randint(1, 10))
            if rng.random() < 0.7 and sim.live[req_id].num_tokens + len(more) + answer <= self._room():
                self._do("more_input", req_id, more, answer)
            else:
                self._do("abort", req_id, False)

    def _old_id(self) -> str | None:
        """Sometimes the id of a request that has finished and that the workers may not know to be over yet."""
        ended = sorted(self.sim.scheduler.finished_req_ids)
        if not ended or self.rng.random() > 0.1:
            return None
        req_id = self.rng.choice(ended)
        return req_id if self.sim.may_reuse_id(req_id) else None

    def _pick_conversation(self) -> Conversation:
        rng = self.rng
        if self._conversations and rng.random() < 0.8:
            return Conversation(list(rng.choice(self._conversations).tokens))  # a branch of the tree
        return Conversation(list(rng.choice(self._roots)))

    def _collect(self) -> None:
        """Finished turns: their answers become part of what the next turn begins with."""
        for req_id in [req_id for req_id in self._open if req_id not in self.sim.live]:
            conversation = self._open.pop(req_id)
            conversation.tokens = conversation.tokens + self.sim.outputs[req_id]
            self._conversations.append(conversation)
            del self._conversations[:-24]

    def _copies(self) -> None:
        rng, copies = self.rng, self.sim.copies
        if rng.random() < self.rates.fault:
            self._do("copies_fail", rng.randint(1, 2))
        if rng.random() < self.rates.submit_fault:
            self._do("copies_are_refused", 1)
        if not copies.held:
            if rng.random() < self.rates.hold:
                self._do("hold_copies")
        elif rng.random() < self.rates.release:
            self._do("release_copies")
        elif number := rng.randint(0, 2):
            self._do("run_copies", number)
