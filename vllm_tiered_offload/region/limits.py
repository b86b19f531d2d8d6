"""Whether a capacity can work, from plain numbers; and the numbers, from /proc and the cgroup files.

The region's pages are charged to the process that populates them, so the budget has to be read there. Two limits count:
MemAvailable of the machine, and the headroom of every cgroup from the process's own up to the root. File pages in a
cgroup are counted as free, as MemAvailable does: the kernel drops them before it runs out. The readers take a root
directory so that tests can hand in their own files; a file that is missing or unreadable sets no limit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.region.errors import CapacityError

CAPACITY_SETTING = "kv_connector_extra_config.cpu.capacity"
NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a huge number


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes that can still be taken; None means that this limit is not known or not set."""

    ram_available: int | None = None
    cgroup_available: int | None = None
    cgroup_limit: int | None = None

    @property
    def available(self) -> int | None:
        """The tighter of the two limits, in bytes."""
        known = [value for value in (self.ram_available, self.cgroup_available) if value is not None]
        return min(known, default=None)

    def explain(self) -> str:
        """Both limits in words, for error texts."""
        parts = []
        if self.ram_available is not None:
            parts.append(f"{in_units(self.ram_available)} of RAM available")
        if self.cgroup_available is not None:
            limit = "" if self.cgroup_limit is None else f" of its limit {in_units(self.cgroup_limit)}"
            parts.append(f"{in_units(self.cgroup_available)} free in the cgroup{limit}")
        return ", ".join(parts) or "no known memory limit"


def in_units(num_bytes: int) -> str:
    """A size as a person reads it, with the exact number beside it: '1.5 GiB (1610612736 bytes)'."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.4g} {unit} ({num_bytes} bytes)"
    return f"{num_bytes} bytes"


def check_capacity(
    capacity: int, row_bytes: int, budget: MemoryBudget | None = None, setting: str = CAPACITY_SETTING
) -> None:
    """Raise CapacityError unless `capacity` holds at least one row of `row_bytes` and its whole rows fit `budget`."""
    if row_bytes <= 0:
        raise CapacityError(f"{setting}: a row of the host region has no bytes: there is no KV cache to offload")
    if capacity < row_bytes:
        raise CapacityError(
            f"{setting}: {in_units(capacity)} is smaller than one row of the host region, {in_units(row_bytes)};"
            f" raise it to at least {row_bytes} or lower blocks_per_chunk"
        )
    needed = capacity // row_bytes * row_bytes
    available = budget.available if budget is not None else None
    if budget is not None and available is not None and needed > available:
        raise CapacityError(
            f"{setting}: {in_units(needed)} is more than this machine can give: {budget.explain()};"
            f" lower it below {available}"
        )


def fit_geometry(
    capacity: int,
    slot_bytes: Sequence[int],
    blocks_per_chunk: int,
    budget: MemoryBudget | None = None,
    setting: str = CAPACITY_SETTING,
) -> RegionGeometry:
    """The geometry of a region of `capacity` bytes. Raises CapacityError when it cannot work (see check_capacity)."""
    one_row = RegionGeometry(1, tuple(slot_bytes), blocks_per_chunk)
    check_capacity(capacity, one_row.row_bytes, budget, setting)
    return RegionGeometry.fit(capacity, slot_bytes, blocks_per_chunk)


def read_memory_budget(root: Path = Path("/")) -> MemoryBudget:
    """What this process can still take, from the files below `root`."""
    tightest = min(_cgroup_headrooms(root), default=None)
    return MemoryBudget(
        ram_available=_read_mem_available(root),
        cgroup_available=tightest[0] if tightest else None,
        cgroup_limit=tightest[1] if tightest else None,
    )


def _read_mem_available(root: Path) -> int | None:
    """MemAvailable of /proc/meminfo in bytes."""
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            value = _number(rest.split()[0] if rest.split() else "")
            return None if value is None else value * 1024
    return None


def _cgroup_headrooms(root: Path) -> Iterator[tuple[int, int]]:
    """(bytes still free, limit) of every cgroup that this process is in and that has a limit."""
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            names = _V2
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = _V1
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        for directory in _upwards(mount, path):
            headroom = names.headroom(directory)
            if headroom is not None:
                yield headroom


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The cgroup's directory and its parents up to the mount; inside a container the inner ones may not exist."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """How one cgroup version names what we read."""

    limit: str
    usage: str
    file_pages: tuple[str, ...]  # entries of memory.stat, children included

    def headroom(self, directory: Path) -> tuple[int, int] | None:
        limit = _number(_first_line(directory / self.limit))
        usage = _number(_first_line(directory / self.usage))
        if limit is None or usage is None or limit >= NO_LIMIT:
            return None
        reclaimable = 0
        for line in _lines(directory / "memory.stat"):
            name, _, value = line.partition(" ")
            if name in self.file_pages:
                reclaimable += _number(value) or 0
        return max(0, limit - max(0, usage - reclaimable)), limit


# Shared memory is not among the file pages: the kernel counts it as anonymous.
_V2 = _CgroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _first_line(path: Path) -> str:
    return next(iter(_lines(path)), "")


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None
