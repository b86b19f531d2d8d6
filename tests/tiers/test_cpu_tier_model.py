"""The CPU tier against a model that keeps everything in plain dicts and sorts when it evicts.

After every step the tier's own invariants hold (`CpuTier.check`: no row in two places, free + used + orphaned are all
rows, pins are those of the handles in flight) and it answers as the model does. For LRU the model also predicts the
victims, so eviction order is exact: by access, tail first, pins and completion order without influence.

Mutations that were tried, each found in a few hundred steps:
- CpuTier.complete_store without its generation test: KeyError on `writing`.
- RowAllocator.give without its pin test: "a free row is pinned".
- RecencyOrder._take_tail popping the head (`next(iter(keys))`): the victims differ.
- RecencyOrder._return with the rank of a new access: the victims differ.
- RecencyOrder.insert without the second half of its condition: the victims differ.
- ArcPolicy that ignores `is_pinned`: "the policy holds other keys than the tier".
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tier_kit import assert_idle, begin, keys_of, make_tier

from vllm_tiered_offload.contract.jobs import LookupResult
from vllm_tiered_offload.tiers.errors import ContractError

CHAINS = {name: keys_of(name, 6) for name in "ab"}
ALL_KEYS = [key for keys in CHAINS.values() for key in keys]
ROWS = 5

slots = st.integers(0, 2)
chains = st.sampled_from(sorted(CHAINS))
# Mostly whole prefixes, so that requests share rows, sometimes a part from the middle.
spans = st.sampled_from([(0, 1), (0, 2), (0, 3), (0, 4), (0, 6), (1, 3), (2, 3), (3, 6), (5, 6)]).map(
    lambda s: slice(*s)
)


class TierModel(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self):
        super().__init__()
        self.tier = None
        self.slots = {}  # slot -> req_id
        self.requests = {}  # req_id -> context
        self.access = {}  # req_id -> access number, once it used a key
        self.next_req = 0
        self.last_access = 0
        self.position = 0
        self.rank = {}  # present or being written -> (access, -position)
        self.readable = {}  # key -> row
        self.writing = {}  # key -> row
        self.stores, self.loads, self.leases = [], [], []
        self.generation = 0

    @initialize()
    def start(self):
        self.tier = make_tier(ROWS, self.policy)

    # What the model knows

    def busy_rows(self):
        return {row for handle in (*self.stores, *self.loads, *self.leases) for row in handle.block_ids}

    def free_count(self):
        return ROWS - len({*self.readable.values(), *self.writing.values(), *self.busy_rows()})

    def access_of(self, req_id):
        if req_id not in self.access:
            self.last_access += 1
            self.access[req_id] = self.last_access
        return self.access[req_id]

    def place(self, key, access):
        self.position += 1
        self.rank[key] = (access, -self.position)

    def forget(self, key):
        self.readable.pop(key, None)
        self.writing.pop(key, None)
        self.rank.pop(key, None)

    def own_keys(self, req_id):
        """What the request used last. LRU's answer is our own rank; ARC also counts a touch by an older request."""
        if self.policy == "lru":
            return {key for key, rank in self.rank.items() if rank[0] == self.access.get(req_id)}
        access = self.tier._accesses.get(req_id)
        return {key for key in self.rank if access is not None and self.tier._policy.access_of(key) == access}

    def predict_store(self, keys, req_id):
        """(victims in order, new keys that get a row, accepted)."""
        new = [key for key in keys if key not in self.rank]
        busy = self.busy_rows()
        own = self.own_keys(req_id)
        evictable = [key for key, row in self.readable.items() if row not in busy and key not in {*keys, *own}]
        evictable.sort(key=self.rank.__getitem__)
        lacking = max(len(new) - self.free_count(), 0)
        fitting = new[: self.free_count() + min(lacking, len(evictable))]
        accepted = len(keys) if len(fitting) == len(new) else keys.index(new[len(fitting)])
        return evictable[:lacking], fitting, accepted

    # What happens

    def request(self, slot):
        """The request that lives in a slot; begins one in an empty slot."""
        if slot not in self.slots:
            self.next_req += 1
            self.slots[slot] = f"r{self.next_req}"
            self.requests[self.slots[slot]] = begin(self.tier, self.slots[slot])
        return self.slots[slot]

    @precondition(lambda self: self.slots)
    @rule(slot=slots)
    def finish(self, slot):
        if slot in self.slots:
            req_id = self.slots.pop(slot)
            self.tier.on_request_finished(self.requests.pop(req_id))
            self.access.pop(req_id, None)

    @precondition(lambda self: self.rank)
    @rule(slot=slots, chain=chains, span=spans)
    def touch(self, slot, chain, span):
        req_id, keys = self.request(slot), CHAINS[chain][span]
        self.tier.touch(keys, self.requests[req_id])
        if not any(key in self.rank for key in keys):
            return
        access, moved = self.access_of(req_id), False
        for key in keys:
            if key in self.rank and (self.rank[key][0] < access or (moved and self.rank[key][0] == access)):
                self.place(key, access)
                moved = True

    @rule(slot=slots, chain=chains, span=spans)
    def prepare_store(self, slot, chain, span):
        req_id, keys = self.request(slot), CHAINS[chain][span]
        own = self.own_keys(req_id)
        victims, fitting, accepted = self.predict_store(keys, req_id)
        busy, before = self.busy_rows(), dict(self.readable)
        self.tier.take_events()
        prepared = self.tier.prepare_store(keys, self.requests[req_id])
        gone = [key for event in self.tier.take_events() for key in event.keys]
        assert len(gone) == len(victims)
        assert not any(before[key] in busy for key in gone), "evicted although pinned"
        assert not set(gone) & set(keys), "evicted a key of the call"
        assert not set(gone) & own, "evicted what it used itself"
        if self.policy == "lru":
            assert gone == victims
        assert (list(prepared.keys), prepared.num_accepted) == (fitting, accepted)
        assert prepared.generation == self.generation
        for key in gone:
            self.forget(key)
        assert not set(prepared.block_ids) & {*self.readable.values(), *self.writing.values(), *busy}
        if not fitting:
            return
        self.writing.update(zip(prepared.keys, prepared.block_ids, strict=True))
        access, placed = self.access_of(req_id), False
        for key in keys[:accepted]:
            if key not in self.rank or (placed and self.rank[key][0] == access):
                self.place(key, access)
                placed = True
        self.stores.append(prepared)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), success=st.sampled_from([True, True, True, False]))
    def complete_store(self, data, success):
        prepared = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        self.tier.complete_store(prepared, () if success else prepared.keys)
        if prepared.generation != self.generation:
            return
        for key, row in zip(prepared.keys, prepared.block_ids, strict=True):
            del self.writing[key]
            if success:
                self.readable[key] = row
            else:
                self.forget(key)

    def leading(self, keys):
        length = next((i for i, key in enumerate(keys) if key not in self.readable), len(keys))
        return tuple(keys[:length]), tuple(self.readable[key] for key in keys[:length])

    @precondition(lambda self: self.readable)
    @rule(slot=slots, chain=chains, span=spans)
    def prepare_load(self, slot, chain, span):
        req_id, keys = self.request(slot), CHAINS[chain][span]
        prepared = self.tier.prepare_load(keys, self.requests[req_id])
        assert (prepared.keys, prepared.block_ids) == self.leading(keys)
        if prepared.keys:
            self.loads.append(prepared)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), fail=st.sampled_from([False, False, True]))
    def complete_load(self, data, fail):
        prepared = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        failed = data.draw(st.sets(st.sampled_from(prepared.keys), min_size=1)) if fail else ()
        self.tier.complete_load(prepared, failed)
        if prepared.generation == self.generation:
            for key, row in zip(prepared.keys, prepared.block_ids, strict=True):
                if key in failed and self.readable.get(key) == row:
                    self.forget(key)

    @precondition(lambda self: self.readable)
    @rule(chain=chains, span=spans)
    def lease(self, chain, span):
        lease = self.tier.lease(CHAINS[chain][span])
        assert (lease.keys, lease.block_ids) == self.leading(CHAINS[chain][span])
        if lease.keys:
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        self.tier.release(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @precondition(lambda self: self.rank)
    @rule(luck=st.sampled_from(range(8)))
    def reset(self, luck):
        if luck != 5:  # a rare event, or nothing else ever gets far
            return
        self.tier.reset_cache()
        self.generation += 1
        self.rank, self.readable, self.writing, self.access = {}, {}, {}, {}

    # What always holds

    @invariant()
    def tier_is_in_one_piece_and_answers_as_the_model_does(self):
        if self.tier is None:
            return
        self.tier.check()
        stats = self.tier.get_stats()
        assert ROWS - stats["rows_used"] - stats["rows_orphaned"] == self.free_count()
        assert stats["rows_used"] == len(self.rank)
        assert stats["rows_pinned"] == len(self.busy_rows())
        if self.requests:
            expected = [
                LookupResult.HIT
                if key in self.readable
                else LookupResult.HIT_PENDING
                if key in self.writing
                else LookupResult.MISS
                for key in ALL_KEYS
            ]
            assert self.tier.lookup(ALL_KEYS, next(iter(self.requests.values()))) == expected

    def teardown(self):
        if self.tier is None:
            return
        for prepared in self.stores:
            self.tier.complete_store(prepared)
            with pytest.raises(ContractError):
                self.tier.complete_store(prepared)
        for prepared in self.loads:
            self.tier.complete_load(prepared)
        for lease in self.leases:
            self.tier.release(lease)
        for req in self.requests.values():
            self.tier.on_request_finished(req)
        assert_idle(self.tier)


class ArcModel(TierModel):
    policy = "arc"


for machine in (TierModel, ArcModel):
    machine.TestCase.settings = settings(
        max_examples=100,
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


class TestLruModel(TierModel.TestCase):
    pass


class TestArcModel(ArcModel.TestCase):
    pass
