"""Huge pages for the region are a service: asked for in whole pages, for a bounded time, and never missed."""

import errno
import os

import pytest

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.region import HostRegion
from vllm_tiered_offload.region.huge_pages import HugePages
from vllm_tiered_offload.region.mapping import HUGE_PAGE_BYTES, SharedMapping
from vllm_tiered_offload.region.populate import populate

PIECE = 2 * HUGE_PAGE_BYTES
PIECES = 3


class Kernel:
    """An madvise that notes what it was asked, fails with `code`, and takes a second each time."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.asked, self.now = code, list[tuple[int, int]](), 0.0

    def __call__(self, start: int, length: int) -> None:
        self.asked.append((start, length))
        self.now += 1
        if self.code:
            raise OSError(self.code, os.strerror(self.code))

    def back_all(self, longest_seconds: float = 100.0) -> int:
        """Bytes in huge pages, of a mapping of `PIECES` pieces and a bit, each of which was asked for."""
        fd, size = os.memfd_create("test", os.MFD_CLOEXEC), PIECES * PIECE + 4096
        os.ftruncate(fd, size)
        mapping = SharedMapping(fd, size)
        os.close(fd)
        pages = HugePages(mapping, advise=self, clock=lambda: self.now, longest_seconds=longest_seconds)
        assert populate(mapping, huge_pages=pages, piece_bytes=PIECE)
        assert not bytes(mapping.view).strip(b"\0")
        return pages.num_bytes


def test_whole_huge_pages_are_asked_for() -> None:
    kernel = Kernel()
    assert kernel.back_all() == PIECES * PIECE
    assert kernel.asked == [(index * PIECE, PIECE) for index in range(PIECES)]


@pytest.mark.parametrize(
    ("code", "times"),
    [(errno.EINVAL, 1), (errno.ENOSYS, 1), (errno.EPERM, 1), (errno.ENOMEM, PIECES), (errno.EAGAIN, PIECES)],
)
def test_what_cannot_be_had_stays_small(code: int, times: int) -> None:
    """A kernel that does not know them is asked once; one that found none here may find some there."""
    kernel = Kernel(code)
    assert kernel.back_all() == 0
    assert len(kernel.asked) == times


def test_a_start_does_not_wait_long_for_them() -> None:
    """Compaction can take seconds a gigabyte. Without the deadline all pieces are asked for."""
    kernel = Kernel()
    assert kernel.back_all(longest_seconds=1.5) == 2 * PIECE


def test_a_real_region_is_whole_and_empty_whatever_the_kernel_gave() -> None:
    with HostRegion.create(RegionGeometry(PIECES, (PIECE,), 1)) as region:
        assert region.huge_page_bytes in range(0, PIECES * PIECE + 1, HUGE_PAGE_BYTES)
        assert not region.array.any()
        region.array[:] = 7
        with HostRegion.open(region.announcement()) as seen:
            assert (seen.array == 7).all()
            assert seen.huge_page_bytes == 0
