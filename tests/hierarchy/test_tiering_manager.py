"""TieringOffloadingManager: the submission contract in strict and tolerant mode, and that state dies."""

import logging

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import LookupResult, PreparedStore, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.lifecycle import InvalidTransition
from vllm_tiered_offload.hierarchy.build import build_manager
from vllm_tiered_offload.hierarchy.manager import TieringOffloadingManager
from vllm_tiered_offload.settings import Settings, SettingsError
from vllm_tiered_offload.tiers.cpu.tier import CpuTier, CpuTierSettings
from vllm_tiered_offload.tiers.errors import ContractError

KEYS = [OffloadKey(b"key%d" % i) for i in range(6)]
R = ReqContext("r")


class WatchedTier(CpuTier):
    """Writes down what the manager forwards."""

    def __init__(self, *, strict=True):
        super().__init__(CpuTierSettings(capacity=4 * 4096), strict=strict)
        self.calls = []
        self.bind_region(RegionGeometry(4, (4096,), 1))

    def on_new_request(self, req_context):
        self.calls.append(("new", req_context.req_id))
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context):
        self.calls.append(("finished", req_context.req_id))
        super().on_request_finished(req_context)

    def prepare_stores(self, offers):
        self.calls += [("prepare_store", ctx.req_id) for _, ctx in offers]
        return super().prepare_stores(offers)

    def prepare_load(self, keys, req_context):
        self.calls.append(("prepare_load", req_context.req_id))
        return super().prepare_load(keys, req_context)


def make(*, strict: bool) -> TieringOffloadingManager:
    # The tier stays strict even under a tolerant manager: whatever reaches it must be right.
    return TieringOffloadingManager(WatchedTier(), strict=strict)


@pytest.fixture
def strict():
    manager = make(strict=True)
    yield manager
    assert_over(manager)


@pytest.fixture
def tolerant():
    manager = make(strict=False)
    yield manager
    assert_over(manager)


def assert_over(manager) -> None:
    assert manager.tracked == []
    assert not manager._in_flight
    manager.primary.check()
    assert not any(manager.primary.leftovers().values())


def test_store_then_load_through_the_manager(strict):
    strict.on_new_request(R)
    store = strict.prepare_store(KEYS[:3], R)
    strict.complete_store(store)
    assert strict.lookup(KEYS[:4], R) == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    strict.touch(KEYS[:3], R)
    load = strict.prepare_load(KEYS, R)
    assert load.keys == tuple(KEYS[:3])
    strict.on_schedule_end()
    strict.complete_load(load, failed_keys=[KEYS[0]])
    assert strict.lookup(KEYS[:1], R) == [LookupResult.MISS]
    assert strict.lookup(KEYS[1:2], R) == [LookupResult.HIT]
    assert not strict.has_pending_work()
    strict.on_request_finished(R)
    assert strict.primary.calls == [("new", "r"), ("prepare_store", "r"), ("prepare_load", "r"), ("finished", "r")]
    strict.shutdown()


def test_on_new_request_lifecycle(strict):
    """L1: first and last are forwarded exactly once, and the id may be used again."""
    for _ in range(2):
        strict.on_new_request(R)
        strict.on_request_finished(R)
    assert strict.primary.calls == [("new", "r"), ("finished", "r")] * 2


@pytest.mark.parametrize("first", ["store", "load"])
def test_completions_may_follow_the_finish_signal(strict, first):
    """L2, case 2: state dies with whatever comes last.

    Mutation: no _settle in complete_load fails on `tracked` at the end.
    """
    strict.on_new_request(R)
    strict.complete_store(strict.prepare_store(KEYS[:1], R))
    handles = {"store": strict.prepare_store(KEYS[1:2], R), "load": strict.prepare_load(KEYS[:1], R)}
    strict.on_request_finished(R)
    assert strict.tracked == ["r"]
    for name in (first, *handles.keys() - {first}):
        assert strict.tracked == ["r"]
        getattr(strict, f"complete_{name}")(handles[name])


def test_no_offload_call_after_on_request_finished(strict):
    """L1 with the story told, whether or not something is still in flight. Nothing reaches the tier.

    Mutation: without the `allows(SUBMIT)` test in _admitted nothing is raised.
    """
    strict.on_new_request(R)
    store = strict.prepare_store(KEYS[:1], R)
    strict.on_request_finished(R)
    for _ in range(2):
        before = list(strict.primary.calls)
        for call in ("prepare_store", "prepare_load", "lookup", "touch"):
            with pytest.raises(InvalidTransition, match=f"request r: submit while signalled.*finish.*<{call}"):
                getattr(strict, call)(KEYS, R)
        with pytest.raises(InvalidTransition, match="finish"):
            strict.on_request_finished(R)
        assert strict.primary.calls == before
        if strict.tracked:
            strict.complete_store(store)


def test_unknown_request_raises_in_strict_mode(strict):
    with pytest.raises(InvalidTransition, match=r"request ghost.*never announced"):
        strict.prepare_store(KEYS, ReqContext("ghost"))
    strict.on_new_request(R)
    with pytest.raises(InvalidTransition, match="on_new_request"):
        strict.on_new_request(R)
    strict.on_request_finished(R)


def test_handle_that_is_not_ours_is_the_tiers_to_judge(strict):
    with pytest.raises(ContractError):
        strict.complete_store(PreparedStore((KEYS[0],), (0,), [1], [1]))
    strict.complete_store(PreparedStore((), (), [], []))


def test_tolerant_refuses_the_request_once_and_for_all(tolerant, caplog):
    """L7: one warning, a count, no allocation; other requests are untouched.

    Mutation: `allows(SUBMIT)` after `prepare_stores` in the manager shows as a "prepare_store" call on the tier.
    """
    tolerant.on_new_request(R)
    store = tolerant.prepare_store(KEYS[:1], R)
    other = ReqContext("other")
    tolerant.on_new_request(other)
    before = len(tolerant.primary.calls)
    with caplog.at_level(logging.WARNING):
        tolerant.on_new_request(R)  # the broken rule
        assert tolerant.lookup(KEYS[:2], R) == [LookupResult.MISS] * 2
        assert tolerant.prepare_load(KEYS, R).keys == ()
        refused = tolerant.prepare_store(KEYS, R)
        tolerant.touch(KEYS, R)
    assert (refused.keys, refused.num_accepted) == ((), 0)
    assert len(tolerant.primary.calls) == before
    assert len(caplog.records) == 1
    assert "request r" in caplog.text
    tolerant.complete_store(store)
    assert tolerant.lookup(KEYS[:1], other) == [LookupResult.HIT]
    tolerant.on_request_finished(R)
    tolerant.on_request_finished(other)
    assert tolerant.get_stats()["lifecycle_violations_total"] == 1
    assert tolerant.primary.calls.count(("finished", "r")) == 1


def test_tolerant_finish_twice_is_forwarded_once(tolerant, caplog):
    tolerant.on_new_request(R)
    for _ in range(3):
        tolerant.on_request_finished(R)
    assert tolerant.primary.calls == [("new", "r"), ("finished", "r")]
    assert tolerant.get_stats()["lifecycle_violations_total"] == 2
    assert len(caplog.records) == 1
    tolerant.on_new_request(R)
    store = tolerant.prepare_store(KEYS[:1], R)
    assert store.keys == (KEYS[0],)  # a new life under that id starts with a clean record
    tolerant.complete_store(store)
    tolerant.on_request_finished(R)


def test_tolerant_unknown_requests_do_not_pile_up(tolerant):
    for i in range(500):
        tolerant.prepare_store(KEYS, ReqContext(f"ghost{i}"))
        tolerant.on_request_finished(ReqContext(f"ghost{i}"))
    assert tolerant.get_stats()["lifecycle_violations_total"] == 1000
    assert len(tolerant._over) == 64
    assert tolerant.primary.calls == []


def test_id_used_again_while_its_first_life_still_completes(strict):
    strict.on_new_request(R)
    first = strict.prepare_store(KEYS[:1], R)
    strict.on_request_finished(R)
    strict.on_new_request(R)
    second = strict.prepare_store(KEYS[1:2], R)
    assert strict.tracked == ["r", "r"]
    strict.complete_store(first)
    assert strict.tracked == ["r"]
    strict.on_request_finished(R)
    strict.complete_store(second, second.keys)


def test_reset_keeps_handles_until_they_come_back(strict):
    strict.on_new_request(R)
    store = strict.prepare_store(KEYS[:2], R)
    strict.reset_cache()
    strict.on_request_finished(R)
    assert strict.tracked == ["r"]
    strict.complete_store(store)
    assert strict.tracked == []
    assert strict.take_events() == []


def test_build_manager_from_settings():
    manager = build_manager(
        Settings.parse({"cpu": {"capacity": "1MiB", "eviction_policy": "arc"}, "lifecycle": "strict"})
    )
    assert isinstance(manager.primary, CpuTier)
    manager.bind_region(RegionGeometry.fit(1 << 20, [4096], 1))
    assert manager.primary.num_rows == 256
    with pytest.raises(InvalidTransition):
        manager.lookup(KEYS, R)
    assert build_manager(Settings.parse({"cpu": {"capacity": "1MiB"}})).lookup(KEYS, R) == [LookupResult.MISS] * 6


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"tiers": [{"type": "sf", "root": "x"}]}, r"kv_connector_extra_config.tiers\[0\].type: unknown.*sf"),
        ({"cpu": {"capacity": "1MiB", "eviction_policy": "lro"}}, r"cpu.eviction_policy: unknown.*'lru'"),
        ({"cpu": {"capacity": "1MiB", "pin": True}}, r"kv_connector_extra_config.cpu.pin: unknown key"),
    ],
)
def test_build_manager_mistakes_are_one_line(extra, text):
    with pytest.raises(SettingsError, match=text) as error:
        build_manager(Settings.parse({"cpu": {"capacity": "1MiB"}, **extra}))
    assert "\n" not in str(error.value)


class AnyOrder(RuleBasedStateMachine):
    """Calls in any order, right or wrong, against a tolerant manager over a strict tier.

    The tier raises on anything that the manager should have kept from it (L1, L7), so that it doesn't is the test.
    """

    def __init__(self):
        super().__init__()
        self.manager = make(strict=False)
        self.handles = []

    ids = st.sampled_from(["x", "y"])
    keys = st.integers(0, 5).map(lambda n: KEYS[n : n + 3])

    @rule(req=ids)
    def new(self, req):
        self.manager.on_new_request(ReqContext(req))

    @rule(req=ids)
    def finish(self, req):
        self.manager.on_request_finished(ReqContext(req))

    @rule(req=ids, keys=keys)
    def store(self, req, keys):
        prepared = self.manager.prepare_store(keys, ReqContext(req))
        if prepared.keys:
            self.handles.append(lambda: self.manager.complete_store(prepared))

    @rule(req=ids, keys=keys)
    def load(self, req, keys):
        self.manager.touch(keys, ReqContext(req))
        prepared = self.manager.prepare_load(keys, ReqContext(req))
        if prepared.keys:
            self.handles.append(lambda: self.manager.complete_load(prepared))

    @rule(data=st.data())
    def complete(self, data):
        if self.handles:
            self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1)))()

    @rule()
    def reset(self):
        self.manager.reset_cache()

    @invariant()
    def news_and_finishes_alternate(self):
        for req in ("x", "y"):
            told = [what for what, who in self.manager.primary.calls if who == req and what in ("new", "finished")]
            assert told == (["new", "finished"] * len(told))[: len(told)]
        assert len(self.manager._in_flight) == len(self.handles)
        self.manager.primary.check()

    def teardown(self):
        for complete in self.handles:
            complete()
        for req in ("x", "y"):
            self.manager.on_request_finished(ReqContext(req))
        assert_over(self.manager)


AnyOrder.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class TestAnyOrder(AnyOrder.TestCase):
    pass
