"""Bugs put into our own connector, for the checkers of keys, offers and cascades: each is noticed by its own."""

from collections.abc import Callable
from typing import Any

import pytest

from vllm_tiered_offload.hierarchy.manager import TieringOffloadingManager
from vllm_tiered_offload.scheduler.request_state import ChunkKeys
from vllm_tiered_offload.scheduler.scheduler import OffloadingConnectorScheduler
from vllm_tiered_offload.testing.simulator.config import SimConfig
from vllm_tiered_offload.testing.simulator.episodes import run_episode

Patch = pytest.MonkeyPatch
Method = Callable[..., Any]


def wrap(patch: Patch, owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by `around(method, self, *args)`."""
    method: Method = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args, **kwargs: around(method, self, *args, **kwargs))


def last_stored_chunk_is_not_cascaded(patch: Patch) -> None:
    def all_but_one(cascade: Method, self: Any, keys: Any, *args: Any) -> None:
        cascade(self, keys[:-1], *args)

    wrap(patch, TieringOffloadingManager, "_cascade", all_but_one)


def present_chunks_are_not_offered(patch: Patch) -> None:
    patch.setattr(TieringOffloadingManager, "_offer_present", lambda self, keys, request: None)


def parked_offers_are_forgotten(patch: Patch) -> None:
    def dropped(unpark: Method, self: Any, keys: Any, failed: Any) -> None:
        unpark(self, keys, set(keys))

    wrap(patch, TieringOffloadingManager, "_unpark", dropped)


def some_requests_are_given_up(patch: Patch) -> None:
    """Under "tolerant": something unforeseen goes wrong now and then, and costs a request its offloading."""
    calls: list[int] = []

    def breaks(look_up: Method, self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) % 20 == 0:
            raise KeyError("unforeseen")
        return look_up(self, *args)

    wrap(patch, OffloadingConnectorScheduler, "_look_up", breaks)


def keys_of_one_chunk_before(patch: Patch) -> None:
    def shifted(slice_: Method, self: Any, first: int, end: int) -> Any:
        return [key[::-1] for key in slice_(self, first, end)]

    wrap(patch, ChunkKeys, "slice", shifted)


def declined_chunks_are_left_out(patch: Patch) -> None:
    """What was declined counts as offered: a hole in the middle of the request."""

    def whole(note: Method, self: Any, offer: Any, _accepted: int) -> None:
        note(self, offer, offer.end - offer.first_chunk)

    wrap(patch, OffloadingConnectorScheduler, "_note_accepted", whole)


def declined_chunks_are_offered_in_each_step(patch: Patch) -> None:
    def again(note: Method, self: Any, offer: Any, accepted: int) -> None:
        note(self, offer, accepted)
        offer.state.offered_chunks, offer.state.quiet_until = offer.state.next_chunk, 0

    wrap(patch, OffloadingConnectorScheduler, "_note_accepted", again)


def declined_chunks_are_offered_without_end(patch: Patch) -> None:
    def patient(note: Method, self: Any, offer: Any, accepted: int) -> None:
        note(self, offer, accepted)
        offer.state.declines = 0

    wrap(patch, OffloadingConnectorScheduler, "_note_accepted", patient)


TIERS = {"tiers": 2, "request_level": True}


@pytest.mark.parametrize(
    ("mutate", "checkers", "fields"),
    [
        (last_stored_chunk_is_not_cascaded, ["l4"], TIERS),
        (present_chunks_are_not_offered, ["l5"], TIERS),
        (parked_offers_are_forgotten, ["l5"], TIERS),
        (some_requests_are_given_up, ["l7"], {"lifecycle": "tolerant"}),
        (keys_of_one_chunk_before, ["d5"], {}),
        (declined_chunks_are_left_out, ["v3"], {"cpu_chunks": 5}),
        (declined_chunks_are_offered_in_each_step, ["v3"], {"cpu_chunks": 5}),
        (declined_chunks_are_offered_without_end, ["v3"], {"cpu_chunks": 5, "extra": {"max_store_offers": 2}}),
    ],
)
def test_bug_is_found(
    monkeypatch: Patch, mutate: Callable[[Patch], None], checkers: list[str], fields: dict[str, Any]
) -> None:
    mutate(monkeypatch)
    for episode in range(10):
        config = SimConfig(**{"depth": 1 + episode % 2, "num_blocks": 24, "cpu_chunks": 12, **fields})
        _, failure = run_episode(31, episode, config, steps=300)
        if failure is not None:
            break
    else:
        pytest.fail("not noticed")
    assert failure.text.startswith(tuple(f"[{name}]" for name in checkers)), failure.text[:3000]
