"""Checkers of device blocks: what a store reads (D1) and how long it stays there (D2)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_tiered_offload.contract.messages import DeviceJob
from vllm_tiered_offload.testing.simulator.checkers.base import AckCounter, Checker

if TYPE_CHECKING:
    from vllm_tiered_offload.testing.simulator.engine import Simulation, Step


Tables = list[list[tuple[int, int]]]
"""(device block, how often it had been handed out) of each block position, by KV group."""


class D1WrittenSlots(Checker):
    """Never store a slot that no forward pass has written, nor another position's bytes.

    When the workers receive a store, after that step's forward pass, each of its device blocks must hold exactly what
    the request's tokens give at the block's position, and must be the block that the request had, not one handed out
    again since.

    Does not check which row the bytes go to (the runner does, when they come back), nor that a load range which is
    still in flight is left out when its bytes happen to be right already.
    """

    name = "d1"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._generation: dict[int, int] = {}  # device block -> how often it was handed out
        self._requests: dict[str, Any] = {}  # every request that may still be stored
        self._former: dict[str, Any] = {}  # a finished request whose id is in use again, until it is reported
        # Block tables of each request as last seen, and those before (a preemption replaces them, a window moves on).
        self._tables: dict[str, Tables] = {}
        self._older: dict[str, Tables] = {}

    def added(self, request: Any) -> None:
        former = self._requests.get(request.request_id)
        if former is not None:
            self._former[request.request_id] = former
        self._requests[request.request_id] = request

    def allocated(self, block_ids: list[int]) -> None:
        for block in block_ids:
            self._generation[block] = self._generation.get(block, 0) + 1

    def scheduled(self, step: "Step") -> None:
        manager = self.sim.scheduler.kv_cache_manager
        for req_id in step.given:
            tables = [
                [(block, self._generation.get(block, 0)) for block in ids] for ids in manager.get_block_ids(req_id)
            ]
            known = self._tables.get(req_id, [[] for _ in tables])
            if any(table[: len(old)] != old for table, old in zip(tables, known, strict=True)):
                self._older[req_id] = known
            if any(tables):
                self._tables[req_id] = tables
        for job in step.stores:
            for transfer in job.transfers:
                for block in transfer.device_block_ids:
                    self._position(job, transfer.group_idx, block)

    def received(self, step: "Step") -> None:
        for job in step.stores:
            for transfer in job.transfers:
                for block in transfer.device_block_ids:
                    position = self._position(job, transfer.group_idx, block)
                    self._check_bytes(job, transfer.group_idx, block, position)
        for req_id in step.output.finished_req_ids:
            self._former.pop(req_id, None)
            if req_id not in self.sim.live:
                for known in (self._requests, self._tables, self._older):
                    known.pop(req_id, None)

    def _position(self, job: DeviceJob, group: int, block: int) -> int:
        """The place of a block in its request's table of that KV group."""
        wanted = (block, self._generation.get(block, 0))
        for seen in (self._tables, self._older):
            tables = seen.get(job.req_id)
            if tables and wanted in tables[group]:
                return tables[group].index(wanted)
        raise self.broken(
            f"store job {job.job_id} of {job.req_id} reads block {block}, which is not the request's (any more): "
            f"tables {[[block for block, _ in table] for table in self._tables.get(job.req_id, [])]}, group {group}",
            job.req_id,
        )

    def _check_bytes(self, job: DeviceJob, group: int, block: int, position: int) -> None:
        runner, memory = self.sim.runner, self.sim.runner.groups[group]
        start, end = position * memory.block_tokens, (position + 1) * memory.block_tokens
        got = memory.block(block)
        former = self._former.get(job.req_id)
        if former is not None:
            words = runner.words_for(former.all_token_ids, group)[:, :, start:end]
            if words.shape[2] == end - start and np.array_equal(got, memory.whole_block(words)):
                return
        want = runner.expected(job.req_id, start, end, group)
        if want is None:
            tokens = list(self._requests[job.req_id].all_token_ids)
            if len(tokens) < end + memory.ahead:
                raise self.broken(
                    f"store job {job.job_id} of {job.req_id}: block {position} ends at token {end} of {len(tokens)}",
                    job.req_id,
                )
            want = runner.words_for(tokens, group)[:, :, start:end]
        want = memory.whole_block(want)
        if not np.array_equal(got, want):
            rank, layer, offset, word = (int(i) for i in np.argwhere(got != want)[0])
            what = runner.describe(rank, layer, int(got[rank, layer, offset, word]), group)
            raise self.broken(
                f"store job {job.job_id} of {job.req_id} reads block {block} for block position {position}, and its "
                f"slot {offset} {what}",
                job.req_id,
            )


class LoadedBytes(Checker):
    """What a load brought is what the request's own tokens give, to the last slot: also where the layers keep what
    depends on the next token, and vLLM's own cache would hand out another request's slot.

    Looked at when every rank has ended the load well, before anybody reads it.

    Does not check loads of other connectors, nor blocks that no hit reads (they are not loaded).
    """

    name = "bytes"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._acks = AckCounter(sim.config.ranks)
        self._loads: dict[int, tuple[DeviceJob, Any, list[list[int]]]] = {}  # with the request and its block tables

    def scheduled(self, step: "Step") -> None:
        for job in step.message.loads:
            request = self.sim.live.get(job.req_id)
            if request is not None:
                tables = self.sim.scheduler.kv_cache_manager.get_block_ids(job.req_id)
                self._loads[job.job_id] = (job, request, [list(table) for table in tables])

    def reported(self, step: "Step") -> None:
        for job_id, error in self._acks.count(step):
            load = self._loads.pop(job_id, None)
            if load is not None and error is None:
                job, request, tables = load
                self._check(job, list(request.all_token_ids), tables)

    def _check(self, job: DeviceJob, tokens: list[int], tables: list[list[int]]) -> None:
        for transfer in job.transfers:
            memory = self.sim.runner.groups[transfer.group_idx]
            words = self.sim.runner.words_for(tokens, transfer.group_idx)
            for block in transfer.device_block_ids:
                start = tables[transfer.group_idx].index(block) * memory.block_tokens
                want = memory.whole_block(words[:, :, start : start + memory.block_tokens])
                if not np.array_equal(memory.block(block), want):
                    text = f"load job {job.job_id} left other bytes than the request's at token {start}"
                    raise self.broken(f"{text} (group {transfer.group_idx}, block {block})", job.req_id)


class D2PinnedBlocks(Checker):
    """A device block with a store pending is never handed out again or overwritten before the store ended.

    From the moment the store is in a message until every rank acknowledged it, the block pool must not hand the block
    out, and after the forward pass that the store follows nobody may change its bytes. Blocks held that way never
    exceed their share of the pool (setting max_pinned_device_share).

    Does not check blocks between request_finished and the message that carries their final store (D1 sees those: the
    block is no longer the request's), nor writes by another connector's load.
    """

    name = "d2"

    def __init__(self, sim: "Simulation") -> None:
        super().__init__(sim)
        self._limit = sim.config.max_pinned_blocks
        self._reported = AckCounter(sim.config.ranks)
        self._processed = AckCounter(sim.config.ranks)
        self._planned: dict[int, set[int]] = {}  # job -> blocks, from the message to the last acknowledgement
        self._reading: dict[int, set[int]] = {}  # the same, from the workers' receipt on

    def scheduled(self, step: "Step") -> None:
        for job in step.message.stores:
            self._planned[job.job_id] = _blocks(job)
        held = set().union(*self._planned.values())
        if len(held) > self._limit:
            raise self.broken(f"{len(held)} device blocks are held by stores, at most {self._limit} may be")

    def received(self, step: "Step") -> None:
        for job in step.message.stores:
            self._reading[job.job_id] = _blocks(job)

    def reported(self, step: "Step") -> None:
        for job_id, _ in self._reported.count(step):
            self._reading.pop(job_id, None)

    def updated(self, step: "Step") -> None:
        for job_id, _ in self._processed.count(step):
            self._planned.pop(job_id, None)

    def allocated(self, block_ids: list[int]) -> None:
        for job_id, blocks in self._planned.items():
            if not blocks.isdisjoint(block_ids):
                raise self.broken(f"blocks {sorted(blocks & set(block_ids))} handed out, store job {job_id} pending")

    def writing(self, req_id: str, block_ids: list[int], changes: Callable[[], bool]) -> None:
        for job_id, blocks in self._reading.items():
            if not blocks.isdisjoint(block_ids) and changes():
                raise self.broken(f"blocks {sorted(blocks & set(block_ids))} overwritten under store {job_id}", req_id)

    def converged(self) -> None:
        if self._planned:
            raise self.broken(f"store jobs never acknowledged: {sorted(self._planned)}")


def _blocks(job: DeviceJob) -> set[int]:
    return {block for transfer in job.transfers for block in transfer.device_block_ids}
