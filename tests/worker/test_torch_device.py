"""`TorchDevice` over a pretended `torch.cuda` whose device is the host: everything but the driver itself is run."""

import contextlib
import ctypes
import logging
from typing import Any

import numpy as np
import pytest
import torch

from vllm_tiered_offload.testing.fakes.seams import ManualExecutor
from vllm_tiered_offload.worker.copy_engines.base import Direction
from vllm_tiered_offload.worker.copy_engines.cuda import CudaCopyEngine
from vllm_tiered_offload.worker.copy_engines.device import Descriptors, DeviceError
from vllm_tiered_offload.worker.copy_engines.driver import CudaDriver, HipDriver
from vllm_tiered_offload.worker.copy_engines.torch_device import TorchDevice
from vllm_tiered_offload.worker.copy_plan import CopyPlan
from vllm_tiered_offload.worker.layout import build_group_layout


class Api:
    """What of `torch.cuda` the device uses; streams note what they were told to wait for."""

    class Stream:
        cuda_stream = 77

        def __init__(self, device: torch.device, priority: int = 0) -> None:
            self.priority = priority
            self.waited: list[Any] = []

        def wait_event(self, event: Any) -> None:
            self.waited.append(event)

        def wait_stream(self, stream: Any) -> None:
            self.waited.append(stream)

        def synchronize(self) -> None:
            pass

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.on: Any = None

        def record(self, stream: Any) -> None:
            self.on = stream

        def query(self) -> bool:
            return self.on is not None

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Any) -> float:
            return 2.0

    current = "compute"

    def current_stream(self, device: torch.device) -> str:
        return self.current

    def set_device(self, device: torch.device) -> None:
        pass

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def get_device_properties(self, device: torch.device) -> object:
        return object()


class Driver(CudaDriver):
    """Moves bytes at once. `broken` methods refuse, `lazy` ones do nothing."""

    def __init__(self, broken: tuple[str, ...] = (), lazy: tuple[str, ...] = ()) -> None:
        self.broken, self.lazy = broken, lazy
        self.pinned: dict[int, int] = {}
        self.called: list[str] = []

    def register(self, address: int, num_bytes: int) -> None:
        self.pinned[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._act("each", [(target, source, num_bytes)], stream)

    def copy_batch(self, descriptors: Descriptors, stream: int) -> None:
        self._act("batch", zip(descriptors.target, descriptors.source, descriptors.length, strict=True), stream)

    def _act(self, name: str, copies: Any, stream: int) -> None:
        assert stream == Api.Stream.cuda_stream
        self.called.append(name)
        if name in self.broken:
            raise DeviceError(f"{name} is not supported")
        if name not in self.lazy:
            for target, source, length in copies:
                ctypes.memmove(int(target), int(source), int(length))


@pytest.fixture(autouse=True)
def no_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


def make(driver: CudaDriver, name: str = "cuda", op: Any = None) -> TorchDevice:
    """A device called `name` that is the host."""
    device = TorchDevice.__new__(TorchDevice)
    device._device, device._api, device.name, device._op = torch.device("cpu"), Api(), name, op
    device._driver = driver
    return device


def move_by_torch(sources: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> None:
    for source, target, length in zip(sources.tolist(), targets.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(target, source, length)


@pytest.mark.parametrize(
    ("name", "driver", "op", "used"),
    [
        ("cuda", Driver(), move_by_torch, "batch"),
        ("cuda", Driver(broken=("batch",)), move_by_torch, "op"),
        ("cuda", Driver(lazy=("batch",)), None, "each"),
        ("rocm", Driver(), None, "each"),
        ("cuda", Driver(broken=("batch", "each")), None, "torch"),
        ("xpu", Driver(), move_by_torch, "op"),
    ],
)
def test_ways_that_work_are_used(name: str, driver: Driver, op: Any, used: str) -> None:
    """What refuses at start, or moves nothing, is not offered; the best of the rest brings the bytes both ways.

    Leaving out the comparison in `_try` makes the third case fail.
    """
    kv = torch.arange(8 * 64, dtype=torch.int32).view(8, 64)
    before, slots = kv.clone(), np.zeros((4, 256), np.uint8)
    lanes: list[ManualExecutor] = []

    def make_lane() -> ManualExecutor:
        lanes.append(ManualExecutor())
        return lanes[-1]

    device = make(driver, name, op)
    engine = CudaCopyEngine([build_group_layout(0, {"x": kv}, 8, 16)], slots, 1, device, make_lane)
    assert engine._choice.bulk.name == used
    assert engine.describe().startswith(f"{name}, ")
    plan = CopyPlan(0, np.array([3, 1]), np.zeros(2, np.int64), np.array([5, 2]))
    for job_id, direction in enumerate((Direction.STORE, Direction.LOAD)):
        event = engine.record_compute_event()
        engine.submit(job_id, direction, [plan], event)
        for lane in lanes:
            lane.run_all()
        assert event.event in engine._lanes[direction].stream.waited
        assert [(r.job_id, r.error, r.num_bytes, r.seconds) for r in engine.poll()] == [(job_id, None, 512, 0.002)]
        if direction is Direction.STORE:
            kv[[5, 2]] = -1
    assert torch.equal(kv, before)
    np.testing.assert_array_equal(slots[3].view(np.int32), before[5].numpy())
    assert driver.pinned
    assert engine.shutdown(1)
    assert not driver.pinned
    driver.called.clear()


def test_loads_go_on_the_urgent_stream_and_events_are_of_the_compute_stream() -> None:
    """The priority is the device's word for urgent; a compute event is a point of the caller's stream."""
    device = make(Driver())
    assert device.open_stream(urgent=True).priority < device.open_stream(urgent=False).priority
    assert device.record_compute().event.on == Api.current
    assert device.numa_node() is None


def test_a_way_that_does_not_work_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """At level info, with the reason: what is used instead stands in the summary."""
    with caplog.at_level(logging.INFO):
        found = make(Driver(broken=("batch",))).methods([], np.zeros((1, 64), np.uint8))
    assert "batch" not in found
    assert "copies by batch do not work here: DeviceError: batch is not supported" in caplog.text


def test_rocm_by_its_own_names() -> None:
    """Source, target, length and kind reach HIP in its order; its error is cleared, or torch would raise it later."""
    called: list[tuple[str, tuple[Any, ...]]] = []

    class Text:
        def __call__(self, code: Any) -> bytes:
            return b"invalid value"

    class Library:
        hipGetErrorString = Text()

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> int:
                called.append((name, tuple(argument.value for argument in arguments)))
                return 1 if name == "hipHostRegister" else 0

            return call

    driver = HipDriver.__new__(HipDriver)
    driver._library = Library()  # type: ignore[assignment]
    driver.copy(target=1, source=2, num_bytes=3, stream=4)
    driver.unregister(5)
    with pytest.raises(DeviceError, match=r"hipHostRegister: invalid value \(1\)"):
        driver.register(6, 7)
    assert called == [
        ("hipMemcpyAsync", (1, 2, 3, 4, 4)),
        ("hipHostUnregister", (5,)),
        ("hipHostRegister", (6, 7, 3)),
        ("hipGetLastError", ()),
    ]
