"""A device for `CudaCopyEngine` whose operations run in any order that its streams and events allow."""

import ctypes
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vllm_tiered_offload.testing.fakes.copy_driver import FakeDriver, FakeEvent, Operation, Place, block, row
from vllm_tiered_offload.worker.copy_engines.choice import DEVICE_METHODS, KERNEL
from vllm_tiered_offload.worker.copy_engines.device import (
    CopyDevice,
    CopyMethod,
    Descriptors,
    DeviceError,
    DeviceEvent,
    Stream,
)
from vllm_tiered_offload.worker.layout import GroupLayout


class FakeDevice(CopyDevice):
    """Streams, events and copies are operations of a FakeDriver.

    The bytes of a copy land when its operation runs, and only then is its descriptor read, so a buffer that was given
    back too early moves wrong bytes. The copies of one launch are unordered among themselves. One layout; every copy
    lies in one of its blocks and one row.

    Faults, set by the test at any time:
        register_fails_at   the registration of that piece (0 is the first) is refused
        launch_errors       raised by the next launches, each half way through its copies
        record_errors       raised by the next records of an event on a stream of ours
        drain_errors        raised by the next waits for a stream
        lost                from now on every event query raises, as after a kernel's illegal access
        ignored_waits       streams that forget to wait for events, to show that a test notices
    """

    name = "fake"

    def __init__(self, driver: FakeDriver, layout: GroupLayout, slots: np.ndarray, methods: Sequence[str]) -> None:
        self.driver = driver
        self.registered: dict[int, int] = {}  # address -> bytes
        self.buffers: list[Descriptors] = []  # all that were ever made
        self.launches: list[tuple[str, int]] = []  # (method, copies)
        self.node: int | None = None
        self.register_fails_at: int | None = None
        self.launch_errors: list[Exception] = []
        self.record_errors: list[Exception] = []
        self.drain_errors: list[Exception] = []
        self.lost = False
        self.ignored_waits: set[Stream] = set()
        self._layout = layout
        self._slots = slots
        self._methods = {name: FakeCopies(name, self) for name in methods}
        self._waits: dict[Stream, list[Operation]] = {}  # for the next operation of the stream

    def enter_thread(self) -> None:
        return

    def open_stream(self, urgent: bool) -> Stream:
        return "urgent" if urgent else "patient"

    def record_compute(self) -> FakeEvent:
        return FakeEvent(self.driver, self.driver.last_compute())

    def wait_event(self, stream: Stream, event: DeviceEvent) -> None:
        assert isinstance(event, FakeEvent)
        if event.op is not None and stream not in self.ignored_waits:
            self._waits.setdefault(stream, []).append(event.op)

    def record(self, stream: Stream) -> "FakeStreamEvent":
        if self.record_errors:
            raise self.record_errors.pop(0)
        mark = self.driver.launch(stream, f"mark on {stream}", waits=self.take_waits(stream))
        return FakeStreamEvent(self, mark)

    def drain(self, stream: Stream) -> None:
        if self.drain_errors:
            raise self.drain_errors.pop(0)
        last = self.driver.last(stream)
        if last is not None:
            self.driver.synchronize(last)

    def descriptors(self, capacity: int) -> Descriptors:
        self.buffers.append(Descriptors(np.full((3, capacity), -1, np.int64)))
        return self.buffers[-1]

    def register(self, address: int, num_bytes: int) -> None:
        if self.register_fails_at == len(self.registered):
            raise DeviceError("out of memory")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def methods(self, layouts: Sequence[GroupLayout], slots: np.ndarray) -> Mapping[str, CopyMethod]:  # noqa: ARG002
        return self._methods

    def numa_node(self) -> int | None:
        return self.node

    def take_waits(self, stream: Stream) -> list[Operation]:
        return self._waits.pop(stream, [])

    def place(self, address: int) -> Place:
        """Which device block or row a byte belongs to."""
        offset = address - self._slots.ctypes.data
        if 0 <= offset < len(self._slots) * self._slots.strides[0]:
            row_id, inside = divmod(offset, self._slots.strides[0])
            return row(row_id, inside // self._layout.block_bytes)
        for packed in self._layout.tensors:
            stride = packed.tensor.nbytes // self._layout.num_blocks
            block_id = (address - packed.tensor.data_ptr()) // stride
            if 0 <= block_id < self._layout.num_blocks:
                return block(block_id)
        raise AssertionError(f"address {address:#x} is no device block and no row")


class FakeStreamEvent(FakeEvent):
    """A point in a stream of a FakeDevice, which can be lost."""

    def __init__(self, device: FakeDevice, op: Operation) -> None:
        super().__init__(device.driver, op)
        self._device = device

    def is_complete(self) -> bool:
        if self._device.lost:
            raise DeviceError("illegal memory access")
        return super().is_complete()


class FakeCopies(CopyMethod):
    """A method of a FakeDevice."""

    def __init__(self, name: str, device: FakeDevice) -> None:
        assert name in (*DEVICE_METHODS, KERNEL)
        self.name = name
        self._device = device

    def launch(self, descriptors: Descriptors, stream: Stream) -> None:
        device, driver = self._device, self._device.driver
        error = device.launch_errors.pop(0) if device.launch_errors else None
        device.launches.append((self.name, descriptors.count))
        count = descriptors.count // 2 if error is not None else descriptors.count
        reads = {device.place(address) for address in descriptors.source[:count].tolist()}
        writes = {device.place(address) for address in descriptors.target[:count].tolist()}
        # Layers share a place, so copies cannot tell theirs one by one: what comes before and after all of them does.
        begin = driver.launch(stream, f"{self.name} begins", reads, writes, waits=device.take_waits(stream))
        copies = [
            driver.launch(None, f"copy {i}", action=self._move(descriptors, i), waits=[begin]) for i in range(count)
        ]
        driver.launch(stream, f"{self.name} ends", reads, writes, waits=copies)
        if error is not None:
            raise error

    @staticmethod
    def _move(descriptors: Descriptors, i: int) -> Callable[[], None]:
        table = descriptors.table

        def move() -> None:
            source, target, length = table[:, i].tolist()
            ctypes.memmove(target, source, length)

        return move
