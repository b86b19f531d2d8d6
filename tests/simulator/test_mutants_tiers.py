"""Bugs put into the hierarchy and the guard, one at a time: the simulator must notice each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vllm_tiered_offload.contract.jobs import JobResult
from vllm_tiered_offload.hierarchy import manager as manager_module
from vllm_tiered_offload.hierarchy.manager import TieringOffloadingManager
from vllm_tiered_offload.hierarchy.promotions import Holds
from vllm_tiered_offload.scheduler.lookup_planner import LookupWait
from vllm_tiered_offload.testing.simulator.config import SimConfig
from vllm_tiered_offload.testing.simulator.episodes import run_episode
from vllm_tiered_offload.tiers.cpu.tier import CpuTier
from vllm_tiered_offload.tiers.guard import TierGuard

Patch = pytest.MonkeyPatch
Method = Callable[..., Any]


def finalised_early(patch: Patch) -> None:
    """The tiers behind hear of the end together with the primary one."""
    finish: Method = TieringOffloadingManager.on_request_finished

    def early(self: Any, ctx: Any) -> None:
        self._finalise(self._requests[ctx.req_id])
        finish(self, ctx)

    patch.setattr(TieringOffloadingManager, "on_request_finished", early)


def end_not_told(patch: Patch) -> None:
    patch.setattr(TierGuard, "on_request_finished", lambda self, ctx: None)


def late_rows_freed_at_the_deadline(patch: Patch) -> None:
    collect: Method = TierGuard.collect

    def freed(self: Any) -> Any:
        results, released = collect(self)
        late = [result.job_id for result in results if self._overdue.pop(result.job_id, None) is not None]
        return results, released + late

    patch.setattr(TierGuard, "collect", freed)


def no_holds(patch: Patch) -> None:
    patch.setattr(Holds, "add", lambda self, req_id, keys, now: None)


def no_headroom(patch: Patch) -> None:
    plan: Method = manager_module.plan_promotion
    patch.setattr(manager_module, "plan_promotion", lambda results, found, room: plan(results, found, room + 1))


def failed_promotions_count(patch: Patch) -> None:
    ended: Method = TieringOffloadingManager._promotion_ended

    def hopeful(self: Any, end: Any, now: float) -> None:
        ended(self, replace(end, result=JobResult(end.result.job_id, True, end.entry.job.keys)), now)

    patch.setattr(TieringOffloadingManager, "_promotion_ended", hopeful)


def failed_keys_tried_again(patch: Patch) -> None:
    look: Method = TieringOffloadingManager._look_behind

    def forgetful(self: Any, keys: Any, results: Any, request: Any) -> Any:
        request.unreadable.clear()
        return look(self, keys, results, request)

    patch.setattr(TieringOffloadingManager, "_look_behind", forgetful)


def exceptions_travel_up(patch: Patch) -> None:
    patch.setattr(TierGuard, "_call", lambda self, what, call, *args: call(*args))


def breaker_never_opens(patch: Patch) -> None:
    def counted(self: Any, kind: str, error: object = None) -> None:
        self.counters[kind] += 1

    patch.setattr(TierGuard, "_failed", counted)


def open_breaker_is_ignored(patch: Patch) -> None:
    patch.setattr(TierGuard, "is_off", False)


def waits_for_ever(patch: Patch) -> None:
    wait: Method = LookupWait.should_wait
    patch.setattr(
        LookupWait, "should_wait", lambda self, end, stop, now, *_limits: wait(self, end, stop, now, 9e9, 9e9)
    )


def evicts_what_it_continues(patch: Patch) -> None:
    make_room: Method = CpuTier._make_room
    patch.setattr(CpuTier, "_make_room", lambda self, wanted, protected, access: make_room(self, wanted, (), access))


def tiers_behind_are_not_reset(patch: Patch) -> None:
    patch.setattr(TierGuard, "reset", lambda self, timeout: None)


def not_polled_while_idle(patch: Patch) -> None:
    patch.setattr(TieringOffloadingManager, "has_pending_work", lambda self: False)


def cascades_are_not_leased(patch: Patch) -> None:
    """The rows of a cascade may be evicted and filled again while the tier reads them."""
    submit: Method = manager_module.TierJobs.submit_cascade

    def unleased(self: Any, guard: Any, lease: Any, ctx: Any) -> None:
        submit(self, guard, lease, ctx)
        self.primary.release(lease)

    make: Method = TieringOffloadingManager.__init__

    def made(self: Any, primary: Any, *args: Any, **kwargs: Any) -> None:
        make(self, primary, *args, **kwargs)
        self._jobs.primary = primary

    patch.setattr(TieringOffloadingManager, "__init__", made)
    patch.setattr(manager_module.TierJobs, "submit_cascade", unleased)


@pytest.mark.parametrize(
    ("mutate", "checkers"),
    [
        (finalised_early, ["l3"]),
        (end_not_told, ["l3"]),
        (late_rows_freed_at_the_deadline, ["d4", "bytes"]),
        (cascades_are_not_leased, ["d4", "bytes"]),
        (no_holds, ["v2"]),
        (no_headroom, ["v2"]),
        (failed_promotions_count, ["d6", "bytes"]),
        (failed_keys_tried_again, ["d6"]),
        (exceptions_travel_up, ["v4"]),
        (breaker_never_opens, ["v4"]),
        (open_breaker_is_ignored, ["v4", "bytes"]),
        (waits_for_ever, ["v1"]),
        (evicts_what_it_continues, ["v6"]),
        (tiers_behind_are_not_reset, ["bytes", "v2"]),  # v2: a job from before the reset ends well, for nothing
        (not_polled_while_idle, ["v5", "d4"]),
    ],
)
def test_mutant_is_found(monkeypatch: Patch, mutate: Callable[[Patch], None], checkers: list[str]) -> None:
    mutate(monkeypatch)
    for episode in range(12):
        config = SimConfig(depth=1 + episode % 2, num_blocks=20, cpu_chunks=12, tiers=1 + episode // 2 % 2)
        _, failure = run_episode(23, episode, config, steps=300)
        if failure is not None:
            break
    else:
        pytest.fail("not noticed")
    assert failure.text.startswith(tuple(f"[{name}]" for name in checkers)), failure.text[:3000]
