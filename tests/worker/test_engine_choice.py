"""Which engine a KV cache gets, and what the torch device makes of a machine that lacks something."""

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.worker.copy_engines import numa
from vllm_tiered_offload.worker.copy_engines.base import Direction
from vllm_tiered_offload.worker.copy_engines.device import Descriptors, DeviceError
from vllm_tiered_offload.worker.copy_engines.driver import CudaDriver
from vllm_tiered_offload.worker.copy_engines.fragments import Copies
from vllm_tiered_offload.worker.copy_engines.torch_device import TorchCopies
from vllm_tiered_offload.worker.layout import build_group_layout


def test_a_cache_on_another_device_gets_the_device_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device of the tensors, with vLLM's batched copy where vLLM has one; caches on the host get the host's."""
    worker_half = pytest.importorskip("vllm_tiered_offload.connector.worker_half")
    given: list[object] = []
    monkeypatch.setattr(worker_half, "device_engine", lambda *args: given.append(args))
    config, slots = WorkerConfig(capacity=1 << 20, blocks_per_chunk=1), np.zeros((4, 64), np.uint8)
    layout = build_group_layout(0, {"x": torch.zeros(4, 16)}, 4, 16)
    assert worker_half.engine_factory(None)(config, [layout], slots).describe().startswith("host")
    assert not given
    object.__setattr__(layout, "device", torch.device("cuda", 0))
    worker_half.engine_factory(None)(config, [layout], slots)
    from vllm import _custom_ops

    assert given == [(config, [layout], slots, _custom_ops.swap_blocks_batch)]


class HostPretending:
    """As much of a TorchDevice as TorchCopies needs, without a device."""

    def on(self, stream: object) -> object:
        return contextlib.nullcontext()


def test_torch_copies_find_the_tensor_of_an_address() -> None:
    """Two layers in one storage, a third elsewhere, rows with bytes between them; an address of nobody is refused."""
    arena, alone = torch.arange(256, dtype=torch.uint8), torch.arange(100, 164, dtype=torch.uint8)
    layers = {"a": arena[:64].view(4, 16), "b": arena[128:192].view(4, 16), "c": alone.view(4, 16)}
    layout = build_group_layout(0, layers, 4, 16)
    rows = np.zeros((4, 64), np.uint8)
    copies = TorchCopies(HostPretending(), [layout], rows[:, 8:56])  # type: ignore[arg-type]
    device = np.array([layers["b"].data_ptr() + 32, alone.data_ptr()])
    region = np.array([rows[2, 8:].ctypes.data, rows[3, 40:].ctypes.data])
    descriptors = Descriptors(np.zeros((3, 4), np.int64))
    descriptors.fill(Direction.STORE, Copies(device, region, np.array([16, 16])))
    copies.launch(descriptors, None)
    expected = np.zeros_like(rows)
    expected[2, 8:24], expected[3, 40:56] = np.arange(160, 176), np.arange(100, 116)
    np.testing.assert_array_equal(rows, expected)
    descriptors.fill(Direction.STORE, Copies(np.array([8]), region[:1], np.array([16])))
    with pytest.raises(DeviceError, match="in no tensor"):
        copies.launch(descriptors, None)


def test_a_driver_says_what_it_refused() -> None:
    """The arguments reach the library as it wants them, and its error text comes back. Swapping source and target in
    `copy_batch` makes this fail."""
    seen: list[tuple[int, ...]] = []

    class Library:
        @staticmethod
        def cuMemcpyBatchAsync(targets: Any, sources: Any, lengths: Any, count: Any, *rest: Any) -> int:
            vector = ctypes.c_int64 * count.value
            seen.extend(tuple(vector.from_address(at.value)) for at in (targets, sources, lengths))
            _, _, _, refused, _ = rest
            refused._obj.value = 1
            return 700

        @staticmethod
        def cuGetErrorString(code: Any, text: Any) -> int:
            text._obj.value = b"an illegal memory access was encountered"
            return 0

    driver = CudaDriver.__new__(CudaDriver)
    driver._library = Library()  # type: ignore[assignment]
    descriptors = Descriptors(np.zeros((3, 8), np.int64))
    descriptors.fill(Direction.STORE, Copies(np.array([10, 20]), np.array([30, 40]), np.array([5, 6])))
    with pytest.raises(DeviceError, match=r"copy 1 of 2\): an illegal memory access was encountered \(700\)"):
        driver.copy_batch(descriptors, 1234)
    assert seen == [(30, 40), (10, 20), (5, 6)]


@pytest.mark.skipif(sys.platform != "linux", reason="libcuda is looked for where Linux has it")
def test_a_machine_without_a_driver() -> None:
    """OSError with the library's name, which TorchDevice turns into "not offered"."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    with pytest.raises(OSError, match="libcuda"):
        CudaDriver()


def test_memory_nodes(tmp_path: Path) -> None:
    """What the system says of a PCI device; -1 and nothing mean unknown. Binding never fails, it says no."""
    for name, text in (("0000:17:00.0", "1\n"), ("0001:c1:00.0", "-1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    assert numa.node_of_pci_device(0, 0x17, 0, tmp_path) == 1
    assert numa.node_of_pci_device(1, 0xC1, 0, tmp_path) is None
    assert numa.node_of_pci_device(0, 1, 0, tmp_path) is None
    assert numa.bind_memory(4096, 4096, 900) is False


def test_the_gather_kernel_in_tritons_interpreter() -> None:
    """Byte-exact for any length in words, nothing beside it. In a process of its own: the interpreter is chosen at
    import. A mask of `at <= words` makes this fail."""
    pytest.importorskip("triton")
    code = """
import torch
from vllm_tiered_offload.worker.copy_engines.gather_kernel import copy_fragments
torch.manual_seed(0)
length = torch.tensor([8, 16, 8192, 8200, 24, 40000] + [8 * i for i in range(1, 20)])
room = torch.cumsum(length + 64, 0)
source = torch.randint(0, 255, (int(room[-1]),), dtype=torch.uint8)
target, order = torch.zeros_like(source), torch.randperm(len(length))
start = (room - length - 64)[order]
copy_fragments(start + source.data_ptr(), start + target.data_ptr(), length[order].contiguous(), len(length))
expected = torch.zeros_like(source)
for s, n in zip(start.tolist(), length[order].tolist()):
    expected[s : s + n] = source[s : s + n]
assert torch.equal(target, expected)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
