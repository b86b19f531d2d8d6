"""Every KV cache layout that vLLM makes: two ranks store chunks and load them into other blocks, byte for byte.

vLLM 0.32 places layer l's page of block b at `offset + l * layer_stride + b * block_stride` of one allocation; groups
overlay each other there, because a block belongs to one group at a time. The tensors here are views of such
allocations; what a copy must move is found by plain indexing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch

from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.contract.messages import DeviceJob, GroupTransfer, StepMessage
from vllm_tiered_offload.testing.fakes.seams import ManualExecutor
from vllm_tiered_offload.worker.copy_engines.host import HostCopyEngine
from vllm_tiered_offload.worker.layout import GroupLayout, build_group_layout
from vllm_tiered_offload.worker.worker import OffloadingConnectorWorker

BLOCKS, PER_CHUNK, ROWS = 24, 4, 8
Group = dict[str, torch.Tensor]


@dataclass
class Cache:
    """One rank's KV cache: layers by KV group, with the tokens of a block."""

    groups: list[tuple[int, Group]]
    memory: list[torch.Tensor] = field(default_factory=list)  # the allocations, as bytes


def placed(
    pages: list[tuple[tuple[int, ...], torch.dtype]],
    *,
    block_outermost: bool = False,
    padding: int = 0,
    kernel_blocks: int = 1,
    memory: torch.Tensor | None = None,
) -> tuple[Group, torch.Tensor]:
    """Layers whose pages have these shapes and types. `padding`: bytes behind each page that belong to nobody."""
    sizes = [prod(shape) * dtype.itemsize * kernel_blocks + padding for shape, dtype in pages]
    if memory is None:
        memory = torch.zeros(sum(sizes) * BLOCKS, dtype=torch.uint8)
    layers: Group = {}
    begin = 0
    for number, ((shape, dtype), size) in enumerate(zip(pages, sizes, strict=True)):
        block_stride = sum(sizes) if block_outermost else size
        stride = (block_stride if kernel_blocks == 1 else prod(shape) * dtype.itemsize) // dtype.itemsize
        inner = [prod(shape[i + 1 :]) for i in range(len(shape))]
        size_of_view, strides = (BLOCKS * kernel_blocks, *shape), (stride, *inner)
        blocks = torch.as_strided(memory.view(dtype), size_of_view, strides, begin // dtype.itemsize)
        layers[f"layer.{number}"] = blocks
        begin += size if block_outermost else size * BLOCKS
    return layers, memory


def one_group(*args: object, tokens: int = 16, **options: object) -> Cache:
    layers, memory = placed(*args, **options)  # type: ignore[arg-type]
    return Cache([(tokens, layers)], [memory])


def attention(dtype: torch.dtype, layers: int = 3) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Heads, tokens, keys and values side by side."""
    return [((2, 16, 8), dtype)] * layers


def turned() -> Cache:
    """Tokens before heads in memory, heads before tokens in the view (NHD seen as HND)."""
    layers, memory = placed([((16, 2, 8), torch.bfloat16)] * 2)
    return Cache([(16, {name: tensor.transpose(1, 2) for name, tensor in layers.items()})], [memory])


def overlaid(block_outermost: bool) -> Cache:
    """Two sliding-window groups and a full one over the same bytes, and one whose blocks are twice as long."""
    pages = attention(torch.bfloat16, layers=2)
    first, memory = placed(pages, block_outermost=block_outermost)
    longer = [((2, 32, 4), torch.bfloat16)] * 2
    others = [placed(shape, block_outermost=block_outermost, memory=memory)[0] for shape in (pages, pages, longer)]
    return Cache([(16, first), (16, others[0]), (16, others[1]), (32, others[2])], [memory])


def latent_and_indexer() -> Cache:
    """MLA with pages of two sizes in one group, the odd one not a multiple of the other."""
    return one_group([((16, 576), torch.bfloat16), ((16, 132), torch.uint8)] * 2, tokens=16)


def recurrent_beside_attention(block_outermost: bool) -> Cache:
    """Pages of two states as raw bytes, padded to the length of the attention pages that overlay them."""
    pages = attention(torch.bfloat16, layers=2)
    states = [((1, 1, 400), torch.int8)] * 2
    first, memory = placed(pages, block_outermost=block_outermost)
    padding = prod(pages[0][0]) * torch.bfloat16.itemsize - 400
    others = [placed(states, block_outermost=block_outermost, padding=padding, memory=memory)[0] for _ in range(2)]
    return Cache([(16, others[0]), (16, others[1]), (16, first)], [memory])


LAYOUTS: dict[str, Callable[[], Cache]] = {
    **{
        f"layer_outermost_{str(dtype).removeprefix('torch.')}": lambda dtype=dtype: one_group(attention(dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
    },
    "block_outermost": lambda: one_group(attention(torch.bfloat16), block_outermost=True),
    "padded_pages": lambda: one_group(attention(torch.bfloat16), padding=64),
    "padded_block_outermost": lambda: one_group(attention(torch.float32), padding=4, block_outermost=True),
    "mla": lambda: one_group([((16, 576), torch.bfloat16)] * 2),
    "mla_fp8": lambda: one_group([((16, 656), torch.uint8)] * 2),
    "mla_with_indexer": latent_and_indexer,
    "kernel_blocks": lambda: one_group([((2, 16, 8), torch.bfloat16)] * 2, tokens=64, kernel_blocks=4),
    "nhd_view": turned,
    "latent_float16": lambda: one_group([((16, 576), torch.float16)] * 3),
    "states_layer_outermost": lambda: recurrent_beside_attention(False),
    "states_block_outermost": lambda: recurrent_beside_attention(True),
    "groups_layer_outermost": lambda: overlaid(False),
    "groups_block_outermost": lambda: overlaid(True),
}


class Rank:
    """The worker half of one rank over a cache; copies run at the end of a step."""

    def __init__(self, cache: Cache, rank: int, slots: np.ndarray, writes: bool = True) -> None:
        self.cache = cache
        self.bit = 1 << rank
        self.layouts = layouts_of(cache)
        self.executor = ManualExecutor()
        config = WorkerConfig(1 << 30, PER_CHUNK)
        self.worker = OffloadingConnectorWorker(
            config,
            rank,
            lambda _config, layouts, mine: HostCopyEngine(layouts, mine, PER_CHUNK, 1, self.executor),
            writes,
        )
        self.worker.attach(self.layouts, slots)

    def run(self, message: StepMessage) -> dict[int, str | None]:
        """One step; how each job ended."""
        self.worker.bind(message)
        self.worker.start_loads()
        self.worker.submit_stores()
        while self.executor.jobs:
            self.executor.run_next()
        self.worker.take_transfer_results()
        acks = self.worker.build_report().acks
        self.worker.unbind()
        assert {ack.ranks for ack in acks.values()} <= {self.bit}
        return {job_id: ack.error for job_id, ack in acks.items()}

    def pages(self, group: int, blocks: list[int]) -> list[torch.Tensor]:
        """Views of every layer's page of these blocks, layer behind layer."""
        return [
            tensor[block * (len(tensor) // BLOCKS) : (block + 1) * (len(tensor) // BLOCKS)]
            for tensor in self.cache.groups[group][1].values()
            for block in blocks
        ]

    def read(self, group: int, blocks: list[int]) -> list[bytes]:
        return [page.contiguous().view(torch.uint8).numpy().tobytes() for page in self.pages(group, blocks)]

    def memory(self) -> list[bytes]:
        return [memory.numpy().tobytes() for memory in self.cache.memory]

    def memory_with(self, group: int, blocks: list[int], pages: list[torch.Tensor]) -> list[bytes]:
        """What `memory` is once these blocks hold these pages, by plain indexing; nothing is changed for good."""
        kept = [memory.clone() for memory in self.cache.memory]
        for page, wanted in zip(self.pages(group, blocks), pages, strict=True):
            page.copy_(wanted)
        expected = self.memory()
        for memory, old in zip(self.cache.memory, kept, strict=True):
            memory.copy_(old)
        return expected

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for memory in self.cache.memory:
            memory.copy_(torch.from_numpy(rng.integers(0, 256, memory.numel(), dtype=np.uint8)))


def layouts_of(cache: Cache) -> list[GroupLayout]:
    return [build_group_layout(index, layers, BLOCKS, tokens) for index, (tokens, layers) in enumerate(cache.groups)]


def two_ranks(layout: str) -> tuple[list[Rank], np.ndarray]:
    caches = [LAYOUTS[layout]() for _ in range(2)]
    slot_bytes = [max(one.block_bytes for one in layouts_of(cache)) * PER_CHUNK for cache in caches]
    rows = np.full((ROWS, sum(slot_bytes) + 40), 0xA5, np.uint8)
    begin = [0, slot_bytes[0]]
    return [
        Rank(cache, rank, rows[:, begin[rank] : begin[rank] + slot_bytes[rank]]) for rank, cache in enumerate(caches)
    ], rows


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_23_and_37_loads_from_any_place_in_a_chunk(layout: str, offset: int) -> None:
    """Three chunks of four blocks of each KV group; a load that begins `offset` blocks into the first of them.

    Every rank has bytes of its own and gets them back; no other byte of the cache and of the rows changes.
    Fails when a load ignores where in the chunk it begins, and when a kernel's block is taken for the scheduler's.
    """
    ranks, rows = two_ranks(layout)
    for number, rank in enumerate(ranks):
        rank.fill(number)
    for group in range(len(ranks[0].cache.groups)):
        source, target = list(range(1, 13)), list(range(23, 11, -1))[offset:]
        store = DeviceJob(1, "", [GroupTransfer(group, [5, 0, 3], source)])
        load = DeviceJob(2, "r", [GroupTransfer(group, [5, 0, 3], target, offset)])
        unused = rows[[1, 2, 4, 6, 7]].tobytes()
        before = [rank.memory() for rank in ranks]
        for rank in ranks:
            assert rank.run(StepMessage(stores=[store])) == {1: None}
        assert [rank.memory() for rank in ranks] == before
        stored = rows.tobytes()
        for rank in ranks:
            expected = rank.memory_with(group, target, rank.pages(group, source[offset:]))
            assert rank.run(StepMessage(loads=[load])) == {2: None}
            assert rank.memory() == expected
        assert rows.tobytes() == stored
        assert rows[[1, 2, 4, 6, 7]].tobytes() == unused
        assert (rows[:, -40:] == 0xA5).all()


@pytest.mark.parametrize("layout", ["groups_layer_outermost", "groups_block_outermost"])
def test_one_job_of_all_groups(layout: str) -> None:
    """A load of one request fills each KV group's part; a chunk whose front was left out comes back from its place."""
    ranks, _ = two_ranks(layout)
    stored = [(0, 1, [1, 2, 3, 4], 0), (1, 2, [5, 6], 2), (3, 4, [7], 3)]
    loaded = [(0, 1, [10, 11, 12], 1), (1, 2, [13], 3), (3, 4, [15], 3)]
    store, load = (
        DeviceJob(job_id, "r", [GroupTransfer(group, [row], blocks, first) for group, row, blocks, first in parts])
        for job_id, parts in ((1, stored), (2, loaded))
    )
    for number, rank in enumerate(ranks):
        rank.fill(10 + number)
        wanted = [rank.read(0, [2, 3, 4]), rank.read(1, [6]), rank.read(3, [7])]
        assert rank.run(StepMessage(stores=[store])) == {1: None}
        assert rank.run(StepMessage(loads=[load])) == {2: None}
        assert [rank.read(0, [10, 11, 12]), rank.read(1, [13]), rank.read(3, [15])] == wanted


def sharing_ranks(layout: str, writers: list[int]) -> tuple[list[Rank], np.ndarray]:
    """Ranks of which each has the slot of its writer: writers [0, 0, 2, 2] are two pairs, with two slots in a row."""
    caches = [LAYOUTS[layout]() for _ in writers]
    slot_bytes = max(one.block_bytes for one in layouts_of(caches[0])) * PER_CHUNK
    slots = sorted(set(writers))
    rows = np.full((ROWS, len(slots) * slot_bytes + 40), 0xA5, np.uint8)
    begin = {writer: slots.index(writer) * slot_bytes for writer in slots}
    ranks = [
        Rank(cache, rank, rows[:, begin[writer] : begin[writer] + slot_bytes], writes=rank == writer)
        for rank, (cache, writer) in enumerate(zip(caches, writers, strict=True))
    ]
    return ranks, rows


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("writers", [[0, 0], [0, 0, 2, 2], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("layout", ["mla", "mla_fp8", "mla_with_indexer", "latent_float16"])
def test_ranks_with_the_same_cache_store_it_once(layout: str, writers: list[int], offset: int) -> None:
    """MLA on several ranks: a slot, which the first of those that hold the same writes and all of them load from.

    Each acknowledges both jobs; no other byte of the caches and of the rows changes, in whichever order ranks come.
    Fails when another rank writes too (it has other bytes here), and when it loads from a slot of its own.
    """
    ranks, rows = sharing_ranks(layout, writers)
    for number, rank in enumerate(ranks):
        rank.fill(number)
    before = [rank.memory() for rank in ranks]
    source, target = list(range(1, 13)), list(range(23, 11, -1))[offset:]
    store = DeviceJob(1, "", [GroupTransfer(0, [5, 0, 3], source)])
    load = DeviceJob(2, "r", [GroupTransfer(0, [5, 0, 3], target, offset)])
    stored = []
    for rank in ranks:
        assert rank.run(StepMessage(stores=[store])) == {1: None}
        stored.append(rows.tobytes())
    assert [rank.memory() for rank in ranks] == before
    wrote = [now != then for then, now in pairwise([b"\xa5" * rows.nbytes, *stored])]
    assert wrote == [rank == writer for rank, writer in enumerate(writers)]
    for rank, writer in reversed(list(zip(ranks, writers, strict=True))):
        expected = rank.memory_with(0, target, [page.clone() for page in ranks[writer].pages(0, source[offset:])])
        assert rank.run(StepMessage(loads=[load])) == {2: None}
        assert rank.memory() == expected
    assert rows.tobytes() == stored[-1]
    assert (rows[[1, 2, 4, 6, 7]] == 0xA5).all()
    assert (rows[:, -40:] == 0xA5).all()


def test_a_cache_whose_blocks_come_second_is_refused_at_start() -> None:
    """Keys and values in front of the blocks, as older backends had it: said with the layer's name."""
    layers = {"layer.0": torch.zeros(2, BLOCKS, 16, 2, 8)}
    with pytest.raises(ValueError, match=r"layer\.0.*is the block dimension first"):
        build_group_layout(0, layers, BLOCKS, 16)
