"""Bugs put into our own connector, one at a time: the simulator must notice each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vllm_tiered_offload.hierarchy.manager import TieringOffloadingManager
from vllm_tiered_offload.scheduler import scheduler as scheduler_module
from vllm_tiered_offload.scheduler.block_pins import BlockPins
from vllm_tiered_offload.scheduler.scheduler import OffloadingConnectorScheduler
from vllm_tiered_offload.testing.simulator.config import SimConfig
from vllm_tiered_offload.testing.simulator.episodes import run_episode
from vllm_tiered_offload.worker.copy_engines.host_copy import HostGroupCopier

Patch = pytest.MonkeyPatch


def no_pins(patch: Patch) -> None:
    patch.setattr(BlockPins, "pin", lambda self, blocks: None)
    patch.setattr(BlockPins, "unpin", lambda self, blocks: None)


def rows_shifted(patch: Patch) -> None:
    plan_load: Callable[..., Any] = scheduler_module.plan_load

    def shifted(*args: Any) -> Any:
        transfer = plan_load(*args)
        return replace(transfer, rows=transfer.rows[1:] + transfer.rows[:1]) if transfer is not None else None

    patch.setattr(scheduler_module, "plan_load", shifted)


def one_chunk_too_many(patch: Patch) -> None:
    storable: Callable[..., int] = scheduler_module.storable_chunks
    patch.setattr(
        scheduler_module,
        "storable_chunks",
        lambda written, hashed, chunk_tokens, limit: min(
            storable(written + chunk_tokens, hashed, chunk_tokens, limit), hashed // chunk_tokens
        ),
    )


def reset_keeps_keys(patch: Patch) -> None:
    patch.setattr(TieringOffloadingManager, "reset_cache", lambda self: None)


def finish_is_not_told(patch: Patch) -> None:
    patch.setattr(TieringOffloadingManager, "on_request_finished", lambda self, ctx: None)
    patch.setattr(OffloadingConnectorScheduler, "request_finished", lambda self, request, aborted: None)


def failed_stores_count(patch: Patch) -> None:
    complete: Callable[..., None] = TieringOffloadingManager.complete_store
    patch.setattr(
        TieringOffloadingManager, "complete_store", lambda self, prepared, failed_keys=(): complete(self, prepared)
    )


def half_a_copy(patch: Patch) -> None:
    copy: Callable[..., int] = HostGroupCopier.copy

    def half(self: Any, direction: Any, plan: Any, start: int, stop: int) -> int:
        return copy(self, direction, plan, start, max(stop - 1, start + 1))

    patch.setattr(HostGroupCopier, "copy", half)


def loads_keep_their_rows(patch: Patch) -> None:
    patch.setattr(TieringOffloadingManager, "complete_load", lambda self, prepared, failed_keys=(): None)


def stale_requests_go_on(patch: Patch) -> None:
    may_store: Callable[..., bool] = OffloadingConnectorScheduler._may_store

    def ignores_staleness(self: Any, state: Any) -> bool:
        state.stale = False
        return may_store(self, state)

    patch.setattr(OffloadingConnectorScheduler, "_may_store", ignores_staleness)


def busy_for_ever(patch: Patch) -> None:
    patch.setattr(OffloadingConnectorScheduler, "has_pending_work", lambda self: True)


def reads_a_file(patch: Patch) -> None:
    patch.setattr(TieringOffloadingManager, "on_schedule_end", lambda self: open("/dev/null").close())


@pytest.mark.parametrize(
    ("mutate", "checkers"),
    [
        (no_pins, ["d1", "d2"]),
        (rows_shifted, ["bytes", "d8"]),
        (one_chunk_too_many, ["d1"]),
        (reset_keeps_keys, ["l6"]),
        (finish_is_not_told, ["v5", "l1", "engine"]),
        (failed_stores_count, ["bytes", "d8"]),
        (half_a_copy, ["bytes"]),
        (loads_keep_their_rows, ["v5", "engine"]),
        (stale_requests_go_on, ["l6"]),
        (busy_for_ever, ["v5"]),
        (reads_a_file, ["no_io"]),
    ],
)
def test_mutant_is_found(monkeypatch: Patch, mutate: Callable[[Patch], None], checkers: list[str]) -> None:
    mutate(monkeypatch)
    for episode in range(8):
        _, failure = run_episode(21, episode, SimConfig(depth=1 + episode % 2, num_blocks=20), steps=250)
        if failure is not None:
            break
    else:
        pytest.fail("not noticed")
    assert failure.text.startswith(tuple(f"[{name}]" for name in checkers)), failure.text[:3000]
