"""The compiled host copy: fragments of any length at any address, nothing beside them, and a life without numba."""

import sys

import numpy as np
import pytest
import torch

from vllm_tiered_offload.worker.copy_engines import stream_kernel
from vllm_tiered_offload.worker.copy_engines.choice import host_way
from vllm_tiered_offload.worker.copy_engines.fragments import block_fragments, copies_of
from vllm_tiered_offload.worker.copy_engines.stream_kernel import stream_copy
from vllm_tiered_offload.worker.copy_plan import CopyPlan
from vllm_tiered_offload.worker.layout import build_group_layout


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call compiles again, and so does the first one after the test."""
    monkeypatch.setattr(stream_kernel, "stream_copy", stream_copy)
    stream_copy.cache_clear()
    yield
    stream_copy.cache_clear()


def test_any_length_at_any_address() -> None:
    """Every head, tail and length around a line, nothing beside a fragment. Whole lines for the tail make this fail."""
    pytest.importorskip("numba")
    kernel = stream_copy()
    assert kernel is not None
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, 1 << 18, np.uint8)
    target = np.zeros_like(source)
    length = np.concatenate([np.arange(300), [4096, 12345]])
    room = np.cumsum(length + 200)
    to, at = room - length + rng.integers(0, 64, len(length)), room - length + rng.integers(0, 64, len(length))
    expected = target.copy()
    for t, s, n in zip(to.tolist(), at.tolist(), length.tolist(), strict=True):
        expected[t : t + n] = source[s : s + n]
    order = rng.permutation(len(length))
    addresses = [(x[order] + base.ctypes.data).astype(np.uint64) for x, base in ((to, target), (at, source))]
    kernel(*addresses, length[order].astype(np.uint64))
    np.testing.assert_array_equal(target, expected)


@pytest.mark.usefixtures("fresh_choice")
def test_without_numba_numpy_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba is optional."""
    monkeypatch.setitem(sys.modules, "numba", None)
    assert host_way() == (None, "numpy")


@pytest.mark.usefixtures("fresh_choice")
def test_a_compiled_copy_that_moves_wrong_bytes_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the compiler made of it: a few awkward fragments are compared before it is trusted."""
    monkeypatch.setattr(stream_kernel, "_compile", lambda: lambda target, source, length: None)
    assert host_way() == (None, "numpy")


def test_fragments_are_as_long_as_they_can_be() -> None:
    """Pieces cut to a common length come together again; blocks that follow each other on both sides are one copy."""
    wide, narrow = torch.zeros(8, 48, dtype=torch.uint8), torch.zeros(8, 32, dtype=torch.uint8)
    layout = build_group_layout(0, {"wide": wide, "narrow": narrow}, 8, 16)
    assert layout.piece_bytes == 16
    fragments = block_fragments(layout)
    assert (fragments.offset.tolist(), fragments.length.tolist()) == ([0, 48], [48, 32])

    alone = build_group_layout(0, {"wide": wide}, 8, 16)
    slots = np.zeros((4, 96), np.uint8)
    plan = CopyPlan(0, np.array([2, 2, 1, 1]), np.array([0, 1, 0, 1]), np.array([3, 4, 5, 7]))
    copies = copies_of(plan, block_fragments(alone), 48, slots)
    assert copies.length.tolist() == [96, 48, 48]
    assert (copies.device - wide.data_ptr()).tolist() == [3 * 48, 5 * 48, 7 * 48]
    assert (copies.region - slots.ctypes.data).tolist() == [2 * 96, 96, 96 + 48]
    assert copies.num_bytes == 192
    # Rows lie side by side here, but a copy stays in one: rows may be pinned in different pieces.
    across = CopyPlan(0, np.array([1, 2]), np.array([1, 0]), np.array([3, 4]))
    assert copies_of(across, block_fragments(alone), 48, slots).length.tolist() == [48, 48]
