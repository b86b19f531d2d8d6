"""Promises to peers: pinned until fetched, released or expired; everything else is refused (cases 57 and 58)."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_tiered_offload import OffloadKey, RegionGeometry, ReqContext
from vllm_tiered_offload.testing.fakes.seams import ManualClock
from vllm_tiered_offload.tiers.cpu.tier import CpuTier, CpuTierSettings
from vllm_tiered_offload.tiers.p2p.leases import READ_ON_SECONDS, PromisedRow, PromiseLimits, Promises
from vllm_tiered_offload.tiers.p2p.messages import Confirm, Fetch, Found, Lookup, Reading, Reason, Refuse

pytestmark = pytest.mark.fast

PEER, OTHER = b"peer", b"other"
ROWS = 8


def keys(count: int, name: str = "k") -> list[OffloadKey]:
    return [OffloadKey(f"{name}{index}".encode()) for index in range(count)]


class World:
    """A primary tier with chunks k0 .. k5 in it, and the promises over it."""

    def __init__(self, seconds: float = 10.0, rows: int = ROWS, promises: int = 4, rows_a_peer: int = ROWS) -> None:
        self.clock = ManualClock()
        self.primary = CpuTier(CpuTierSettings(capacity=ROWS * 4096), strict=True)
        self.primary.bind_region(RegionGeometry(ROWS, (4096,), 1))
        self.req = ReqContext("r")
        self.primary.on_new_request(self.req)
        self.primary.complete_store(self.primary.prepare_store(keys(6), self.req))
        self.shared: set[OffloadKey] = set(keys(6))
        self.promises = Promises(
            self.primary, self.shared, PromiseLimits(seconds, rows, rows_a_peer, promises), clock=self.clock
        )

    @property
    def pinned(self) -> int:
        return int(self.primary.get_stats()["rows_pinned"])

    def ask(self, count: int, round_: int = 1, request: int = 1, peer: bytes = PEER) -> Found:
        found = self.promises.make(peer, Lookup(request, round_, tuple(keys(count))))
        assert isinstance(found, Found)
        return found

    def fetch(
        self, *parts: int, round_: int = 1, request: int = 1, peer: bytes = PEER, epoch: bytes = b""
    ) -> list[PromisedRow] | Reason:
        wanted = Fetch(request, round_, epoch or self.promises.epoch, parts)
        answer = self.promises.fetch(peer, wanted)
        if not isinstance(answer, Refuse):
            self.promises.done(peer, request, round_, parts)
        self.promises.check()
        return answer.reason if isinstance(answer, Refuse) else answer


def never(row: PromisedRow) -> bool:
    """Every proof takes work."""
    return False


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.promises.check()
    world.promises.reset()
    assert world.pinned == world.promises.num_rows == len(world.promises) == 0
    world.primary.on_request_finished(world.req)
    world.primary.check()


def test_what_is_there_is_promised(world: World) -> None:
    found = world.ask(8)
    assert (found.parts, found.seconds, found.epoch) == ((0, 1, 2, 3, 4, 5), 10.0, world.promises.epoch)
    assert world.pinned == 6


def test_what_may_not_leave_is_not_promised(world: World) -> None:
    """Case 46's other side: a chunk that is resident, but was never offered to the tier, is not in it.

    Made to fail by leasing `lookup.keys` as they are.
    """
    world.shared.remove(keys(3)[2])
    assert world.ask(6).parts == (0, 1, 3, 4, 5)
    world.shared.clear()
    assert world.ask(6, round_=2).parts == ()
    assert world.pinned == 5
    assert world.fetch(2) is Reason.RANGE


def test_what_has_left_memory_is_a_gap(world: World) -> None:
    """It was offered once and is not resident any more. Made to fail by one lease for all keys."""
    world.shared.update(keys(8, "gone"))
    asked = (*keys(2), *keys(1, "gone"), *keys(6)[2:4], *keys(8, "gone")[1:3], keys(6)[5])
    found = world.promises.make(PEER, Lookup(1, 1, asked))
    assert isinstance(found, Found)
    assert found.parts == (0, 1, 3, 4, 7)
    rows = world.fetch(*found.parts)
    assert isinstance(rows, list)
    assert [row.key for row in rows] == [asked[part] for part in found.parts]
    assert world.pinned == 0


def test_a_promise_ends_with_its_last_part(world: World) -> None:
    world.ask(3)
    rows = world.fetch(0, 2)
    assert isinstance(rows, list)
    assert [(row.part, row.key) for row in rows] == [(0, b"k0"), (2, b"k2")]
    assert world.pinned == 3
    world.fetch(1)
    assert world.pinned == 0
    assert world.fetch(1) is Reason.GONE


def test_case_57_a_late_fetch_is_refused_and_nothing_stays_pinned() -> None:
    """Case 57: a fetch 61 s after the promise. Made to fail by `expire` that keeps the last one, and by a fetch that
    does not expire first."""
    world = World(seconds=60.0)
    world.ask(4)
    world.clock.advance(59.0)
    assert isinstance(world.fetch(0), list)
    assert world.promises.next_deadline == 60.0
    world.clock.advance(2.0)
    assert world.fetch(1) is Reason.GONE
    assert world.pinned == 0
    assert world.promises.next_deadline is None
    assert world.promises.num_expired == 1


def test_case_57_the_deadline_alone_unpins(world: World) -> None:
    world.ask(4)
    world.ask(2, round_=2)
    world.clock.advance(10.0)
    world.promises.expire()
    assert world.pinned == 0


@pytest.mark.parametrize(
    ("parts", "epoch", "reason"),
    [
        ((3,), b"", Reason.RANGE),
        ((0, 8000), b"", Reason.RANGE),
        ((1, 1), b"", Reason.REPLAYED),
        ((0,), b"e" * 16, Reason.STALE),
    ],
)
def test_a_fetch_of_what_was_not_promised(world: World, parts: tuple[int, ...], epoch: bytes, reason: Reason) -> None:
    """It is refused whole and changes nothing: the right fetch still gets its rows."""
    world.ask(3)
    assert world.fetch(*parts, epoch=epoch) is reason
    assert isinstance(world.fetch(0, 1, 2), list)


def test_a_replayed_fetch_is_refused(world: World) -> None:
    """Also where only one of its parts was fetched before, and that part's row may be another chunk's soon."""
    world.ask(3)
    assert isinstance(world.fetch(0), list)
    assert world.fetch(0) is Reason.REPLAYED
    assert world.fetch(1, 0) is Reason.REPLAYED
    assert isinstance(world.fetch(1), list)


def test_a_promise_is_its_peers_own(world: World) -> None:
    world.ask(3)
    assert world.fetch(0, peer=OTHER) is Reason.GONE
    assert world.fetch(0, request=2) is Reason.GONE
    world.promises.release(OTHER, 1, 1)
    assert isinstance(world.fetch(0), list)


def test_a_fetch_from_before_a_reset_is_stale(world: World) -> None:
    """The same numbers mean another promise after it."""
    old = world.ask(3)
    world.promises.reset()
    assert world.pinned == 0
    world.ask(3)
    assert world.fetch(0, epoch=old.epoch) is Reason.STALE


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_case_58_overlapping_rounds_are_independent(world: World, order: tuple[int, int]) -> None:
    """Case 58: two rounds of one request, ended in both orders. Made to fail by telling promises apart by request."""
    world.ask(2, round_=1)
    world.ask(4, round_=2)
    sizes = {1: 2, 2: 4}
    first, second = order
    assert isinstance(world.fetch(*range(sizes[first]), round_=first), list)
    assert world.fetch(0, round_=first) is Reason.GONE
    assert world.pinned == sizes[second]
    assert isinstance(world.fetch(*range(sizes[second]), round_=second), list)
    assert world.pinned == 0


def test_case_58_the_end_of_one_round_leaves_the_other(world: World) -> None:
    world.ask(4, round_=1)
    world.ask(4, round_=2)
    world.promises.release(PEER, 1, 1)
    assert world.fetch(0, round_=1) is Reason.GONE
    assert isinstance(world.fetch(0, 1, 2, 3, round_=2), list)


def test_a_round_that_is_asked_again_has_one_promise(world: World) -> None:
    world.ask(4)
    world.ask(2)
    assert world.promises.num_rows == 2
    assert world.fetch(3) is Reason.RANGE


def test_what_a_peer_reads_is_pinned_until_it_confirms(world: World) -> None:
    """Each part once, in any grouping; nothing that was not begun is confirmed. Made to fail by ending the promise
    when everything was handed out."""
    world.ask(3)
    promises, epoch = world.promises, world.promises.epoch

    def confirm(*parts: int) -> Reason | int:
        rows = promises.confirm(PEER, Confirm(1, 1, epoch, parts))
        promises.check()
        if isinstance(rows, Refuse):
            return rows.reason
        promises.done(PEER, 1, 1, parts)
        return len(parts)

    assert promises.begin_reading(PEER, Reading(1, 1, epoch, (0, 1))) is None
    assert promises.begin_reading(PEER, Reading(1, 1, epoch, (2,), True)) is None
    assert promises.needs_help
    assert promises.begin_reading(PEER, Reading(1, 1, epoch, (0,))) == Refuse(1, 1, Reason.REPLAYED)
    assert world.fetch(1) is Reason.REPLAYED
    assert (world.pinned, promises.num_reading) == (3, 3)
    assert confirm(0, 2) == 2
    assert confirm(2) is Reason.RANGE
    assert (world.pinned, promises.num_reading) == (3, 1)
    assert confirm(1) == 1
    assert (world.pinned, promises.num_reading, promises.needs_help) == (0, 0, False)
    assert confirm(1) is Reason.GONE


def test_what_a_peer_reads_is_proved_once_before_it_is_confirmed(world: World) -> None:
    """In bits, in the order in which it was asked for, rounds by turns; at the latest along with the confirmation.

    Made to fail by proving one round to its end before the next one.
    """
    promises, epoch = world.promises, world.promises.epoch
    for round_, parts in ((1, (2, 0, 1)), (2, (0, 1))):
        world.ask(3, round_=round_)
        assert promises.begin_reading(PEER, Reading(1, round_, epoch, parts)) is None

    def proved() -> tuple[int, list[int]] | None:
        some = promises.next_to_prove(2, never)
        promises.check()
        return None if some is None else (some.round, [row.part for row in some.rows])

    assert proved() == (1, [2, 0])
    assert proved() == (2, [0, 1])
    rows = promises.confirm(PEER, Confirm(1, 1, epoch, (0, 1)))
    assert isinstance(rows, list)
    assert [row.part for row in rows] == [1]
    assert proved() is None
    assert promises.begin_reading(PEER, Reading(1, 2, epoch, (2,))) is None
    assert proved() == (2, [2])
    assert proved() is None
    assert promises.begin_reading(PEER, Reading(1, 1, epoch, (3,))) == Refuse(1, 1, Reason.RANGE)


def test_what_is_proved_already_is_told_at_once(world: World) -> None:
    """All of it that fits into a message. Made to fail by counting it as work."""
    promises, epoch = world.promises, world.promises.epoch
    world.ask(6)
    assert promises.begin_reading(PEER, Reading(1, 1, epoch, (0, 1, 2, 3, 4, 5))) is None
    some = promises.next_to_prove(1, lambda row: row.part not in (2, 4))
    assert some is not None
    assert [row.part for row in some.rows] == [0, 1, 2, 3]
    some = promises.next_to_prove(1, never)
    assert some is not None
    assert [row.part for row in some.rows] == [4]


def test_what_a_reader_was_promised_is_expected() -> None:
    """Of a peer that has read before, each row once, and none that it has begun to read, or that it fetches.

    Made to fail by expecting it of everybody, and by keeping what was handed out.
    """
    world = World(rows=40, promises=8, rows_a_peer=40)
    promises, epoch = world.promises, world.promises.epoch

    def expected() -> list[int]:
        rows = promises.next_expected(2, never)
        promises.check()
        return [row.part for row in rows]

    world.ask(6, round_=1)
    assert expected() == []
    assert promises.begin_reading(PEER, Reading(1, 1, epoch, (0,))) is None
    world.ask(6, round_=2)
    world.ask(1, round_=3)
    world.ask(1, round_=4, peer=OTHER)
    assert promises.begin_reading(PEER, Reading(1, 2, epoch, (1,))) is None
    assert isinstance(world.fetch(3, round_=2), list)
    assert [expected() for _ in range(4)] == [[0, 2], [4, 5], [0], []]
    world.ask(2, round_=5)
    promises.drop_peer(PEER)
    assert expected() == []
    world.ask(2, round_=6)
    assert expected() == []


def test_case_57_a_read_that_took_too_long_is_not_confirmed(world: World) -> None:
    """Case 57: the lease ended while the peer was reading, so what it read may be another chunk. The READ is helped to
    its end nevertheless, or the peer would wait for it. Made to fail by helping open promises alone."""
    world.ask(3)
    assert world.promises.begin_reading(PEER, Reading(1, 1, world.promises.epoch, (0,))) is None
    confirm = Confirm(1, 1, world.promises.epoch, (0,))
    world.clock.advance(10.0)
    assert world.promises.confirm(PEER, confirm) == Refuse(1, 1, Reason.GONE)
    assert (world.promises.num_reading, world.promises.are_read, world.promises.needs_help) == (0, True, True)
    world.clock.advance(READ_ON_SECONDS)
    assert (world.promises.are_read, world.promises.needs_help) == (False, False)
    world.promises.reset()
    assert world.promises.confirm(PEER, confirm) == Refuse(1, 1, Reason.STALE)


@pytest.mark.parametrize("alone", [False, True])
def test_nobody_is_helped_when_all_was_confirmed_or_read_alone(world: World, alone: bool) -> None:
    """An idle engine sleeps. Made to fail by helping after each promise, and those that read alone."""
    epoch = world.promises.epoch
    world.ask(1)
    assert world.promises.begin_reading(PEER, Reading(1, 1, epoch, (0,), alone)) is None
    if not alone:
        assert world.promises.confirm(PEER, Confirm(1, 1, epoch, (0,))) != Refuse(1, 1, Reason.GONE)
        world.promises.done(PEER, 1, 1, (0,))
    world.promises.reset()
    assert not world.promises.are_read


def test_rows_and_promises_are_bounded() -> None:
    """Made to fail by leaving either bound out."""
    world = World(rows=5, promises=3)
    assert len(world.ask(3, round_=1).parts) == 3
    assert len(world.ask(3, round_=2, peer=OTHER).parts) == 2
    assert world.promises.make(PEER, Lookup(1, 3, tuple(keys(1)))) == Refuse(1, 3, Reason.BUSY)
    world.promises.drop_peer(PEER)
    for round_ in (4, 5, 6):
        assert len(world.ask(1, round_=round_).parts) == 1
    world.promises.drop_peer(OTHER)
    assert world.promises.make(PEER, Lookup(1, 7, tuple(keys(1)))) == Refuse(1, 7, Reason.BUSY)
    assert len(world.ask(2, round_=7, peer=OTHER).parts) == 2
    world.promises.check()


def test_one_peer_does_not_take_all() -> None:
    """Made to fail by leaving `rows_a_peer` out."""
    world = World(rows_a_peer=4)
    assert len(world.ask(6).parts) == 4
    assert world.promises.make(PEER, Lookup(1, 2, tuple(keys(1)))) == Refuse(1, 2, Reason.BUSY)
    assert len(world.ask(6, peer=OTHER).parts) == 4


class AnyOrder(RuleBasedStateMachine):
    """Whatever peers do in whatever order: no row is handed out that is not pinned, none stays pinned for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(seconds=5.0, rows=7, promises=3, rows_a_peer=5)

    peers, requests, rounds = st.sampled_from([PEER, OTHER]), st.integers(1, 2), st.integers(1, 2)

    @rule(peer=peers, request=requests, round_=rounds, count=st.integers(1, 8))
    def ask(self, peer: bytes, request: int, round_: int, count: int) -> None:
        self.world.promises.make(peer, Lookup(request, round_, tuple(keys(count))))

    @rule(peer=peers, request=requests, round_=rounds, parts=st.lists(st.integers(0, 7), min_size=1, max_size=4))
    def fetch(self, peer: bytes, request: int, round_: int, parts: list[int]) -> None:
        rows = self.world.promises.fetch(peer, Fetch(request, round_, self.world.promises.epoch, tuple(parts)))
        if isinstance(rows, list):
            for row in rows:
                assert self.world.primary._leases.is_held(row.row)
                assert self.world.primary._leases.readable[row.key] == row.row
            self.world.promises.done(peer, request, round_, parts)

    @rule(
        peer=peers,
        request=requests,
        round_=rounds,
        parts=st.lists(st.integers(0, 7), min_size=1, max_size=4),
        alone=st.booleans(),
    )
    def begin_reading(self, peer: bytes, request: int, round_: int, parts: list[int], alone: bool) -> None:
        reading = Reading(request, round_, self.world.promises.epoch, tuple(parts), alone)
        self.world.promises.begin_reading(peer, reading)

    @rule(peer=peers, request=requests, round_=rounds, parts=st.lists(st.integers(0, 7), min_size=1, max_size=4))
    def confirm(self, peer: bytes, request: int, round_: int, parts: list[int]) -> None:
        rows = self.world.promises.confirm(peer, Confirm(request, round_, self.world.promises.epoch, tuple(parts)))
        if isinstance(rows, list):
            assert all(self.world.primary._leases.is_held(row.row) for row in rows)
            self.world.promises.done(peer, request, round_, parts)

    @rule(rows=st.integers(1, 3))
    def prove(self, rows: int) -> None:
        some = self.world.promises.next_to_prove(rows, never)
        assert some is None or all(self.world.primary._leases.is_held(row.row) for row in some.rows)

    @rule(rows=st.integers(1, 3))
    def expect(self, rows: int) -> None:
        some = self.world.promises.next_expected(rows, never)
        assert all(self.world.primary._leases.is_held(row.row) for row in some)

    @rule(peer=peers, request=requests, round_=rounds)
    def release(self, peer: bytes, request: int, round_: int) -> None:
        self.world.promises.release(peer, request, round_)

    @rule(peer=peers)
    def drop(self, peer: bytes) -> None:
        self.world.promises.drop_peer(peer)

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        self.world.promises.expire()
        deadline = self.world.promises.next_deadline
        assert deadline is None or self.world.clock() < deadline <= self.world.clock() + 5.0

    @rule()
    def reset(self) -> None:
        self.world.promises.reset()
        assert self.world.pinned == 0

    @invariant()
    def holds(self) -> None:
        self.world.promises.check()
        assert (self.world.promises.num_rows == 0) == (self.world.pinned == 0)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
