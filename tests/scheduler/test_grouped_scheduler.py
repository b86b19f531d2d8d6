"""Lookups of a model with a full and a sliding-window group, against a manager that records every call."""

from dataclasses import replace
from typing import Any

import pytest

from vllm_tiered_offload.contract.jobs import LookupResult, PreparedLoad
from vllm_tiered_offload.contract.keys import OffloadKey, make_offload_key
from vllm_tiered_offload.scheduler.grouped_scheduler import GroupedScheduler
from vllm_tiered_offload.scheduler.views import GroupShape
from vllm_tiered_offload.settings import Settings

from .harness import BLOCK, Half, Request

FULL, WINDOW = GroupShape(BLOCK, BLOCK, BLOCK, 0), GroupShape(BLOCK, BLOCK, BLOCK, 1, window=9)
DRAFT = GroupShape(BLOCK, BLOCK, BLOCK, 1, reads_next_token=True)
PROMPT = 12 * BLOCK + 1


class GroupedHalf(Half):
    """The scheduler half over both groups; device blocks are not looked at here."""

    def __init__(self, *shapes: GroupShape, **settings: Any) -> None:
        super().__init__(bind=False)
        parsed = Settings.parse({"cpu": {"capacity": "1GiB"}, "lifecycle": "strict", **settings})
        self.inner = GroupedScheduler(parsed, self.manager, shapes or (WINDOW, FULL), clock=self.clock)
        self.inner.bind_device(self.pool, lambda _req_id: ([], []))
        self.announce()

    def keep(self, request: Request, full: range, window: range) -> None:
        """The manager has these chunks of the two groups."""
        self.manager.resident.update(keys_of(request, 0, full), keys_of(request, 1, window))


def keys_of(request: Request, group: int, chunks: range) -> list[OffloadKey]:
    return [make_offload_key(request.block_hashes[chunk], group) for chunk in chunks]


def test_a_new_prompt_costs_one_question() -> None:
    """Fails when keys of the whole prompt are made, and asked for, first."""
    half = GroupedHalf()
    request = half.add("a", PROMPT)
    assert half.ask(request) == (0, False)
    assert half.manager.of("a") == ["on_new_request", "lookup"]


def test_a_hit_ends_where_the_window_is_whole() -> None:
    """The window of 9 reaches two chunks back; its chunk 9 is gone, so that 8 strides are what all groups have."""
    half = GroupedHalf()
    request = half.add("a", PROMPT)
    half.keep(request, range(12), range(6, 9))
    assert half.ask(request) == (9 * BLOCK, True)
    half.manager.resident.difference_update(keys_of(request, 1, range(8, 9)))
    assert half.ask(request) == (8 * BLOCK, True)
    half.manager.resident.difference_update(keys_of(request, 0, range(7, 8)))
    assert half.ask(request) == (0, False)
    half.step()
    assert half.manager.loading == 0


def test_a_window_within_the_local_prefix_needs_nothing() -> None:
    """With 8 chunks on the device, a hit of 9 needs one chunk of each group."""
    half = GroupedHalf()
    request = half.add("a", PROMPT)
    half.keep(request, range(8, 9), range(8, 9))
    assert half.ask(request, 8 * BLOCK) == (BLOCK, True)
    half.step()


def test_a_pending_window_is_waited_for_and_then_done_without() -> None:
    """V1: what is readable without it counts when the time is over."""
    half = GroupedHalf(pending_timeout=1.0)
    request = half.add("a", PROMPT)
    half.keep(request, range(12), range(12))
    (last,) = keys_of(request, 1, range(11, 12))
    half.manager.answers[last] = LookupResult.HIT_PENDING
    assert half.ask(request) == (None, False)
    half.clock.advance(0.9)
    assert half.ask(request) == (None, False)
    half.clock.advance(0.2)
    assert half.ask(request) == (11 * BLOCK, True)
    half.step()


def test_a_tier_that_still_looks_is_waited_for() -> None:
    half = GroupedHalf(retry_timeout=1.0)
    request = half.add("a", PROMPT)
    (first,) = keys_of(request, 0, range(1))
    half.manager.answers[first] = LookupResult.RETRY
    assert half.ask(request) == (None, False)
    half.clock.advance(1.1)
    assert half.ask(request) == (0, False)


def test_a_row_that_went_meanwhile_is_no_hit() -> None:
    """D8: a hit of several groups is whole or none; what was pinned for it is given back.

    Fails when the part that was pinned stays so.
    """
    half = GroupedHalf()
    request = half.add("a", PROMPT)
    half.keep(request, range(12), range(12))
    prepare = half.manager.prepare_load

    def one_less(keys: Any, ctx: Any) -> PreparedLoad:
        whole = prepare(keys, ctx)
        return PreparedLoad(whole.keys[:-1], whole.block_ids[:-1])

    half.manager.prepare_load = one_less  # type: ignore[method-assign]
    assert half.ask(request) == (0, False)
    assert half.manager.loading == 0


def test_a_hit_ends_where_the_drafts_have_keys() -> None:
    """12 chunks and one token: the last of them has no key in the draft group. Of 10 chunks there is one hit more.

    Fails when a hit may end a hash earlier or later.
    """
    half = GroupedHalf(FULL, DRAFT)
    request = half.add("a", PROMPT)
    half.manager.resident.update(keys_of(request, 0, range(12)), keys_of(request, 1, range(1, 12)))
    assert half.ask(request) == (11 * BLOCK, True)
    half.manager.resident.difference_update(keys_of(request, 1, range(10, 11)))
    assert half.ask(request) == (9 * BLOCK, True)
    half.step()


@pytest.mark.parametrize("num_tokens", [1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK])
@pytest.mark.parametrize("shapes", [(FULL, DRAFT), (replace(DRAFT, group_idx=0),)], ids=["beside", "alone"])
def test_short_prompts_have_no_keys_of_drafts(shapes: tuple[GroupShape, ...], num_tokens: int) -> None:
    """Up to two blocks of tokens there is no more than one chunk with a key, and before that nobody is asked."""
    half = GroupedHalf(*shapes)
    request = half.add("a", num_tokens)
    assert half.ask(request) == (0, False)
    assert half.manager.of("a") == ["on_new_request", *["lookup"] * (num_tokens == 2 * BLOCK)]
    half.inner.update_state_after_alloc(request, ([], []), 0)


def test_what_a_hit_uses_is_touched_in_prefix_order() -> None:
    """V6: heads of full attention, then both groups' tail by turns, so that a tail goes before what it continues."""
    half = GroupedHalf()
    request = half.add("a", PROMPT)
    assert half.ask(request, 12 * BLOCK) == (0, False)
    half.inner.update_state_after_alloc(request, ([], []), 0)
    full, window = keys_of(request, 0, range(12)), keys_of(request, 1, range(12))
    assert half.manager.touched == [[*full[:10], full[10], window[10], full[11], window[11]]]


def test_nothing_is_promoted_that_no_hit_needs() -> None:
    """A model with recurrent layers: full attention has 12 chunks, the last state is that after chunk 4.

    Fails when the lookup, which sets off what other tiers have, asks for more than the 5 chunks and the state.
    """
    half = GroupedHalf(GroupShape(BLOCK, BLOCK, BLOCK, 0), GroupShape(BLOCK, BLOCK, BLOCK, 1, recurrent=True))
    request = half.add("a", PROMPT)
    half.keep(request, range(12), range(4, 5))
    look_up, asked = half.manager.lookup, []
    half.manager.probe = look_up  # type: ignore[method-assign]

    def recorded(keys: Any, ctx: Any) -> list[LookupResult]:
        asked.extend(keys)
        return look_up(keys, ctx)

    half.manager.lookup = recorded  # type: ignore[method-assign]
    assert half.ask(request) == (5 * BLOCK, True)
    assert asked == keys_of(request, 0, range(5)) + keys_of(request, 1, range(4, 5))
    half.step()
