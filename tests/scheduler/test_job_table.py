"""When a device job counts as ended, and as what."""

import itertools

import pytest

from vllm_tiered_offload.contract.jobs import PreparedStore
from vllm_tiered_offload.contract.messages import JobAck
from vllm_tiered_offload.scheduler.job_table import JobTable

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("failing", [{0}, {1}, {2}, {0, 2}])
def test_a_job_that_failed_on_any_rank_has_failed(order: tuple[int, ...], failing: set[int]) -> None:
    """D7: whichever rank says so, and whoever reports after it. Made to fail by keeping what the last rank said."""
    table = JobTable()
    table.num_ranks = 3
    job = table.add_store([], PreparedStore((), (), [], [], 0), [], 1.0)
    said = {rank: f"rank {rank}" if rank in failing else None for rank in order}
    ended = [table.acknowledge({job.job_id: JobAck(1 << rank, said[rank])}) for rank in order]
    assert ended == [[], [], [job]]
    assert job.error == next(said[rank] for rank in order if said[rank])
    assert len(table) == 0
