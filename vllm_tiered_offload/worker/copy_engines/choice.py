"""What moves the bytes, decided here and nowhere else; each choice comes with the words of the start-up summary."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_tiered_offload.worker.copy_engines.base import Direction
from vllm_tiered_offload.worker.copy_engines.device import CopyMethod, DeviceError
from vllm_tiered_offload.worker.copy_engines.fragments import Copies
from vllm_tiered_offload.worker.copy_engines.stream_kernel import StreamCopy, stream_copy

# Best first. A method is there only where it was seen to work.
DEVICE_METHODS = {
    "batch": "one driver call a job (cuMemcpyBatchAsync)",
    "op": "vLLM's batched copy",
    "each": "one driver call a copy",
    "torch": "one torch copy each",
}
KERNEL = "kernel"
# Through pageable memory a batch is of no use: the driver stages every copy.
PAGEABLE_METHODS = ("each", "torch", "op")

# The gather kernel reads host memory over the bus by itself. It wins where copies are so short that starting each one
# takes the copy engine longer than moving it; stores keep the copy engine busy at any size. `ci/gpu_check.sh` measures
# both; the limits are those that others found on an H100 and are to be looked at again with its table.
KERNEL_BELOW_BYTES = {Direction.LOAD: 28 << 10, Direction.STORE: 0}
KERNEL_FROM_COPIES = 16


def host_way() -> tuple[StreamCopy | None, str]:
    """How the host copies between its tensors and rows: compiled wherever numba makes working code, else by numpy.

    The compiled copy was the faster one at every size tried (`ci/bench/copy.py`, docs/copy_engines.md).
    """
    kernel = stream_copy()
    return kernel, "numpy" if kernel is None else "compiled, past the caches (numba)"


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The methods of one device. `kernel` is None where it must not or cannot be used."""

    bulk: CopyMethod
    kernel: CopyMethod | None
    pinned: bool

    def method(self, direction: Direction, copies: Copies) -> CopyMethod:
        if self.kernel is None or len(copies.length) < KERNEL_FROM_COPIES:
            return self.bulk
        if copies.num_bytes >= KERNEL_BELOW_BYTES[direction] * len(copies.length) or not _in_words(copies):
            return self.bulk
        return self.kernel

    def __str__(self) -> str:
        rows = "pinned rows" if self.pinned else "PAGEABLE rows (slow)"
        limit = KERNEL_BELOW_BYTES[Direction.LOAD] >> 10
        small = f", loads of pieces below {limit} KiB by a kernel" if self.kernel is not None else ""
        return f"{DEVICE_METHODS[self.bulk.name]}{small}, {rows}"


def device_choice(methods: Mapping[str, CopyMethod], pinned: bool) -> DeviceChoice:
    """The methods to use. The kernel dereferences host addresses, so it needs pinned rows. Raises DeviceError."""
    for name in DEVICE_METHODS if pinned else PAGEABLE_METHODS:
        if name in methods:
            return DeviceChoice(methods[name], methods.get(KERNEL) if pinned else None, pinned)
    raise DeviceError("no way was found to copy between this device and host memory")


def _in_words(copies: Copies) -> bool:
    """Whether all addresses and lengths are multiples of the kernel's word of 8 bytes."""
    return not ((copies.device | copies.region | copies.length) & 7).any()
