"""The region in one process: shapes, views, hand-over by announcement, and what closing means."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.region import (
    CapacityError,
    HostRegion,
    MemoryBudget,
    RegionClosedError,
    RegionError,
    RegionGoneError,
    host_region,
)

GeometryOf = Callable[[int], RegionGeometry]


@pytest.fixture
def region(geometry_of: GeometryOf) -> Iterator[HostRegion]:
    """A region of 3 rows; afterwards nothing of it may be left in this process."""
    descriptors = set(os.listdir("/proc/self/fd"))
    made = HostRegion.create(geometry_of(3))
    yield made
    made.close()
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert mappings() == []


def mappings() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:vllm-tiered-offload" in line]


def test_shapes(region: HostRegion) -> None:
    assert region.geometry.row_bytes == 8192
    assert region.array.shape == (3, 8192)
    assert region.rank_view(0).shape == (3, 5000)
    assert region.rank_view(1).shape == (3, 1000)
    assert [len(row) for row in region.rows()] == [8192] * 3
    assert not region.array.any(), "a new region is zero"


def test_all_views_show_the_same_bytes(region: HostRegion) -> None:
    region.rank_view(1)[2, 7] = 9
    assert region.array[2, 5007] == 9
    assert region.rows()[2][5007] == 9
    region.rows()[0][4999] = 4
    assert region.rank_view(0)[0, 4999] == 4
    assert np.shares_memory(region.array, region.rank_view(0))
    assert not np.shares_memory(region.rank_view(0), region.rank_view(1))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_without_slot(region: HostRegion, rank: int) -> None:
    with pytest.raises(RegionError, match="shared by 2 ranks"):
        region.rank_view(rank)


def test_rows_are_page_aligned(region: HostRegion) -> None:
    """O_DIRECT and RDMA registration need it."""
    for row in region.rows():
        assert np.frombuffer(row, dtype=np.uint8).ctypes.data % 4096 == 0


@pytest.mark.parametrize("populate", [True, False])
def test_populated_means_that_the_memory_is_there(geometry_of: GeometryOf, populate: bool) -> None:
    with HostRegion.create(geometry_of(5), populate=populate) as region:
        fd = region.announcement().fd
        assert os.fstat(fd).st_blocks * 512 == (region.geometry.total_bytes if populate else 0)


def test_open_sees_what_the_creator_wrote(region: HostRegion) -> None:
    region.array[1, :4] = [1, 2, 3, 4]
    with HostRegion.open(region.announcement()) as sibling:
        assert sibling.geometry == region.geometry
        assert list(sibling.array[1, :4]) == [1, 2, 3, 4]
        sibling.rank_view(0)[2, 0] = 7
        with pytest.raises(RegionError, match="only the process that created"):
            sibling.announcement()
    assert region.array[2, 0] == 7


def test_a_sibling_outlives_the_creator(geometry_of: GeometryOf) -> None:
    creator = HostRegion.create(geometry_of(2))
    creator.array[0, 0] = 5
    with HostRegion.open(creator.announcement()) as sibling:
        creator.close()
        assert sibling.array[0, 0] == 5


def test_close_is_idempotent_and_views_stay_valid(region: HostRegion) -> None:
    """A BufferError that escapes here fails the test; the fixture sees that the mapping goes with the last view."""
    view, rows = region.rank_view(0), region.rows()
    region.close()
    region.close()
    assert region.closed
    view[0, 0] = 3
    assert rows[0][0] == 3
    assert len(mappings()) == 1
    for use in (lambda: region.array, region.rows, lambda: region.rank_view(0)):
        with pytest.raises(RegionClosedError):
            use()
    with pytest.raises(RegionError):
        region.announcement()


def test_a_reused_descriptor_is_not_taken_for_the_region(region: HostRegion, tmp_path: Path) -> None:
    """The same pid and descriptor number, but another file: the inode tells. So would a pid that was reused."""
    announcement = region.announcement()
    region.close()
    with pytest.raises(RegionGoneError, match="is gone"):
        HostRegion.open(announcement)
    with open(tmp_path / "other", "wb") as other:
        os.truncate(other.fileno(), announcement.geometry.total_bytes)
        stolen = dataclasses.replace(announcement, fd=other.fileno())
        with pytest.raises(RegionGoneError, match="reused or the region closed"):
            HostRegion.open(stolen)
        # Even with the right inode number, a file of a file system is not a memfd.
        same_inode = dataclasses.replace(stolen, inode=os.fstat(other.fileno()).st_ino)
        with pytest.raises(RegionGoneError, match="process id was reused"):
            HostRegion.open(same_inode)


def test_a_memfd_of_somebody_else(region: HostRegion) -> None:
    fd = os.memfd_create("somebody")
    os.ftruncate(fd, region.geometry.total_bytes)
    try:
        announcement = dataclasses.replace(region.announcement(), fd=fd, inode=os.fstat(fd).st_ino)
        with pytest.raises(RegionGoneError, match="memfd:somebody"):
            HostRegion.open(announcement)
    finally:
        os.close(fd)


def test_a_pipe_is_not_even_opened(region: HostRegion) -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(RegionGoneError):
            HostRegion.open(dataclasses.replace(region.announcement(), fd=reader))
    finally:
        os.close(reader)
        os.close(writer)


def test_a_wrong_size_is_refused(region: HostRegion, geometry_of: GeometryOf) -> None:
    """Mapping more than there is would be SIGBUS later."""
    announcement = dataclasses.replace(region.announcement(), geometry=geometry_of(4))
    with pytest.raises(RegionError, match="24576 bytes long, announced were 32768"):
        HostRegion.open(announcement)


def test_nobody_can_shrink_it_under_us(region: HostRegion) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(region.announcement().fd, 0)


def test_the_descriptor_is_not_inherited(region: HostRegion) -> None:
    assert not os.get_inheritable(region.announcement().fd)


def test_too_much_is_refused_before_anything_is_made(geometry_of: GeometryOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(size: int) -> int:
        raise AssertionError(f"a memfd of {size} bytes was made")

    monkeypatch.setattr(host_region, "_make_memfd", unexpected)
    with pytest.raises(CapacityError, match="lower it below 16384"):
        HostRegion.create(geometry_of(3), budget=MemoryBudget(ram_available=16384))
    with pytest.raises(CapacityError, match="smaller than one row"):
        HostRegion.create(geometry_of(0))


def test_no_memfd_is_a_clear_error(geometry_of: GeometryOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(RegionError, match="memfd_create"):
        HostRegion.create(geometry_of(1))
