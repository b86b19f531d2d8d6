"""The engine's ranks agree on one host region, or all of them end with the same reason."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from vllm_tiered_offload.connector import ranks, worker_half
from vllm_tiered_offload.connector.startup import check_engine
from vllm_tiered_offload.contract.config import WorkerConfig
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.region import HostRegion
from vllm_tiered_offload.settings import SettingsError
from vllm_tiered_offload.testing.simulator.ranks import BarrierGroup, in_threads

CONFIG = WorkerConfig(capacity=1 << 20, blocks_per_chunk=1)


@dataclass
class Agreed:
    """What each rank of one engine came to."""

    regions: dict[int, tuple[HostRegion, RegionAnnouncement]]
    refusals: dict[int, str]


@pytest.fixture
def close() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def agree(close: ExitStack, slot_bytes: list[int]) -> Agreed:
    """One engine with that many ranks, each in a thread."""
    agreed = Agreed({}, {})

    def one(group: BarrierGroup) -> None:
        try:
            agreed.regions[group.rank] = worker_half.agree_on_region(group, CONFIG, slot_bytes[group.rank])
            close.callback(agreed.regions[group.rank][0].close)
        except SettingsError as error:
            agreed.refusals[group.rank] = str(error)

    in_threads([lambda group=group: one(group) for group in BarrierGroup.make(len(slot_bytes))])
    return agreed


def test_every_rank_writes_into_its_own_part_of_the_same_rows(close: ExitStack) -> None:
    """Stages of a pipeline may differ in size."""
    regions = agree(close, [4096, 8192, 4096]).regions
    for rank, (region, _) in regions.items():
        region.rank_view(rank)[:] = rank + 1
    for region, _ in regions.values():
        assert [int(region.rank_view(rank).min()) for rank in range(3)] == [1, 2, 3]
        assert [region.rank_view(rank).shape[1] for rank in range(3)] == [4096, 8192, 4096]


def test_replicas_have_regions_of_their_own(close: ExitStack) -> None:
    """Data parallel: ranks are counted within an engine, so replicas on one host never meet in memory."""
    first, second = agree(close, [4096] * 2), agree(close, [4096] * 2)
    inodes = [{announcement.inode for _, announcement in one.regions.values()} for one in (first, second)]
    assert len(inodes[0]) == len(inodes[1]) == len(inodes[0] | inodes[1]) / 2 == 1


def test_ranks_on_several_hosts_are_refused_with_the_reason(close: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 50, where vLLM's own sizes do not tell. Nobody waits for anybody, and no region is made.

    Fails when nobody compares where the ranks are.
    """
    hosts = iter(["a", "b"])
    monkeypatch.setattr(worker_half, "_host_identity", lambda: next(hosts))
    monkeypatch.setattr(worker_half, "_create", lambda *_: pytest.fail("a region was made"))
    refusals = agree(close, [4096] * 2).refusals
    assert set(refusals) == {0, 1}
    assert all("several hosts" in text for text in refusals.values())


def test_one_rank_that_cannot_open_the_region_ends_all(close: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a rank raises before the last collective call: the others would wait for ever."""
    monkeypatch.setattr(worker_half, "_open", lambda announcement: (None, "permission denied"))
    refusals = agree(close, [4096] * 2).refusals
    assert refusals == {0: "permission denied", 1: "permission denied"}


@pytest.mark.parametrize(("world", "local"), [(4, 2), (2, 1)])
def test_a_world_larger_than_one_host_is_refused_at_once(world: int, local: int) -> None:
    """Case 50: said before anything is allocated, with the numbers and the settings."""
    parallel = SimpleNamespace(
        local_world_size=local, world_size=world, decode_context_parallel_size=1, prefill_context_parallel_size=1
    )
    wanted = f"{world} workers span several hosts .{local} a host.*tensor_parallel_size x pipeline_parallel_size"
    with pytest.raises(SettingsError, match=wanted):
        check_engine(SimpleNamespace(parallel_config=parallel))


def test_ranks_are_counted_over_stages_and_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """rank = pp_rank * tp_size + tp_rank, and what is gathered is in that order."""
    from vllm.distributed import parallel_state

    stage, part = SimpleNamespace(rank_in_group=1, world_size=3), SimpleNamespace(rank_in_group=1, world_size=2)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: part)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: stage)
    group = ranks.VllmRankGroup()
    assert (group.rank, group.size) == (3, 6)
    # Each collective call gathers what this rank knows and what the ranks beside it do.
    gathered = {id(part): lambda obj: [obj - 1, obj], id(stage): lambda obj: [[0, 1], obj, [4, 5]]}
    monkeypatch.setattr(ranks, "_gather", lambda among, obj: gathered[id(among)](obj))
    assert group.all_gather(3) == [0, 1, 2, 3, 4, 5]
