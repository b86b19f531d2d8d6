"""KV events: the ledger of payloads, and the events that vLLM publishes."""

from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import ResidencyEvent
from vllm_tiered_offload.telemetry.events import Announcement, ChunkPayload, EventLedger

K = [OffloadKey(f"k{index}".encode()) for index in range(4)]


def payload(request: Any, _group_idx: int, chunk: int) -> ChunkPayload:
    if request == "broken":
        raise RuntimeError("no such chunk")
    return ChunkPayload((b"h%d" % chunk,), b"h%d" % (chunk - 1) if chunk else None, array("i", [chunk] * 4), 4)


def ledger(**media: int) -> EventLedger:
    return EventLedger(payload, media or {"cpu": 1, "fs": 1})


def stored(*keys: OffloadKey, medium: str = "cpu") -> ResidencyEvent:
    return ResidencyEvent(keys, medium, True)


def removed(*keys: OffloadKey, medium: str = "cpu") -> ResidencyEvent:
    return ResidencyEvent(keys, medium, False)


def told(announcements: list[Announcement]) -> list[tuple[str, str, list[bytes]]]:
    """(medium, sign, last hash of each chunk)"""
    return [(a.medium, "+" if a.stored else "-", [p.block_hashes[-1] for p in a.payloads]) for a in announcements]


def test_a_store_is_announced_with_its_payload_and_forgotten_with_its_removal() -> None:
    book = ledger()
    book.hold("r", enumerate(K[:2]))
    (first,) = book.announce([stored(*K[:2])])
    assert [p.token_ids.tolist() for p in first.payloads] == [[0] * 4, [1] * 4]
    assert [p.parent_hash for p in first.payloads] == [None, b"h0"]
    book.release(K[:2])
    assert told(book.announce([])) == []
    assert told(book.announce([removed(*K[:2])])) == [("cpu", "-", [b"h0", b"h1"])]
    assert len(book) == 0


def test_case_54_one_batch_evicts_from_host_memory_and_stores_on_disk() -> None:
    """Mutation: dropping the entry in `_removed` instead of at the batch's end loses the disk's event."""
    book = ledger()
    book.hold("r", [(0, K[0])])
    book.announce([stored(K[0])])
    book.release([K[0]])
    batch = book.announce([removed(K[0]), stored(K[0], medium="fs")])
    assert told(batch) == [("cpu", "-", [b"h0"]), ("fs", "+", [b"h0"])]
    assert batch[1].payloads[0].token_ids.tolist() == [0] * 4
    assert told(book.announce([stored(K[0])])) == [("cpu", "+", [b"h0"])]  # promoted again
    book.announce([removed(K[0])])
    assert K[0] in book
    assert told(book.announce([removed(K[0], medium="fs")])) == [("fs", "-", [b"h0"])]
    assert len(book) == 0


def test_a_store_that_failed_leaves_nothing() -> None:
    book = ledger()
    book.hold("r", [(0, K[0])])
    book.release([K[0]])
    assert book.announce([]) == []
    assert len(book) == 0


def test_two_holders_of_one_chunk() -> None:
    book = ledger()
    book.hold("r", [(0, K[0])])
    book.hold("s", [(0, K[0])])
    book.release([K[0]])
    book.announce([])
    assert book.num_held == 1
    book.release([K[0]])
    book.announce([])
    assert len(book) == 0


def test_what_nobody_knows_is_left_out_with_its_removal() -> None:
    """Consumers count, so a removal without a store must not come."""
    book = ledger()
    book.hold("r", [(1, K[1])])
    assert told(book.announce([stored(K[0], K[1]), removed(K[0], K[1])])) == [
        ("cpu", "+", [b"h1"]),
        ("cpu", "-", [b"h1"]),
    ]
    assert book.announce([removed(K[1]), removed(K[1], medium="fs")]) == []


def test_two_tiers_of_one_medium_are_two_copies() -> None:
    book = ledger(fs=2)
    book.hold("r", [(0, K[0])])
    assert len(book.announce([stored(K[0], medium="fs")] * 3)) == 2  # one of them told the same thing twice
    book.release([K[0]])
    assert len(book.announce([removed(K[0], medium="fs")])) == 1
    assert K[0] in book
    assert len(book.announce([removed(K[0], medium="fs")] * 2)) == 1
    assert len(book) == 0


def test_a_payload_that_cannot_be_read_costs_its_events_only(caplog: pytest.LogCaptureFixture) -> None:
    book = ledger()
    book.hold("broken", enumerate(K[:2]))
    assert book.announce([stored(*K[:2])]) == []
    book.release(K[:2])
    assert len(caplog.records) == 1


steps = st.lists(
    st.tuples(st.sampled_from(["hold", "release", "+cpu", "-cpu", "+fs", "-fs", "batch"]), st.sampled_from(K)),
    max_size=60,
)


@given(steps)
def test_consumers_can_count(moves: list[tuple[str, OffloadKey]]) -> None:
    """Whatever tiers say: never a removal before its store, and in the end nothing is kept without a reason."""
    book, holds, batch = ledger(), Counter[OffloadKey](), list[ResidencyEvent]()
    seen: Counter[tuple[str, bytes]] = Counter()

    def deliver() -> None:
        for announcement in book.announce(batch):
            for one in announcement.payloads:
                seen[announcement.medium, one.block_hashes[0]] += 1 if announcement.stored else -1
        batch.clear()
        assert all(count in (0, 1) for count in seen.values())
        book.check()

    for move, key in moves:
        if move == "hold":
            book.hold("r", [(K.index(key), key)])
            holds[key] += 1
        elif move == "release" and holds[key]:
            book.release([key])
            holds[key] -= 1
        elif move == "batch":
            deliver()
        elif move[0] in "+-":
            batch.append(ResidencyEvent((key,), move[1:], move[0] == "+"))
    deliver()
    for key, count in holds.items():
        book.release([key] * count)
    batch += [removed(*K, medium=medium) for medium in ("cpu", "fs")]
    deliver()
    assert len(book) == 0
    assert not +seen


# ---- vLLM's types --------------------------------------------------------------------------------------------------


def request(tokens: int, block: int = 4, **fields: Any) -> Any:
    from vllm_tiered_offload.testing.simulator import builders

    made = builders.request("r", list(range(tokens)), 1, block)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def shape(block: int = 4, per_chunk: int = 2, hash_tokens: int = 4) -> Any:
    from vllm_tiered_offload.scheduler.views import GroupShape

    return GroupShape(block, block * per_chunk, hash_tokens)


def test_a_chunk_of_several_blocks_names_each_of_them() -> None:
    from vllm_tiered_offload.connector.events import describe_chunk

    r = request(16)
    second = describe_chunk({0: shape()}, r, 0, 1)
    assert second.block_hashes == tuple(r.block_hashes[2:4])
    assert second.parent_hash == r.block_hashes[1]
    assert second.token_ids.tolist() == list(range(8, 16))
    assert second.block_tokens == 4
    assert second.extra_keys == (None, None)
    assert describe_chunk({0: shape()}, r, 0, 0).parent_hash is None
    coarse = describe_chunk(
        {3: shape(block=8, per_chunk=1)}, r, 3, 1
    )  # two hashes a block: the last one is the block's
    assert coarse.block_hashes == (r.block_hashes[3],)
    assert (second.group_idx, coarse.group_idx) == (0, 3)
    with pytest.raises(ValueError, match="chunk 2 of request r is not there"):
        describe_chunk({0: shape()}, r, 0, 2)


def test_drafts_are_named_by_the_blocks_that_they_are_of() -> None:
    """Their keys reach farther than the chunk; what is told is what the device would tell of these blocks."""
    from dataclasses import replace

    from vllm_tiered_offload.connector.events import describe_chunk

    r = request(20)
    told_of = describe_chunk({0: replace(shape(), reads_next_token=True)}, r, 0, 1)
    assert told_of == describe_chunk({0: shape()}, r, 0, 1)
    assert told_of.token_ids.tolist() == list(range(8, 16))


def test_lora_and_salt_are_told() -> None:
    from vllm_tiered_offload.connector.events import describe_chunk

    lora = SimpleNamespace(adapter_id=7, name="mine", lora_name="mine", lora_path="/lora", lora_int_id=7)
    r = request(8, cache_salt="s", lora_request=lora, session_id="talk")
    told_of = describe_chunk({0: shape()}, r, 0, 0)
    assert (told_of.lora_id, told_of.lora_name, told_of.session_id) == (7, "mine", "talk")
    assert told_of.extra_keys is not None
    assert "s" in told_of.extra_keys[0]
    assert "s" not in told_of.extra_keys[1]  # as in vLLM: the salt is part of the first block alone


def engine(**config: Any) -> tuple[Any, list[Any]]:
    """vLLM's scheduler with both halves in this process, and every event that it publishes."""
    from vllm.config import KVEventsConfig

    from vllm_tiered_offload.testing.simulator import builders
    from vllm_tiered_offload.testing.simulator.config import SimConfig
    from vllm_tiered_offload.testing.simulator.engine import Simulation

    def vllm_config(*args: Any) -> Any:
        built = original(*args)
        built.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        return built

    original = builders.vllm_config
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(builders, "vllm_config", vllm_config)
        sim = Simulation(SimConfig(**config))
    published: list[Any] = []
    sim.scheduler.kv_event_publisher = SimpleNamespace(
        publish=lambda batch: published.extend(batch.events), shutdown=lambda: None
    )
    return sim, published


def run(sim: Any, tokens: list[int]) -> None:
    sim.add_request(tokens, 1)
    sim.run_until_idle()


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_host_memory_announces_blocks_as_the_device_does(per_chunk: int) -> None:
    """The device's own events are the oracle, from the same engine and requests."""
    sim, published = engine(blocks_per_chunk=per_chunk)
    prompt = list(range(100, 132))
    run(sim, prompt)
    run(sim, [*prompt[:16], *range(200, 216)])
    on_device = {tuple(one): one for one in blocks(published, "GPU")}
    in_memory = blocks(published, "CPU")
    assert len(in_memory) == 12
    assert all(tuple(one) in on_device for one in in_memory)
    sim.converge()
    sim.close()


def blocks(events: list[Any], medium: str) -> list[tuple[Any, ...]]:
    """Every stored block of a medium: its hash, its parent's, its tokens and what else distinguishes it."""
    found = []
    for event in events:
        if type(event).__name__ != "BlockStored" or event.medium != medium:
            continue
        parent = event.parent_block_hash
        for index, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            extra = event.extra_keys[index] if event.extra_keys else None
            kind = (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, event.lora_name)
            found.append((block_hash, parent, tuple(tokens), extra, *kind))
            parent = block_hash
    return found


def test_removals_name_the_blocks_that_were_stored() -> None:
    sim, published = engine(cpu_chunks=8, blocks_per_chunk=2)
    for seed in range(4):
        run(sim, list(range(1000 * seed, 1000 * seed + 32)))
    sim.reset()
    run(sim, [1, 2, 3])  # events travel with a step
    kept: Counter[bytes] = Counter()
    for event in published:
        if getattr(event, "medium", None) == "CPU":
            kept.update(dict.fromkeys(event.block_hashes, 1 if type(event).__name__ == "BlockStored" else -1))
            assert min(kept.values()) >= 0
    assert len(kept) == 32
    assert not +kept
    assert len(sim.connector.connector_scheduler._events) == 0
    sim.converge()
    sim.close()


def test_without_events_nothing_is_kept() -> None:
    from vllm_tiered_offload.testing.simulator.config import SimConfig
    from vllm_tiered_offload.testing.simulator.engine import Simulation

    sim = Simulation(SimConfig())
    run(sim, list(range(16)))
    assert sim.connector.connector_scheduler._events is None
    assert list(sim.connector.take_events()) == []
    assert sim.connector.connector_scheduler.manager.take_events() == []
    sim.converge()
    sim.close()
