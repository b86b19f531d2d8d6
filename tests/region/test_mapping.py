"""A mapping begins where a huge page can, is shared, and lives as long as somebody looks at it."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vllm_tiered_offload.region.mapping import HUGE_PAGE_BYTES, SharedMapping

NAME = "test-mapping"
SIZES = [4096, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES + 4096, 129 * HUGE_PAGE_BYTES - 4096]


@pytest.fixture(params=SIZES)
def memfd(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A descriptor and its size."""
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, request.param)
    yield fd, request.param
    os.close(fd)


def addresses() -> list[str]:
    """Ranges of this process's mappings of the file, and of pages that only reserve addresses."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[0] for line in lines if NAME in line or "---p" in line]


def test_it_begins_at_a_boundary_and_is_shared(memfd: tuple[int, int]) -> None:
    """Whatever else this process has mapped."""
    one, other = SharedMapping(*memfd), SharedMapping(*memfd)
    for mapping in (one, other):
        begin = np.frombuffer(mapping.view, dtype=np.uint8).__array_interface__["data"][0]
        assert begin == mapping.address
        assert begin % HUGE_PAGE_BYTES == 0
        assert len(mapping) == len(mapping.view) == memfd[1]
    one.view[-4:] = b"last"
    assert other.view[-4:] == b"last"


def test_views_outlive_it_and_nothing_outlives_them(memfd: tuple[int, int]) -> None:
    before = addresses()
    mapping = SharedMapping(*memfd)
    last = np.frombuffer(mapping.view[-8:], dtype=np.uint8)
    mapping.close()
    mapping.close()
    last[:] = 7
    assert os.pread(memfd[0], 8, memfd[1] - 8) == b"\x07" * 8
    assert addresses() != before
    del last
    assert addresses() == before


def test_what_cannot_be_mapped_reserves_nothing() -> None:
    before = addresses()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        SharedMapping(-1, 4096)
    assert addresses() == before


def test_advice_that_the_kernel_refuses_raises(memfd: tuple[int, int]) -> None:
    mapping = SharedMapping(*memfd)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        mapping.madvise(-1, 0, 4096)
