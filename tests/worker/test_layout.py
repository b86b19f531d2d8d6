"""KV tensor layouts: byte-exact round trips through a slot, neighbours untouched, or refused at start (case 37)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_offload.worker.copy_engines.base import Direction
from vllm_tiered_offload.worker.copy_engines.host_copy import HostGroupCopier
from vllm_tiered_offload.worker.copy_engines.stream_kernel import StreamCopy, stream_copy
from vllm_tiered_offload.worker.copy_plan import CopyPlan
from vllm_tiered_offload.worker.layout import LayoutError, build_group_layout

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.uint8]
SENTINEL = 0xA5


def byte_storage(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Every byte of the tensors' storages, distinct storages once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return [torch.tensor([], dtype=torch.uint8).set_(storage).numpy() for storage in storages.values()]


def block_copy(tensor: torch.Tensor, num_blocks: int, block: int) -> torch.Tensor:
    """The elements of one logical block, found by plain torch indexing (the reference of these tests)."""
    kernel = tensor.shape[0] // num_blocks
    return tensor[block * kernel : (block + 1) * kernel].clone()


def round_trip(layers: dict[str, torch.Tensor], num_blocks: int, chunk: int, rng: np.random.Generator) -> None:
    """Store some blocks, wipe them, load them elsewhere; check every byte of tensors and rows. Both ways to copy."""
    for kernel in (None, stream_copy()):
        round_trip_by(kernel, layers, num_blocks, chunk, rng)


def round_trip_by(
    kernel: StreamCopy | None, layers: dict[str, torch.Tensor], num_blocks: int, chunk: int, rng: np.random.Generator
) -> None:
    tensors = list(layers.values())
    memory = byte_storage(*tensors)
    for storage in memory:
        storage[...] = rng.integers(0, 256, storage.size, dtype=np.uint8)
    layout = build_group_layout(0, layers, num_blocks, 16)
    count = int(rng.integers(1, num_blocks // 2 + 1))
    picked = rng.permutation(num_blocks)[: 2 * count]
    source, target = picked[:count], picked[count:]
    num_rows = -(-count // chunk) + 2
    rows = np.full((num_rows, chunk * layout.block_bytes + 48), SENTINEL, np.uint8)
    slots = rows[:, 16 : 16 + chunk * layout.block_bytes]
    position = np.arange(count)
    row_of = rng.permutation(num_rows)[position // chunk]
    copier = HostGroupCopier(layout, slots, chunk, kernel)
    before = [storage.copy() for storage in memory]
    wanted = {name: [block_copy(t, num_blocks, int(b)) for b in source] for name, t in layers.items()}

    copier.copy(Direction.STORE, CopyPlan(0, row_of, position % chunk, source), 0, count)

    for storage, old in zip(memory, before, strict=True):
        np.testing.assert_array_equal(storage, old)
    written = np.zeros(rows.shape, bool)
    for row, sub in zip(row_of, position % chunk, strict=True):
        begin = 16 + sub * layout.block_bytes
        written[row, begin : begin + layout.block_bytes] = True
    assert (rows[~written] == SENTINEL).all()
    stored = rows.copy()

    expected = [storage.copy() for storage in memory]
    copier.copy(Direction.LOAD, CopyPlan(0, row_of, position % chunk, target), 0, count)

    np.testing.assert_array_equal(rows, stored)
    got = [storage.copy() for storage in memory]
    # The same load by plain torch indexing has to change the same bytes, and no others.
    for storage, old in zip(memory, expected, strict=True):
        storage[...] = old
    for name, tensor in layers.items():
        kernel = tensor.shape[0] // num_blocks
        for i, block in enumerate(target):
            tensor[block * kernel : (block + 1) * kernel] = wanted[name][i]
    for storage, loaded in zip(memory, got, strict=True):
        np.testing.assert_array_equal(storage, loaded)


@st.composite
def kv_layers(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], int]:
    """A group of layers: dense, padded, interleaved, block dimension inside, inner dimensions permuted or cut."""
    num_blocks = draw(st.integers(2, 12))
    kernel = draw(st.sampled_from([1, 1, 2, 3]))
    inner = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    layers: dict[str, torch.Tensor] = {}
    for index in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        order = draw(st.permutations(range(len(inner) + 1)))
        wide = [size + draw(st.integers(0, 2)) for size in (num_blocks * kernel, *inner)]
        storage = torch.zeros([wide[i] for i in order], dtype=dtype)
        tensor = storage.permute([order.index(i) for i in range(len(order))])
        cut = tuple(slice(0, size) for size in (num_blocks * kernel, *inner))
        layers[f"layer.{index}"] = tensor[cut]
    return layers, num_blocks


@settings(max_examples=150, deadline=None)
@given(group=kv_layers(), chunk=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_any_strides_round_trip(group: tuple[dict[str, torch.Tensor], int], chunk: int, seed: int) -> None:
    """Case 37. Packing a page in the wrong order, or a unit that divides no stride, makes this fail."""
    layers, num_blocks = group
    round_trip(layers, num_blocks, chunk, np.random.default_rng(seed))


@settings(max_examples=60, deadline=None)
@given(
    num_layers=st.integers(1, 4),
    num_blocks=st.integers(2, 9),
    page=st.integers(1, 40),
    gap=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
def test_interleaved_layers(
    num_layers: int, num_blocks: int, page: int, gap: int, dtype: torch.dtype, seed: int
) -> None:
    """Case 37: several layers in one allocation, block stride larger than the page."""
    storage = torch.zeros(num_blocks, num_layers, page + gap, dtype=dtype)
    layers = {f"layer.{i}": storage[:, i, :page] for i in range(num_layers)}
    round_trip(layers, num_blocks, 2, np.random.default_rng(seed))


def test_cpu_backend_layout_is_one_run_per_layer() -> None:
    """FACTS: [blocks, 2, 32, 128] bf16 dense. A page is one run, a block packs the layers one behind the other."""
    layers = {f"layer.{i}": torch.zeros(10, 2, 32, 128, dtype=torch.bfloat16) for i in range(3)}
    layout = build_group_layout(1, layers, 10, 32)
    assert (layout.group_idx, layout.geometry.block_tokens, layout.block_bytes) == (1, 32, 3 * 16384)
    assert layout.piece_bytes == 16384
    assert [layout.offset_of(name) for name in layers] == [0, 16384, 32768]
    assert [packed.page_bytes for packed in layout.tensors] == [16384] * 3


def test_dense_interleaved_layers_become_one_run() -> None:
    """All layers of a block side by side in memory: one piece a block, whatever the number of layers."""
    storage = torch.zeros(6, 4, 8, dtype=torch.float32)
    layout = build_group_layout(0, {f"layer.{i}": storage[:, i] for i in range(4)}, 6, 16)
    assert (layout.piece_bytes, len(layout.piece_address)) == (4 * 32, 1)
    assert layout.offset_of("layer.3") == 96


def test_turned_dense_page_is_one_run() -> None:
    """Case 37: transposed inner dimensions without gaps are copied in memory order, in one piece."""
    layout = build_group_layout(0, {"x": torch.zeros(4, 5, 3).transpose(1, 2)}, 4, 16)
    assert (layout.piece_bytes, len(layout.piece_address)) == (60, 1)


def test_pages_of_different_size_are_cut_to_one_length() -> None:
    """Case 37: 48 and 80 bytes a page have pieces of 16."""
    layers = {"small": torch.zeros(5, 12), "large": torch.zeros(5, 20)}
    assert build_group_layout(0, layers, 5, 16).piece_bytes == 16
    round_trip(layers, 5, 2, np.random.default_rng(0))


def test_layers_that_share_all_bytes_are_packed_once() -> None:
    """KV sharing: the same bytes under two names and two types are one tensor of the block."""
    kv = torch.zeros(4, 8, dtype=torch.bfloat16)
    layout = build_group_layout(0, [("a", kv), ("b", kv.view(torch.uint8)), ("c", torch.zeros(4, 8))], 4, 16)
    assert [packed.names for packed in layout.tensors] == [("a", "b"), ("c",)]
    assert layout.block_bytes == 16 + 32
    assert layout.offset_of("a") == layout.offset_of("b") == 0


def test_signature_tells_byte_orders_apart() -> None:
    """Same shape, other strides: other bytes in a packed block, so another signature; addresses do not matter."""
    dense, again = torch.zeros(4, 3, 5), torch.zeros(4, 3, 5)
    turned = torch.zeros(4, 5, 3).transpose(1, 2)
    signatures = [build_group_layout(0, {"x": t}, 4, 16).signature for t in (dense, again, turned)]
    assert signatures[0] == signatures[1] != signatures[2]


REFUSED = {
    "block dimension not first": (lambda: {"x": torch.zeros(2, 8, 4)}, "no multiple"),
    "fewer entries than blocks": (lambda: {"x": torch.zeros(4, 4)}, "no multiple"),
    "no bytes": (lambda: {"x": torch.zeros(8, 0)}, "no bytes"),
    "meta device": (lambda: {"x": torch.zeros(8, 4, device="meta")}, "no bytes"),
    "expanded": (lambda: {"x": torch.zeros(8, 1).expand(8, 4)}, "share bytes"),
    "blocks that overlap": (lambda: {"x": torch.zeros(40).as_strided((8, 4), (2, 1))}, "share bytes"),
    "no layers": (dict, "no layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_start(case: str) -> None:
    """Case 37: what cannot be told apart is refused with the layer's name, at start."""
    make, text = REFUSED[case]
    with pytest.raises(LayoutError, match=text):
        build_group_layout(0, make(), 8, 16)


@pytest.mark.parametrize("shift", [1, 3, 4, 7])
def test_partial_overlap_is_refused(shift: int) -> None:
    """Case 37: two layers share a part of their bytes; a load would write it twice."""
    storage = torch.zeros(8, 16)
    layers = {"a": storage[:, 0:8], "b": storage[:, shift : shift + 8]}
    with pytest.raises(LayoutError, match="a, b share a part"):
        build_group_layout(0, layers, 8, 16)


def test_interleaved_by_one_element_is_not_an_overlap() -> None:
    """Extents meet, bytes do not: exact, not by extent."""
    storage = torch.zeros(8, 6, 2)
    round_trip({"a": storage[:, :, 0], "b": storage[:, :, 1]}, 8, 2, np.random.default_rng(1))


def test_several_groups_over_one_tensor() -> None:
    """Gemma-3: groups have their own layouts over the same bytes."""
    kv = torch.zeros(4, 8)
    first, second = build_group_layout(0, {"a": kv}, 4, 16), build_group_layout(1, {"b": kv}, 4, 16)
    assert first.piece_address.tolist() == second.piece_address.tolist()


def test_region_between_tensors_in_memory() -> None:
    """The device window spans the region's bytes when the region lies between two layers: still exact, and quick."""
    arena = torch.zeros(3 << 20, dtype=torch.uint8)
    layers = {"low": arena[: 1 << 20].view(64, -1), "high": arena[2 << 20 :].view(64, -1)}
    slots = arena[1 << 20 : 2 << 20].numpy().reshape(8, -1)
    layout = build_group_layout(0, layers, 64, 16)
    copier = HostGroupCopier(layout, slots, 4)
    for name, tensor in layers.items():
        tensor[...] = 1 if name == "low" else 2
    plan = CopyPlan(0, np.array([3, 3, 5]), np.array([0, 1, 0]), np.array([9, 4, 63]))
    copier.copy(Direction.STORE, plan, 0, 3)
    assert slots.sum() == 3 * (16384 + 2 * 16384)
    other = CopyPlan(0, np.array([3, 3]), np.array([0, 1]), np.array([1, 2]))
    slots[3] += 1
    copier.copy(Direction.LOAD, other, 0, 2)
    assert (layers["low"][1:3] == 2).all()
    assert (layers["high"][1:3] == 3).all()
    assert (layers["low"][[0, 3]] == 1).all()


def test_slots_that_do_not_fit_are_refused() -> None:
    """Error texts name the setting."""
    layout = build_group_layout(0, {"a": torch.zeros(4, 8)}, 4, 16)
    with pytest.raises(ValueError, match="blocks_per_chunk"):
        HostGroupCopier(layout, np.zeros((2, 100), np.uint8), 4)
    with pytest.raises(ValueError, match="contiguous"):
        HostGroupCopier(layout, np.zeros((2, 512), np.uint8)[:, ::2], 4)
