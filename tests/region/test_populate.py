"""Page population and its byte-preserving fallback (case 49)."""

import errno
import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event

import numpy as np
import pytest

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.region import HostRegion, MemoryBudget, RegionMemoryError, host_region
from vllm_tiered_offload.region.huge_pages import HugePages
from vllm_tiered_offload.region.mapping import SharedMapping
from vllm_tiered_offload.region.populate import populate, read_every_page

PIECE = 1 << 20
SIZE = 4 * PIECE - 4096


class Memfd:
    """A mapping, and how much memory it has taken."""

    def __init__(self, size: int = SIZE) -> None:
        self.fd = os.memfd_create("test", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.mapping = SharedMapping(self.fd, size)

    def allocated(self) -> int:
        return os.fstat(self.fd).st_blocks * 512


@pytest.fixture
def memfd() -> Iterator[Memfd]:
    made = Memfd()
    yield made
    made.mapping.close()
    os.close(made.fd)


class Advice:
    """An madvise that fails with `code` from call number `good` on."""

    def __init__(self, code: int, good: int = 0) -> None:
        self.code, self.good = code, good
        self.calls = 0

    def __call__(self, start: int, length: int) -> None:
        self.calls += 1
        if self.calls > self.good:
            raise OSError(self.code, os.strerror(self.code))


def plenty() -> MemoryBudget:
    return MemoryBudget(ram_available=1 << 40)


@pytest.mark.parametrize("code", [None, errno.EINVAL, errno.EIO, errno.ENOSYS, errno.EPERM])
def test_every_page_gets_memory_and_no_byte_changes(memfd: Memfd, code: int | None) -> None:
    """Case 49. Leaving out the fallback leaves `allocated` at the one page that was written before."""
    memfd.mapping.view[8192:8196] = b"abcd"
    advise = None if code is None else Advice(code)
    assert populate(memfd.mapping, advise=advise, budget=plenty, piece_bytes=PIECE) == (code is None)
    assert memfd.allocated() == SIZE
    assert memfd.mapping.view[8192:8196] == b"abcd"
    assert not bytes(memfd.mapping.view[:8192]).strip(b"\0")
    assert not bytes(memfd.mapping.view[8196:]).strip(b"\0")
    if advise is not None:
        assert advise.calls == 1, "a kernel that refused once is not asked again"


@pytest.mark.parametrize("code", [errno.EFAULT, errno.ENOMEM, errno.ENOSPC])
def test_out_of_memory_is_said_clearly(memfd: Memfd, code: int) -> None:
    """Case 49: EFAULT means not enough memory; the text says how far it came and which setting to lower."""
    with pytest.raises(RegionMemoryError) as caught:
        populate(memfd.mapping, advise=Advice(code, good=2), budget=plenty, piece_bytes=PIECE)
    text = str(caught.value)
    assert "not enough memory" in text
    assert "2 MiB" in text
    assert "cpu.capacity" in text
    assert "\n" not in text


def test_a_defect_page_is_not_read(memfd: Memfd) -> None:
    """EHWPOISON: the fallback would touch the page and die of SIGBUS."""
    with pytest.raises(RegionMemoryError, match="defect memory page"):
        populate(memfd.mapping, advise=Advice(133), budget=plenty, piece_bytes=PIECE)
    assert memfd.allocated() == 0


def test_memory_that_somebody_else_took_is_noticed_between_pieces(memfd: Memfd) -> None:
    """Two engines that start at once: both passed the check at start, one of them stops before the kernel kills."""
    budgets = iter([plenty(), plenty(), MemoryBudget(cgroup_available=PIECE - 1, cgroup_limit=PIECE)])
    with pytest.raises(RegionMemoryError, match=r"populated, then .* free in the cgroup"):
        populate(memfd.mapping, budget=lambda: next(budgets), piece_bytes=PIECE)
    assert memfd.allocated() == 2 * PIECE


def test_a_failed_population_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, geometry_of: Callable[[int], RegionGeometry]
) -> None:
    """The descriptor and the mapping go with the error, even while the traceback is alive."""

    def fail(mapping: SharedMapping, *, huge_pages: HugePages) -> bool:
        raise RegionMemoryError("no")

    monkeypatch.setattr(host_region, "populate_pages", fail)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RegionMemoryError):
        HostRegion.create(geometry_of(4))
    assert set(os.listdir("/proc/self/fd")) == before
    with open("/proc/self/maps") as maps:
        assert "/memfd:vllm-tiered-offload" not in maps.read()


def count_up(fd: int, size: int, started: Event, stop: Event) -> None:
    """Another process: keeps counting up the first word of every page."""
    mapping = mmap.mmap(fd, size)
    words = np.frombuffer(mapping, dtype=np.uint64)[:: mmap.PAGESIZE // 8]
    rounds = 0
    while not stop.is_set():
        words += 1
        rounds += 1
        started.set()
    assert (words == rounds).all(), "a count was lost"
    os._exit(0)


def test_fallback_while_another_process_writes() -> None:
    """Case 49: no write of a sibling is lost. A fallback that writes back what it read fails here."""
    context = multiprocessing.get_context("fork")
    memfd = Memfd()
    started, stop = context.Event(), context.Event()
    writer = context.Process(target=count_up, args=(memfd.fd, SIZE, started, stop))
    writer.start()
    try:
        assert started.wait(10)
        for _ in range(300):
            read_every_page(memfd.mapping, 0, SIZE)
    finally:
        stop.set()
        writer.join(10)
    assert writer.exitcode == 0
    memfd.mapping.close()
    os.close(memfd.fd)
