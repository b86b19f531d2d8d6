"""What the device engine asks of an accelerator: streams, events, registered host memory, and ways to copy.

`TorchDevice` (torch_device.py) is the real one, `FakeDevice` (testing/fakes) the one that tests run out of order.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_tiered_offload.worker.copy_engines.base import ComputeEvent, Direction
from vllm_tiered_offload.worker.copy_engines.fragments import Copies
from vllm_tiered_offload.worker.layout import GroupLayout

Stream = Any  # opaque: whatever the device's `open_stream` gives


class DeviceError(RuntimeError):
    """The device or its driver said no."""


class DeviceEvent(ComputeEvent):
    """A point in a stream of a device."""

    @abstractmethod
    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Device time between two complete events that `CopyDevice.record` made."""


@dataclass(slots=True, eq=False)
class Descriptors:
    """A pooled buffer that tells copies to a driver or kernel: int64 (3, capacity), rows source, target, length.

    Pinned where the device can. What was launched with it may read it until the job has ended.
    """

    table: np.ndarray
    owner: Any = None  # what keeps the memory, in the device's terms
    count: int = 0

    def fill(self, direction: Direction, copies: Copies) -> None:
        self.count = len(copies.length)
        source, target = copies.device, copies.region
        if direction is Direction.LOAD:
            source, target = target, source
        for row, values in enumerate((source, target, copies.length)):
            self.table[row, : self.count] = values

    @property
    def source(self) -> np.ndarray:
        return self.table[0, : self.count]

    @property
    def target(self) -> np.ndarray:
        return self.table[1, : self.count]

    @property
    def length(self) -> np.ndarray:
        return self.table[2, : self.count]


class CopyMethod(ABC):
    """One way to launch many copies on a stream."""

    name: str  # a key of choice.DEVICE_METHODS

    @abstractmethod
    def launch(self, descriptors: Descriptors, stream: Stream) -> None:
        """Launch the copies behind what is on the stream. May block; raises when the driver refuses.

        The copies of one launch are not ordered among themselves. When it raises, some may have been launched.
        """


class CopyDevice(ABC):
    """An accelerator. All methods may be called from any thread; those that can fail raise `DeviceError` or torch's."""

    name: str  # "cuda", "rocm", "xpu"

    @abstractmethod
    def enter_thread(self) -> None:
        """Make the device current for the calling thread. Cheap when it is."""

    @abstractmethod
    def open_stream(self, urgent: bool) -> Stream:
        """A stream of our own, beside the compute stream; an urgent one goes first where both wait for the device."""

    @abstractmethod
    def record_compute(self) -> DeviceEvent:
        """A point in the calling thread's current stream."""

    @abstractmethod
    def wait_event(self, stream: Stream, event: DeviceEvent) -> None:
        """What is launched on `stream` from now on runs after `event`. The calling thread does not wait."""

    @abstractmethod
    def record(self, stream: Stream) -> DeviceEvent:
        """A point after everything on `stream`."""

    @abstractmethod
    def drain(self, stream: Stream) -> None:
        """Block the calling thread until the stream is empty. Never called on the model's thread."""

    @abstractmethod
    def descriptors(self, capacity: int) -> Descriptors:
        """A new buffer for `capacity` copies, pinned if that can be had."""

    @abstractmethod
    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory and map it for the device. Raises DeviceError."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register` of the range that begins at `address`."""

    @abstractmethod
    def methods(self, layouts: Sequence[GroupLayout], slots: np.ndarray) -> Mapping[str, CopyMethod]:
        """The ways to copy that were seen to work here, by name."""

    @abstractmethod
    def numa_node(self) -> int | None:
        """The memory node that the device is attached to, None where unknown."""
