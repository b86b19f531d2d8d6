"""KV tensor layout: which bytes belong to a device block, and in which order a slot holds them.

Theory of operation. A KV tensor's first dimension counts blocks; the others may have any strides. All that a copy
needs is where the bytes of block 0 are and how far apart blocks are, so a tensor becomes *runs*: maximal pieces of
contiguous bytes, each with the address of its first byte in block 0 and the distance between blocks. A group packs the
runs of its tensors one behind the other, which is the block format of the host region:

    block: | runs of tensor 0 | runs of tensor 1 | ... |    tensors in the order given, runs in memory order

Then every run is cut to one common length (`piece_bytes`, the greatest common divisor), so that one index array
addresses the whole group:

    byte j of piece p of block b  =  memory[piece_address[p] + b * piece_stride[p] + j]
                                  =  packed block[p * piece_bytes + j]

Nothing here reads memory or cares which device an address belongs to. Layers that are views of the same bytes are
packed once; bytes that two tensors share in part are refused, because a load would write them twice.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch

from vllm_tiered_offload.contract.geometry import GroupGeometry

# The overlap check of interleaved tensors lists their runs; more than this many takes too long at start.
MAX_RUNS_CHECKED = 1 << 24

Layers = Mapping[str, torch.Tensor] | Sequence[tuple[str, torch.Tensor]]


class LayoutError(ValueError):
    """KV tensors that cannot be copied byte-exactly; raised at start, never later."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One distinct tensor of a group and its place in a packed block.

    `names` are all layers that share exactly these bytes. `offset` and `page_bytes` are bytes inside a packed block.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    offset: int
    page_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class GroupLayout:
    """Where the bytes of one KV group are on this rank; see the module text for `piece_*`.

    `piece_address` and `piece_stride` are int64 arrays of shape (pieces,), in bytes. `signature` names everything that
    decides the packed byte order (shapes, strides, types): it belongs into the fingerprint of what leaves the process.
    """

    group_idx: int
    geometry: GroupGeometry
    num_blocks: int
    tensors: tuple[PackedTensor, ...]
    device: torch.device
    piece_bytes: int
    piece_address: np.ndarray
    piece_stride: np.ndarray
    signature: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one packed block."""
        return self.geometry.block_bytes

    def offset_of(self, layer: str) -> int:
        """Where the page of `layer` begins inside a packed block, in bytes. Raises KeyError for an unknown layer."""
        for packed in self.tensors:
            if layer in packed.names:
                return packed.offset
        raise KeyError(layer)


@dataclass(frozen=True, slots=True)
class _Runs:
    """One tensor as runs: `offsets` of each run from `address`, all `run_bytes` long, blocks `block_stride` apart."""

    address: int
    num_blocks: int
    block_stride: int
    run_bytes: int
    dims: tuple[tuple[int, int], ...]  # (size, stride in bytes) outside a run, inside a block, widest stride first

    @property
    def offsets(self) -> np.ndarray:
        offsets = np.zeros(1, np.int64)
        for size, stride in self.dims:
            offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
        return offsets

    @property
    def page_bytes(self) -> int:
        total = self.run_bytes
        for size, _ in self.dims:
            total *= size
        return total

    @property
    def extent(self) -> tuple[int, int]:
        """First address and the address after the last byte."""
        last = sum((size - 1) * stride for size, stride in self.dims) + (self.num_blocks - 1) * self.block_stride
        return self.address, self.address + last + self.run_bytes


def build_group_layout(group_idx: int, layers: Layers, num_blocks: int, block_tokens: int) -> GroupLayout:
    """The layout of KV group `group_idx`.

    layers: layer name -> KV tensor, in packing order. The first dimension of each tensor is `num_blocks`, or a
        multiple of it where the attention kernel's blocks are smaller than the scheduler's (then that many
        consecutive entries are one block).
    num_blocks: device blocks as the scheduler counts them. block_tokens: tokens in one of them.

    Raises LayoutError with the layer's name when the bytes of a block cannot be told apart.
    """
    named = list(layers.items()) if isinstance(layers, Mapping) else list(layers)
    if not named:
        raise LayoutError(f"KV group {group_idx} has no layers: leave it out of offloading")
    if num_blocks < 1:
        raise LayoutError(f"KV group {group_idx} has {num_blocks} blocks")
    distinct = _distinct(named, num_blocks)
    _refuse_overlap(distinct)
    lengths, addresses, strides = _pack([runs for _, _, runs in distinct])
    piece_bytes, piece_address, piece_stride = _cut(lengths, addresses, strides)
    tensors = _place(distinct)
    return GroupLayout(
        group_idx=group_idx,
        geometry=GroupGeometry(block_tokens, sum(packed.page_bytes for packed in tensors)),
        num_blocks=num_blocks,
        tensors=tensors,
        device=_common_device(named),
        piece_bytes=piece_bytes,
        piece_address=piece_address,
        piece_stride=piece_stride,
        signature=_signature(distinct),
    )


def refuse_unfit(layout: GroupLayout, slots: np.ndarray, blocks_per_chunk: int) -> None:
    """Raise ValueError unless slots can hold the group's chunks: uint8 (num_rows, slot_bytes), contiguous bytes."""
    if slots.ndim != 2 or slots.dtype != np.uint8 or (slots.shape[1] > 1 and slots.strides[1] != 1):
        raise ValueError(f"slots must be uint8 (rows, bytes) with contiguous bytes, not {slots.dtype} {slots.shape}")
    if slots.shape[1] < blocks_per_chunk * layout.block_bytes:
        raise ValueError(
            f"a slot of {slots.shape[1]} bytes cannot hold {blocks_per_chunk} blocks of {layout.block_bytes} bytes of"
            f" KV group {layout.group_idx}: the region was made for other tensors or another blocks_per_chunk"
        )


def _distinct(named: list[tuple[str, torch.Tensor]], num_blocks: int) -> list[tuple[list[str], torch.Tensor, _Runs]]:
    """Each set of bytes once, with all layer names that mean it."""
    found: dict[_Runs, tuple[list[str], torch.Tensor, _Runs]] = {}
    for name, tensor in named:
        runs = _runs_of(name, tensor, num_blocks)
        found.setdefault(runs, ([], tensor, runs))[0].append(name)
    return list(found.values())


def _runs_of(name: str, tensor: torch.Tensor, num_blocks: int) -> _Runs:
    """Cut one tensor into runs; refuses what has no memory or visits a byte twice."""
    described = f"layer {name}: shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}, {tensor.dtype}"
    if tensor.dim() == 0 or tensor.numel() == 0 or tensor.device.type == "meta":
        raise LayoutError(f"{described}: the tensor has no bytes")
    kernel_blocks, rest = divmod(tensor.shape[0], num_blocks)
    if rest or not kernel_blocks:
        raise LayoutError(
            f"{described}: the first dimension is no multiple of the {num_blocks} device blocks; a layer laid out like"
            " this cannot be offloaded (is the block dimension first?)"
        )
    item, step = tensor.element_size(), tensor.stride(0) * tensor.element_size()
    inner = [(size, stride * item) for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)]
    inner = [(size, stride) for size, stride in [(kernel_blocks, step), *inner] if size > 1]
    inner.sort(key=lambda dim: -dim[1])
    block_stride = kernel_blocks * step
    if not _visits_each_byte_once([(num_blocks, block_stride), *inner], item):
        raise LayoutError(f"{described}: blocks or elements share bytes; such a view cannot be offloaded")
    run_bytes = item
    while inner and inner[-1][1] == run_bytes:
        run_bytes *= inner.pop()[0]
    return _Runs(tensor.data_ptr(), num_blocks, block_stride, run_bytes, tuple(inner))


def _visits_each_byte_once(dims: Iterable[tuple[int, int]], item: int) -> bool:
    """Whether each stride, narrowest first, steps over everything inside it (sufficient for "no byte twice")."""
    reach = item
    for size, stride in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True


def _refuse_overlap(distinct: list[tuple[list[str], torch.Tensor, _Runs]]) -> None:
    """Raise LayoutError when two tensors share some of their bytes. Only tensors whose extents meet are looked into."""
    cluster: list[tuple[str, _Runs]] = []
    end = 0
    for names, _, runs in sorted(distinct, key=lambda entry: entry[2].extent):
        start, stop = runs.extent
        if cluster and start >= end:
            _refuse_shared_bytes(cluster)
            cluster = []
        cluster.append((names[0], runs))
        end = max(end, stop) if len(cluster) > 1 else stop
    _refuse_shared_bytes(cluster)


def _refuse_shared_bytes(cluster: list[tuple[str, _Runs]]) -> None:
    """List every run of every block of tensors that lie between each other, sort, and look for neighbours that meet."""
    if len(cluster) < 2:
        return
    names = ", ".join(name for name, _ in cluster)
    if sum(runs.num_blocks * runs.page_bytes // runs.run_bytes for _, runs in cluster) > MAX_RUNS_CHECKED:
        raise LayoutError(f"layers {names} lie between each other in more than {MAX_RUNS_CHECKED} pieces: refused")
    starts, stops = [], []
    for _, runs in cluster:
        blocks = np.arange(runs.num_blocks, dtype=np.int64) * runs.block_stride + runs.address
        starts.append((blocks[:, None] + runs.offsets).ravel())
        stops.append(starts[-1] + runs.run_bytes)
    start, stop = np.concatenate(starts), np.concatenate(stops)
    order = np.argsort(start, kind="stable")
    if (start[order][1:] < stop[order][:-1]).any():
        raise LayoutError(
            f"layers {names} share a part of their bytes, but not all of them: such a KV cache cannot be offloaded"
        )


def _pack(packed: list[_Runs]) -> tuple[list[int], list[int], list[int]]:
    """Length, address in block 0 and block stride of each run in packed order; neighbours in memory become one run."""
    lengths: list[int] = []
    addresses: list[int] = []
    strides: list[int] = []
    for runs in packed:
        for address in (runs.offsets + runs.address).tolist():
            if lengths and strides[-1] == runs.block_stride and addresses[-1] + lengths[-1] == address:
                lengths[-1] += runs.run_bytes
                continue
            lengths.append(runs.run_bytes)
            addresses.append(address)
            strides.append(runs.block_stride)
    return lengths, addresses, strides


def _cut(lengths: list[int], addresses: list[int], strides: list[int]) -> tuple[int, np.ndarray, np.ndarray]:
    """Cut runs of different length into pieces of one length."""
    piece_bytes = gcd(*lengths)
    count = np.array(lengths, np.int64) // piece_bytes
    first = np.repeat(np.cumsum(count) - count, count)
    piece_address = np.repeat(np.array(addresses, np.int64), count) + (np.arange(count.sum()) - first) * piece_bytes
    return piece_bytes, piece_address, np.repeat(np.array(strides, np.int64), count)


def _place(distinct: list[tuple[list[str], torch.Tensor, _Runs]]) -> tuple[PackedTensor, ...]:
    offset, placed = 0, []
    for names, tensor, runs in distinct:
        placed.append(PackedTensor(tuple(names), tensor, offset, runs.page_bytes))
        offset += runs.page_bytes
    return tuple(placed)


def _common_device(named: list[tuple[str, torch.Tensor]]) -> torch.device:
    devices = {tensor.device for _, tensor in named}
    if len(devices) > 1:
        raise LayoutError(f"layers of one KV group lie on several devices: {sorted(map(str, devices))}")
    return devices.pop()


def _signature(distinct: list[tuple[list[str], torch.Tensor, _Runs]]) -> str:
    """What decides the order of bytes in a packed block. Addresses are left out: they change with every start."""
    return ";".join(
        f"{'='.join(names)}:{tensor.dtype}:{tuple(tensor.shape[1:])}:{tuple(tensor.stride()[1:])}:{runs.run_bytes}"
        for names, tensor, runs in distinct
    )
