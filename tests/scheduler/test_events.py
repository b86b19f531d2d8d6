"""Where the scheduler half notes what KV events will tell, and that real tiers' events come out whole."""

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_tiered_offload.contract.fingerprint import FIELDS, Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import LookupResult, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey, make_offload_key
from vllm_tiered_offload.contract.managers import ResidencyEvent
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.hierarchy.manager import HierarchyLimits, TieringOffloadingManager
from vllm_tiered_offload.telemetry.events import ChunkPayload, EventLedger
from vllm_tiered_offload.tiers.cpu.tier import CpuTier, CpuTierSettings
from vllm_tiered_offload.tiers.fs.lanes import Lanes
from vllm_tiered_offload.tiers.fs.tier import FsTier
from vllm_tiered_offload.tiers.guard import TierGuard

from .harness import BLOCK, Half


def describe(request: Any, _group_idx: int, chunk: int) -> ChunkPayload:
    tokens = request.tokens[chunk * BLOCK : (chunk + 1) * BLOCK]
    parent = request.block_hashes[chunk - 1] if chunk else None
    return ChunkPayload((request.block_hashes[chunk],), parent, array("i", tokens), BLOCK)


def listening(**settings: Any) -> tuple[Half, EventLedger]:
    half = Half(**settings)
    book = half.inner._events = EventLedger(describe, {"cpu": 1, "fs": 1})
    return half, book


def tell(half: Half, *events: ResidencyEvent) -> list[list[int]]:
    """Tokens of every chunk that comes out when the tiers say this."""
    half.manager.take_events = lambda: list(events)  # type: ignore[method-assign]
    told = half.inner.take_events()
    half.manager.take_events = list  # type: ignore[method-assign]
    return [payload.token_ids.tolist() for announcement in told for payload in announcement.payloads]


def keys_of(request: Any, end: int) -> tuple[OffloadKey, ...]:
    return tuple(make_offload_key(block_hash, 0) for block_hash in request.block_hashes[:end])


def test_stores_of_a_step_and_final_stores_are_noted() -> None:
    half, book = listening()
    request = half.add("a", 10)
    first = half.start(request, 6)
    half.step({request: 4})
    second = half.step()
    request.append(50)
    request.append(51)
    request.num_computed_tokens = 12
    half.finish(request, aborted=True)
    last = half.step()
    half.ack(first, second, last)
    keys = keys_of(request, 2)
    assert tell(half, ResidencyEvent(keys, "cpu", True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert tell(half, ResidencyEvent(keys, "cpu", False)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(book) == len(half.inner._jobs)


def test_a_final_store_is_noted_with_its_own_chunk() -> None:
    """Mutation: numbering a final store's chunks from 0 tells the wrong tokens."""
    half, book = listening()
    request = half.add("a", 7)
    half.ack(half.start(request, 7))
    half.step({request: 1})
    request.append(100)
    request.append(101)
    half.finish(request)
    half.ack(half.step())
    assert tell(half, ResidencyEvent(keys_of(request, 2)[1:], "cpu", True)) == [[4, 5, 6, 100]]
    half.assert_empty()
    assert len(book) == 1


def test_a_store_that_fails_is_forgotten() -> None:
    half, book = listening()
    request = half.add("a", 8)
    message = half.start(request, 8)
    assert book.num_held == 2
    half.ack(message, error="no")
    half.finish(request)
    half.step()
    tell(half)
    half.assert_empty()
    assert len(book) == 0


def test_chunks_of_an_earlier_process_are_told_by_who_looked_them_up() -> None:
    """They were promoted from disk: no store of ours ever knew their tokens."""
    half, book = listening()
    request = half.add("b", 9)
    keys = keys_of(request, 2)
    half.manager.answers = dict.fromkeys(keys, LookupResult.HIT_PENDING)
    assert half.ask(request) == (None, False)
    half.step()
    assert tell(half, ResidencyEvent(keys, "cpu", True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    half.finish(request, aborted=True)
    half.step()
    assert book.num_held == 0
    assert tell(half, ResidencyEvent(keys, "cpu", False)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    half.assert_empty()
    assert len(book) == 0


def test_a_lookup_that_found_nothing_notes_nothing() -> None:
    half, book = listening()
    request = half.add("b", 9)
    assert half.ask(request) == (0, False)
    assert len(book) == 0


class Inline:
    def submit(self, job: Callable[[], None], /) -> None:
        job()

    def shutdown(self, wait: bool = True) -> None:
        pass


class Region:
    """Rows in this process."""

    failed = False

    def __init__(self, geometry: RegionGeometry) -> None:
        self.geometry = geometry
        self._rows = [memoryview(bytearray(geometry.row_bytes)) for _ in range(geometry.num_rows)]

    def start(self, announcement: RegionAnnouncement) -> None:
        pass

    def take(self) -> "Region":
        return self

    def rows(self) -> list[memoryview]:
        return self._rows

    def close(self) -> None:
        pass


def real_tiers(root: Path, rows: int) -> TieringOffloadingManager:
    lane = Inline()
    disk = FsTier.from_settings(
        {"root": str(root), "io": "buffered"},
        "tiers[0]",
        engine_id="e",
        events=True,
        lanes=Lanes(lane, lane, lane, lane),
    )
    geometry = RegionGeometry(rows, (4096,), 1)
    region: Any = Region(geometry)
    primary = CpuTier(CpuTierSettings(capacity=rows * 4096), strict=True, events=True)
    limits = HierarchyLimits(cascade_share=1.0)
    manager = TieringOffloadingManager(
        primary, [TierGuard(disk, "fs")], strict=True, limits=limits, region_access=region
    )
    manager.bind_region(geometry)
    manager.open_region(RegionAnnouncement(1, 1, 1, geometry, Fingerprint.of(dict.fromkeys(FIELDS, 1))))
    manager.on_schedule_end()
    return manager


def test_case_54_with_real_tiers(tmp_path: Path) -> None:
    """Host memory evicts what the disk has just got, and all of it is taken in one batch."""
    manager = real_tiers(tmp_path, rows=2)
    old, new = ([OffloadKey(f"{name}{index}".encode()) for index in range(2)] for name in ("old", "new"))
    book = EventLedger(
        lambda name, _group_idx, chunk: ChunkPayload((b"%s%d" % (name, chunk),), None, array("i", [chunk]), 1),
        {"cpu": 1, "fs": 1},
    )
    for name, keys in ((b"old", old), (b"new", new)):
        ctx = ReqContext(name.decode())
        manager.on_new_request(ctx)
        manager.on_schedule_end()
        prepared = manager.prepare_store(keys, ctx)
        assert prepared.keys == tuple(keys)
        book.hold(name, enumerate(keys))
        manager.complete_store(prepared)
        manager.on_schedule_end()
        manager.on_request_finished(ctx)
        book.release(keys)
    told = [
        (announcement.medium, announcement.stored, [payload.block_hashes[0] for payload in announcement.payloads])
        for announcement in book.announce(manager.take_events())
    ]
    assert told == [
        ("cpu", True, [b"old0", b"old1"]),
        ("cpu", False, [b"old1", b"old0"]),  # tails first
        ("cpu", True, [b"new0", b"new1"]),
        ("fs", True, [b"old0", b"old1"]),
        ("fs", True, [b"new0", b"new1"]),
    ]
    assert len(book) == 4
    manager.reset_cache()
    book.announce(manager.take_events())
    assert len(book) == 0
    manager.shutdown()


def test_a_chunk_that_two_requests_complete_in_one_step_is_noted_once() -> None:
    """Mutation: noting what the whole step stores under each request leaves a hold that nobody ends."""
    half, book = listening()
    first, second = half.add("a", 9), half.add("b", 9)
    for request in (first, second):
        half.ask(request)
        half.allocate(request, 9)
    message = half.step({first: 9, second: 9})
    assert [len(job.transfers[0].rows) for job in message.stores] == [2]
    half.ack(message)
    assert book.num_held == 0
