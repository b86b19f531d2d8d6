"""Another connector beside ours inside MultiConnector: it brings in prefixes of its own, slowly, and sometimes fails.

Asynchronous loads fill their blocks bit by bit over some steps; a failed one leaves them half written and is reported
as a failed receive. Synchronous loads fill theirs before the forward pass of the same step. After some requests it
holds on to the blocks for a while, as a connector does that sends them somewhere. Its bytes are right whenever it
reports success. Imports vLLM.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from vllm_tiered_offload.testing.simulator.world import World


@dataclass
class LoadedBlock:
    """A device block of a KV group, and the position of its first slot."""

    group: int
    position: int
    block: int


@dataclass
class NeighbourLoad:
    """Fill `blocks` with the slots of `tokens`, one more than the slots, taking that many steps on each rank."""

    req_id: str
    tokens: list[int]
    blocks: list[LoadedBlock]
    steps: list[int]  # per rank
    fails: list[bool]  # per rank
    done: int = 0  # steps taken so far, counted by the worker half


@dataclass
class NeighbourMetadata(KVConnectorMetadata):
    """Scheduler side -> worker side."""

    loads: list[NeighbourLoad] = field(default_factory=list)
    saves: dict[str, int] = field(default_factory=dict)  # request -> steps until its blocks may go


class NeighbourConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves; `world` in its settings names the `World` that decides everything."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._world = World.get(vllm_config.kv_transfer_config.kv_connector_extra_config["world"])
        self._sync = self._world.config.neighbour == "sync"
        self._rank = vllm_config.parallel_config.rank
        # scheduler side
        self._offers: dict[str, int] = {}  # request -> tokens of its prefix that we have
        self._local: dict[str, int] = {}  # request -> device hits at the last question
        self._next = NeighbourMetadata()
        # worker side
        self._loads: list[NeighbourLoad] = []
        self._saves: dict[str, int] = {}

    # -- scheduler side ------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        world = self._world
        unit = world.config.hit_tokens
        most = (request.num_tokens - 1) // unit
        if most and world.rng.random() < world.share:
            self._offers[request.request_id] = world.rng.randint(1, most) * unit

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._local[request.request_id] = num_computed_tokens
        tokens = max(self._offers.get(request.request_id, 0) - num_computed_tokens, 0)
        return tokens, bool(tokens) and not self._sync

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        world, req_id = self._world, request.request_id
        start = self._local[req_id]
        end = start + num_external_tokens
        ranks = range(world.config.ranks)
        failing = not self._sync and world.rng.random() < world.failure
        fails = [failing and world.rng.random() < 0.7 for _ in ranks]
        if failing:
            fails[world.rng.choice(ranks)] = True
            self._offers.pop(req_id, None)  # it is looked up again, and this must end
        steps = [world.rng.randint(*world.delay) for _ in ranks]
        tokens = list(request.all_token_ids[: end + 1])
        self._next.loads.append(NeighbourLoad(req_id, tokens, self._to_fill(blocks, start, end), steps, fails))
        world.promised(req_id)
        if not self._sync:
            world.load_began(req_id)

    def _to_fill(self, blocks: Any, start: int, end: int) -> list[LoadedBlock]:
        """What vLLM allocated for these positions; windows have the placeholder block in front."""
        found = []
        for group, table in enumerate(blocks.blocks):
            size = self._world.config.block_tokens(group)
            for index in range(start // size, -(-end // size)):
                if not table[index].is_null:
                    found.append(LoadedBlock(group, index * size, table[index].block_id))
        return found

    def build_connector_meta(self, scheduler_output: Any) -> NeighbourMetadata:
        metadata, self._next = self._next, NeighbourMetadata()
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._offers.pop(request.request_id, None)
        self._local.pop(request.request_id, None)
        world = self._world
        holds = request.status == RequestStatus.FINISHED_LENGTH_CAPPED and world.rng.random() < world.saves
        if holds:
            self._next.saves[request.request_id] = world.rng.randint(1, 5)
        return holds, None

    def reset_cache(self) -> bool:
        self._offers.clear()
        return True

    # -- worker side ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Writes through the runner's own view of the same memory."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, NeighbourMetadata)
        self._saves.update(metadata.saves)
        if self._sync:
            for load in metadata.loads:
                self._fill(load, len(load.blocks))
        else:
            self._loads += metadata.loads

    def _fill(self, load: NeighbourLoad, num_blocks: int) -> None:
        """Write the first `num_blocks` blocks of the load."""
        runner = self._world.runner
        words = [runner.words_for(load.tokens, group.index)[self._rank] for group in runner.groups]
        for one in load.blocks[:num_blocks]:
            memory = runner.groups[one.group].block(one.block)[self._rank]
            part = words[one.group][:, one.position : one.position + memory.shape[1]]
            memory[:, : part.shape[1]] = part

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Synchronous loads are complete before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Only pretends to save."""

    def wait_for_save(self) -> None:
        """Only pretends to save."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        raise NotImplementedError("vLLM calls get_transfer_results")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for load in list(self._loads):
            self._advance(load, results)
        for req_id in list(self._saves):
            self._saves[req_id] -= 1
            if self._saves[req_id] <= 0:
                del self._saves[req_id]
                results.finished_sending.add(req_id)
        return results

    def _advance(self, load: NeighbourLoad, results: KVConnectorTransferResults) -> None:
        load.done += 1
        steps, fails = load.steps[self._rank], load.fails[self._rank]
        share = len(load.blocks) * min(load.done, steps) // steps
        self._fill(load, share - 1 if fails else share)
        if load.done < steps:
            return
        self._loads.remove(load)
        results.finished_recving.add(load.req_id)
        if fails:
            results.failed_recving.add(load.req_id)
        self._world.load_ended(load.req_id, self._rank)
