"""The region between real processes, some of them killed (V7, cases 48 and 50)."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.region import HostRegion, RegionGoneError

PROGRAM = Path(__file__).with_name("engine_process.py")
ROWS = 1024  # 4 MiB
LINK = "/memfd:vllm-tiered-offload"


class Engine:
    """One process of engine_process.py, with a directory of its own for whatever it might leave behind."""

    def __init__(self, home: Path, *arguments: str, wrapper: tuple[str, ...] = ()) -> None:
        home.mkdir()
        self.home = home
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, str(PROGRAM), *arguments],
            cwd=home,
            env=os.environ | {"TMPDIR": str(home), "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.arrived = self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, stderr = self.process.communicate()
            pytest.fail(f"the process ended early: {stderr}")
        message: dict[str, Any] = json.loads(line)
        return message

    def intact(self) -> bool:
        assert self.process.stdin is not None
        self.process.stdin.write("check\n")
        self.process.stdin.flush()
        return bool(self.read()["intact"])

    @property
    def announcement(self) -> RegionAnnouncement:
        raw = self.arrived["announcement"]
        geometry = raw["geometry"]
        return RegionAnnouncement(
            raw["pid"],
            raw["fd"],
            raw["inode"],
            RegionGeometry(geometry["num_rows"], tuple(geometry["slot_bytes"]), geometry["blocks_per_chunk"]),
        )

    def inodes(self) -> set[int]:
        """The regions that this process holds now, by descriptor or by mapping."""
        return held_regions(self.process.pid)

    def populated_bytes(self) -> int:
        """Memory that this process's region has taken so far."""
        files = [entry.path for entry in os.scandir(f"/proc/{self.process.pid}/fd") if is_region(entry.path)]
        return max(os.stat(path).st_blocks * 512 for path in files)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def is_region(descriptor: str) -> bool:
    return os.readlink(descriptor).startswith(LINK)


def held_regions(pid: int) -> set[int]:
    found = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if is_region(entry.path):
                    found.add(os.stat(entry.path).st_ino)
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if LINK in line:
                found.add(int(line.split()[4]))
    return found


def holders(inode: int) -> list[int]:
    """All processes that hold this region. A memfd has no name: without a holder the kernel has freed it."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if inode in held_regions(pid)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts engines; at the end none of them may have left a file."""
    engines: list[Engine] = []

    def start_one(*arguments: str, wrapper: tuple[str, ...] = ()) -> Engine:
        engines.append(Engine(tmp_path / f"engine{len(engines)}", *arguments, wrapper=wrapper))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.kill()
        assert list(engine.home.iterdir()) == []


@pytest.mark.parametrize("stage", ["before_map", "after_map", "populating", "in_service"])
def test_killed_at_any_moment_nothing_is_left(start: Callable[..., Engine], stage: str) -> None:
    """Case 48, V7: SIGKILL at each stage; the region is gone, another live engine's is untouched, a restart works.

    A region with a name (a file in /dev/shm) fails here: its inode would stay reachable without a holder, and
    `inodes` would be empty because its link is another one.
    """
    neighbour = start("create", "in_service", str(ROWS))
    victim = start("create", stage, str(ROWS))
    (inode,) = victim.inodes()
    assert inode not in neighbour.inodes(), "two engines on one machine never meet"
    assert holders(inode) == [victim.process.pid]
    assert victim.populated_bytes() == {"before_map": 0, "after_map": 0, "populating": 2 << 20}.get(stage, ROWS * 4096)
    victim.kill()
    assert holders(inode) == []
    assert neighbour.intact()
    assert holders(neighbour.announcement.inode) == [neighbour.process.pid]
    assert start("create", "in_service", str(ROWS)).intact()


def test_sibling_keeps_the_region_until_it_ends_too(start: Callable[..., Engine]) -> None:
    """Case 48 with two ranks: the first rank is killed, the second one's mapping stays valid, then all is gone."""
    creator = start("create", "in_service", str(ROWS))
    sibling = start("join", json.dumps(creator.arrived["announcement"]))
    inode = creator.announcement.inode
    assert set(holders(inode)) == {creator.process.pid, sibling.process.pid}
    creator.kill()
    assert sibling.intact()
    assert holders(inode) == [sibling.process.pid]
    with pytest.raises(RegionGoneError, match="has ended"):
        HostRegion.open(creator.announcement)
    sibling.kill()
    assert holders(inode) == []


def test_a_third_process_sees_the_same_bytes(start: Callable[..., Engine]) -> None:
    """The scheduler half's way in: another process than the creator, through the announcement alone."""
    creator = start("create", "in_service", str(ROWS))
    with HostRegion.open(creator.announcement) as region:
        assert region.array[ROWS - 1, 4095] == 0x5A
        region.array[3, 3] = 0
        assert not creator.intact()
        region.array[3, 3] = 0x5A
        assert creator.intact()


def test_dev_shm_is_not_used(start: Callable[..., Engine]) -> None:
    """Issue: works where /dev/shm is tiny. Nothing of the process's memory or files is there."""
    engine = start("create", "in_service", str(ROWS))
    assert "/dev/shm" not in Path(f"/proc/{engine.process.pid}/maps").read_text()
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{engine.process.pid}/fd")]
    assert not [link for link in links if link.startswith("/dev/shm")]


def can_have_own_mounts() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_have_own_mounts(), reason="needs the right to make a mount namespace")
def test_a_tiny_dev_shm_is_enough(start: Callable[..., Engine]) -> None:
    """A region 64 times the size of /dev/shm, in a mount namespace of its own; /dev/shm stays empty."""
    script = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    engine = start("create", "in_service", str(ROWS), wrapper=("unshare", "-m", "sh", "-c", script, "sh"))
    assert engine.intact()
    dev_shm = Path("/proc", str(engine.process.pid), "root", "dev", "shm")
    assert os.statvfs(dev_shm).f_blocks * os.statvfs(dev_shm).f_frsize == 64 << 10
    assert list(dev_shm.iterdir()) == []
    with HostRegion.open(engine.announcement) as region:
        assert region.array[0, 0] == 0x5A
