"""An accelerator through torch's device API: `torch.cuda` (which means ROCm where torch was built for it), `torch.xpu`.

What torch has no words for is asked of the driver (driver.py). Every way to copy is tried on a few bytes at start, and
offered only if they arrive: libraries, driver versions and virtual machines leave out one or the other.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm_tiered_offload.worker.copy_engines.base import Direction
from vllm_tiered_offload.worker.copy_engines.choice import KERNEL
from vllm_tiered_offload.worker.copy_engines.device import (
    CopyDevice,
    CopyMethod,
    Descriptors,
    DeviceError,
    DeviceEvent,
    Stream,
)
from vllm_tiered_offload.worker.copy_engines.driver import BatchCopies, CudaDriver, HipDriver, SingleCopies
from vllm_tiered_offload.worker.copy_engines.fragments import Copies
from vllm_tiered_offload.worker.copy_engines.numa import node_of_pci_device
from vllm_tiered_offload.worker.layout import GroupLayout

logger = logging.getLogger(__name__)

# vLLM's op: (source addresses, target addresses, lengths), int64 host tensors; on torch's current stream.
BatchedOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
TRIED_BYTES = 4096


class TorchEvent(DeviceEvent):
    """An event of torch, recorded."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_complete(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, TorchEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class TorchDevice(CopyDevice):
    """See the module text. op: vLLM's batched copy where the caller has it (this room must not import vLLM)."""

    def __init__(self, device: torch.device, op: BatchedOp | None = None) -> None:
        self._device = torch.device(device.type, device.index or 0)
        self._api: Any = getattr(torch, device.type)
        self.name = "rocm" if device.type == "cuda" and torch.version.hip else device.type
        self._op = op
        self._driver = self._load_driver()

    def enter_thread(self) -> None:
        self._api.set_device(self._device)

    def open_stream(self, urgent: bool) -> Stream:
        return self._api.Stream(self._device, priority=-1 if urgent else 0)

    def record_compute(self) -> TorchEvent:
        event = self._api.Event()
        event.record(self._api.current_stream(self._device))
        return TorchEvent(event)

    def wait_event(self, stream: Stream, event: DeviceEvent) -> None:
        assert isinstance(event, TorchEvent)
        stream.wait_event(event.event)

    def record(self, stream: Stream) -> TorchEvent:
        event = self._api.Event(enable_timing=True)
        event.record(stream)
        return TorchEvent(event)

    def drain(self, stream: Stream) -> None:
        stream.synchronize()

    def descriptors(self, capacity: int) -> Descriptors:
        try:
            tensor = torch.empty((3, capacity), dtype=torch.int64, device="cpu", pin_memory=True)
        except RuntimeError:  # no pinned memory left: only the kernel needs it, and says so by failing its job
            tensor = torch.empty((3, capacity), dtype=torch.int64, device="cpu")
        return Descriptors(tensor.numpy(), owner=tensor)

    def register(self, address: int, num_bytes: int) -> None:
        if self._driver is None:
            raise DeviceError(f"no driver library was found to pin memory for {self.name}")
        self.enter_thread()
        self._driver.register(address, num_bytes)

    def unregister(self, address: int) -> None:
        if self._driver is not None:
            self.enter_thread()
            self._driver.unregister(address)

    def methods(self, layouts: Sequence[GroupLayout], slots: np.ndarray) -> Mapping[str, CopyMethod]:
        offered: list[Callable[[], CopyMethod]] = []
        driver, op = self._driver, self._op
        if driver is not None and self.name == "cuda":
            offered += [lambda: BatchCopies(driver), lambda: KernelCopies(self)]
        if driver is not None:
            offered.append(lambda: SingleCopies(driver))
        if op is not None:
            offered.append(lambda: OpCopies(self, op))
        found: dict[str, CopyMethod] = {}
        for make in offered:
            method = self._tried(make)
            if method is not None:
                found[method.name] = method
        return {**found, TorchCopies.name: TorchCopies(self, layouts, slots)}

    def numa_node(self) -> int | None:
        """As PCI says; None where torch does not tell the device's address."""
        if self.name == "xpu":
            return None
        properties = self._api.get_device_properties(self._device)
        try:
            return node_of_pci_device(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        except AttributeError:  # an older torch
            return None

    def on(self, stream: Stream) -> Any:
        """A context in which torch launches on `stream`."""
        return self._api.stream(stream)

    def readable(self, descriptors: Descriptors) -> torch.Tensor:
        """The descriptors in device memory, copied there on torch's current stream."""
        if not descriptors.owner.is_pinned():
            raise DeviceError("there was no pinned memory for the descriptors of a copy kernel")
        on_device: torch.Tensor = descriptors.owner.to(self._device, non_blocking=True)
        return on_device

    def _load_driver(self) -> CudaDriver | None:
        if self.name == "xpu":
            return None
        try:
            return HipDriver() if self.name == "rocm" else CudaDriver()
        except OSError as error:
            logger.warning("the driver library of %s was not found: %s", self.name, error)
            return None

    def _tried(self, make: Callable[[], CopyMethod]) -> CopyMethod | None:
        """The method if it moves a few bytes both ways. At start, so it may wait for the device."""
        name = "a copy method"
        try:
            method = make()
            name = method.name
            self._try(method)
        except Exception as error:  # a way that does not work here is one that is not offered, whatever the reason
            logger.info("%s: copies by %s do not work here: %s: %s", self.name, name, type(error).__name__, error)
            return None
        return method

    def _try(self, method: CopyMethod) -> None:
        self.enter_thread()
        stream = self.open_stream(urgent=False)
        there = torch.zeros(TRIED_BYTES, dtype=torch.uint8, device=self._device)
        sent = torch.randint(0, 255, (TRIED_BYTES,), dtype=torch.uint8).pin_memory()
        back = torch.zeros_like(sent).pin_memory()
        stream.wait_stream(self._api.current_stream(self._device))
        for direction, host in ((Direction.LOAD, sent), (Direction.STORE, back)):
            descriptors = self.descriptors(1)
            ends = (np.array([there.data_ptr()]), np.array([host.data_ptr()]), np.array([TRIED_BYTES]))
            descriptors.fill(direction, Copies(*ends))
            method.launch(descriptors, stream)
            stream.synchronize()
        if not torch.equal(sent, back):
            raise DeviceError("the bytes did not arrive")


class OpCopies(CopyMethod):
    """vLLM's batched copy."""

    name = "op"

    def __init__(self, device: TorchDevice, op: BatchedOp) -> None:
        self._device = device
        self._op = op
        self._dtype = np.uint64 if device.name == "xpu" else np.int64

    def launch(self, descriptors: Descriptors, stream: Stream) -> None:
        vectors = (descriptors.source, descriptors.target, descriptors.length)
        with self._device.on(stream):
            self._op(*(torch.from_numpy(vector.view(self._dtype)) for vector in vectors))


class KernelCopies(CopyMethod):
    """The gather kernel; importing Triton and compiling happen here and at the first launch."""

    name = KERNEL

    def __init__(self, device: TorchDevice) -> None:
        from vllm_tiered_offload.worker.copy_engines.gather_kernel import copy_fragments

        self._device = device
        self._copy_fragments = copy_fragments

    def launch(self, descriptors: Descriptors, stream: Stream) -> None:
        with self._device.on(stream):
            source, target, length = self._device.readable(descriptors)
            self._copy_fragments(source, target, length, descriptors.count)


class TorchCopies(CopyMethod):
    """`copy_` for each copy: slow, and there wherever torch is."""

    name = "torch"

    def __init__(self, device: TorchDevice, layouts: Sequence[GroupLayout], slots: np.ndarray) -> None:
        self._device = device
        self._memories = [_all_of(slots)]
        for layout in layouts:
            self._memories += [_storage_of(packed.tensor) for packed in layout.tensors]

    def launch(self, descriptors: Descriptors, stream: Stream) -> None:
        parts = (descriptors.target.tolist(), descriptors.source.tolist(), descriptors.length.tolist())
        with self._device.on(stream):
            for target, source, length in zip(*parts, strict=True):
                self._at(target, length).copy_(self._at(source, length), non_blocking=True)

    def _at(self, address: int, length: int) -> torch.Tensor:
        for memory in self._memories:
            start = address - memory.data_ptr()
            if 0 <= start <= len(memory) - length:
                return memory[start : start + length]
        raise DeviceError(f"address {address:#x} is in no tensor of the KV cache and in no row")


def _storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that the tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _all_of(slots: np.ndarray) -> torch.Tensor:
    """The bytes from the first slot to the end of the last one, what is between them included."""
    span = (len(slots) - 1) * slots.strides[0] + slots.shape[1] if slots.size else 0
    return torch.from_numpy(np.lib.stride_tricks.as_strided(slots, (span,), (1,)))
