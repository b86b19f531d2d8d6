"""What moves the bytes, decided here and nowhere else; each choice comes with the words of the start-up summary."""

from vllm_tiered_offload.worker.copy_engines.stream_kernel import StreamCopy, stream_copy


def host_way() -> tuple[StreamCopy | None, str]:
    """How the host copies between its tensors and rows: compiled wherever numba makes working code, else by numpy.

    The compiled copy was the faster one at every size tried (`ci/bench/copy.py`, docs/copy_engines.md).
    """
    kernel = stream_copy()
    return kernel, "numpy" if kernel is None else "compiled, past the caches (numba)"
