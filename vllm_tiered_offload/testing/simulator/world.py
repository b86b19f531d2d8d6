"""What the neighbour connector's halves share: the outside world that its KV comes from.

The neighbour runs inside MultiConnector, made by vLLM from configuration alone, so it finds its world by name.
"""

import random
from itertools import count
from typing import ClassVar

from vllm_tiered_offload.testing.simulator.config import SimConfig
from vllm_tiered_offload.testing.simulator.model_runner import SimModelRunner

_numbers = count(1)


class World:
    """Decides which prefixes the neighbour has, how slow it is and when it fails; remembers its receives."""

    _by_name: ClassVar[dict[str, "World"]] = {}

    def __init__(self, name: str, config: SimConfig, runner: SimModelRunner, rng: random.Random) -> None:
        self.name = name
        self.config = config
        self.runner = runner
        self.rng = rng
        self.share = 0.0  # of requests whose prefix the neighbour has
        self.failure = 0.0  # share of its loads that fail
        self.saves = 0.0  # share of finished requests whose blocks it holds on to for some steps
        self.delay = (1, 6)  # steps that a load takes
        self._loading: dict[str, set[int]] = {}  # request -> ranks whose load has not been reported
        self._promises: set[str] = set()  # requests that vLLM allocated for our load in this pass
        self._received: set[tuple[str, int]] = set()  # receives reported in this step, taken by has_received

    @classmethod
    def make(cls, config: SimConfig, runner: SimModelRunner, rng: random.Random) -> "World":
        """A world with a name of its own; quiet until somebody sets its shares."""
        world = cls(f"world{next(_numbers)}", config, runner, rng)
        cls._by_name[world.name] = world
        return world

    @classmethod
    def get(cls, name: str) -> "World":
        """The world of that name."""
        return cls._by_name[name]

    def forget(self) -> None:
        """The engine is gone."""
        self._by_name.pop(self.name, None)

    def calm(self) -> None:
        """No more surprises: what is under way ends well, nothing new begins."""
        self.share = self.failure = self.saves = 0.0

    def promised(self, req_id: str) -> None:
        """vLLM allocated blocks for the neighbour's load, synchronous or not."""
        self._promises.add(req_id)

    def take_promise(self, req_id: str) -> bool:
        """Whether what vLLM allocated for this request in this pass is for the neighbour. Asking takes it away."""
        if req_id not in self._promises:
            return False
        self._promises.discard(req_id)
        return True

    def load_began(self, req_id: str) -> None:
        """The neighbour loads for this request in the background, on every rank."""
        self._loading[req_id] = set(range(self.config.ranks))

    def load_ended(self, req_id: str, rank: int) -> None:
        """Rank `rank` reports the receive in this step."""
        self._received.add((req_id, rank))
        ranks = self._loading[req_id]
        ranks.discard(rank)
        if not ranks:
            del self._loading[req_id]

    def has_received(self, req_id: str, rank: int) -> bool:
        """Whether this receive was the neighbour's. Asking takes it away: a second report of it is nobody's."""
        if (req_id, rank) not in self._received:
            return False
        self._received.discard((req_id, rank))
        return True
