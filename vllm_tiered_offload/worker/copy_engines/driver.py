"""The driver's own functions, called by ctypes: torch offers neither registration with an error that can be cleared,
nor copies between addresses. Vectors of addresses are passed as they are; bindings that take lists would turn each of
thousands of addresses into a Python object, for longer than the copies take.
"""

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

from vllm_tiered_offload.worker.copy_engines.device import CopyMethod, Descriptors, DeviceError, Stream

_PORTABLE_AND_MAPPED = 3
_HIP_COPY_DEFAULT = 4
_SOURCE_IN_STREAM_ORDER = 1


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h."""

    _fields_ = [
        ("source_access_order", c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", c_uint),
    ]


class CudaDriver:
    """libcuda. Every call needs the device's context on the calling thread. Raises OSError when there is none."""

    LIBRARIES: tuple[str, ...] = ("libcuda.so.1",)

    def __init__(self) -> None:
        self._library = _load(self.LIBRARIES)

    def register(self, address: int, num_bytes: int) -> None:
        function = self._library.cuMemHostRegister_v2
        self._check("cuMemHostRegister", function(c_void_p(address), c_size_t(num_bytes), c_uint(_PORTABLE_AND_MAPPED)))

    def unregister(self, address: int) -> None:
        self._check("cuMemHostUnregister", self._library.cuMemHostUnregister(c_void_p(address)))

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        function = self._library.cuMemcpyAsync
        code = function(c_uint64(target), c_uint64(source), c_size_t(num_bytes), c_void_p(stream))
        self._check("cuMemcpyAsync", code)

    def copy_batch(self, descriptors: Descriptors, stream: int) -> None:
        """All copies in one call. Raises DeviceError; where the driver is older than CUDA 12.8 too.

        The symbol without a suffix is the one of 12.8, which later drivers keep: it says which copy was refused.
        """
        function = getattr(self._library, "cuMemcpyBatchAsync", None)
        if function is None:
            raise DeviceError("this driver has no cuMemcpyBatchAsync (CUDA 12.8 and later have it)")
        attributes = _CopyAttributes(source_access_order=_SOURCE_IN_STREAM_ORDER)
        applies_from, refused = c_size_t(0), c_size_t(0)
        code = function(
            c_void_p(descriptors.target.ctypes.data),
            c_void_p(descriptors.source.ctypes.data),
            c_void_p(descriptors.length.ctypes.data),
            c_size_t(descriptors.count),
            byref(attributes),
            byref(applies_from),
            c_size_t(1),
            byref(refused),
            c_void_p(stream),
        )
        self._check(f"cuMemcpyBatchAsync (copy {refused.value} of {descriptors.count})", code)

    def _check(self, what: str, code: int) -> None:
        if code:
            text = c_char_p()
            self._library.cuGetErrorString(c_int(code), byref(text))
            raise DeviceError(f"{what}: {text.value.decode() if text.value else 'unknown error'} ({code})")


class HipDriver(CudaDriver):
    """The same by other names. Nobody asks it for batches: those of ROCm 7 fault, and differ between its releases."""

    LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")

    def register(self, address: int, num_bytes: int) -> None:
        function = self._library.hipHostRegister
        self._check("hipHostRegister", function(c_void_p(address), c_size_t(num_bytes), c_uint(_PORTABLE_AND_MAPPED)))

    def unregister(self, address: int) -> None:
        self._check("hipHostUnregister", self._library.hipHostUnregister(c_void_p(address)))

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        function, kind = self._library.hipMemcpyAsync, c_int(_HIP_COPY_DEFAULT)
        code = function(c_void_p(target), c_void_p(source), c_size_t(num_bytes), kind, c_void_p(stream))
        self._check("hipMemcpyAsync", code)

    def _check(self, what: str, code: int) -> None:
        if code:
            self._library.hipGetLastError()  # or torch would raise it from whatever it does next
            self._library.hipGetErrorString.restype = c_char_p
            raise DeviceError(f"{what}: {self._library.hipGetErrorString(c_int(code)).decode()} ({code})")


class BatchCopies(CopyMethod):
    """All copies of a job in one call of the driver."""

    name = "batch"

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def launch(self, descriptors: Descriptors, stream: Stream) -> None:
        self._driver.copy_batch(descriptors, stream.cuda_stream)


class SingleCopies(CopyMethod):
    """One call of the driver for each copy."""

    name = "each"

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def launch(self, descriptors: Descriptors, stream: Stream) -> None:
        handle, copy = stream.cuda_stream, self._driver.copy
        parts = (descriptors.target.tolist(), descriptors.source.tolist(), descriptors.length.tolist())
        for target, source, length in zip(*parts, strict=True):
            copy(target, source, length, handle)


def _load(names: tuple[str, ...]) -> ctypes.CDLL:
    problems = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
    raise OSError("; ".join(problems))
