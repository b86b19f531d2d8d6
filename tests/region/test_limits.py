"""A capacity that cannot work is refused with both numbers, before any memory is taken."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.region import CapacityError, MemoryBudget, check_capacity, fit_geometry, read_memory_budget

GIB = 1 << 30


def place(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_smaller_than_one_row() -> None:
    with pytest.raises(CapacityError) as caught:
        check_capacity(4095, 8192)
    text = str(caught.value)
    assert "kv_connector_extra_config.cpu.capacity" in text
    assert "4095" in text
    assert "8192" in text
    assert "\n" not in text


def test_larger_than_the_machine() -> None:
    with pytest.raises(CapacityError) as caught:
        check_capacity(8 * GIB, 4096, MemoryBudget(ram_available=6 * GIB))
    text = str(caught.value)
    assert "8 GiB" in text
    assert "6 GiB" in text
    assert str(6 * GIB) in text
    assert "kv_connector_extra_config.cpu.capacity" in text


def test_larger_than_the_cgroup_allows() -> None:
    budget = MemoryBudget(ram_available=64 * GIB, cgroup_available=GIB, cgroup_limit=4 * GIB)
    assert budget.available == GIB
    with pytest.raises(CapacityError, match=r"1 GiB .* free in the cgroup of its limit 4 GiB"):
        check_capacity(2 * GIB, 4096, budget)
    check_capacity(GIB, 4096, budget)


def test_no_kv_cache() -> None:
    with pytest.raises(CapacityError, match="no bytes"):
        check_capacity(GIB, 0)


def test_an_unknown_budget_limits_nothing() -> None:
    check_capacity(1 << 50, 4096, MemoryBudget())
    check_capacity(1 << 50, 4096, None)
    assert MemoryBudget().explain() == "no known memory limit"


@given(st.integers(0, 1 << 22), st.lists(st.integers(1, 20_000), min_size=1, max_size=4), st.integers(0, 1 << 22))
def test_what_fits_is_within_both_numbers(capacity: int, slots: list[int], available: int) -> None:
    try:
        geometry = fit_geometry(capacity, slots, 1, MemoryBudget(ram_available=available))
    except CapacityError:
        row = -(-sum(slots) // 4096) * 4096
        assert capacity < row or capacity // row * row > available
        return
    assert geometry.num_rows >= 1
    assert geometry.total_bytes <= min(capacity, available)
    assert capacity - geometry.total_bytes < geometry.row_bytes


MEMINFO = "MemTotal:       24684096 kB\nMemFree:  1 kB\nMemAvailable:   1024 kB\nShmem: 0 kB\n"


def test_ram(tmp_path: Path) -> None:
    place(tmp_path, {"proc/meminfo": MEMINFO})
    assert read_memory_budget(tmp_path) == MemoryBudget(ram_available=1 << 20)


@pytest.mark.parametrize("meminfo", ["", "MemAvailable:", "MemAvailable: lots kB", "MemAvailable 5"])
def test_odd_meminfo_sets_no_limit(tmp_path: Path, meminfo: str) -> None:
    place(tmp_path, {"proc/meminfo": meminfo})
    assert read_memory_budget(tmp_path) == MemoryBudget()


def test_nothing_to_read_sets_no_limit(tmp_path: Path) -> None:
    assert read_memory_budget(tmp_path) == MemoryBudget()


def test_cgroup_v2_counts_every_level(tmp_path: Path) -> None:
    """The parent is the tighter one here; file pages count as free, shared memory does not."""
    place(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pod/engine\n",
            "sys/fs/cgroup/pod/engine/memory.max": "max\n",
            "sys/fs/cgroup/pod/engine/memory.current": "500\n",
            "sys/fs/cgroup/pod/memory.max": "1000\n",
            "sys/fs/cgroup/pod/memory.current": "900\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 600\nshmem 100\ninactive_file 150\nactive_file 50\n",
            "sys/fs/cgroup/memory.max": "4000\n",
            "sys/fs/cgroup/memory.current": "900\n",
        },
    )
    budget = read_memory_budget(tmp_path)
    assert (budget.cgroup_available, budget.cgroup_limit) == (300, 1000)
    assert budget.available == 300


def test_cgroup_v1_and_its_no_limit(tmp_path: Path) -> None:
    place(
        tmp_path,
        {
            "proc/self/cgroup": "5:devices:/\n4:cpuset,memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "3000\n",
            "sys/fs/cgroup/memory/docker/abc/memory.stat": "inactive_file 9\ntotal_inactive_file 1000\n",
        },
    )
    assert read_memory_budget(tmp_path) == MemoryBudget(cgroup_available=3000, cgroup_limit=5000)


def test_inside_a_container_only_the_mount_itself_is_there(tmp_path: Path) -> None:
    place(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../kubepods/pod1\n",
            "sys/fs/cgroup/memory.max": "700\n",
            "sys/fs/cgroup/memory.current": "800\n",
        },
    )
    assert read_memory_budget(tmp_path).cgroup_available == 0


def test_this_machine() -> None:
    available = read_memory_budget().available
    assert available is None or available > 1 << 20
