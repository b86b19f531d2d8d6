"""Small regions for the tests of the region room."""

from collections.abc import Callable

import pytest

from vllm_tiered_offload.contract.geometry import RegionGeometry


@pytest.fixture
def geometry_of() -> Callable[[int], RegionGeometry]:
    """A two-rank geometry of so many rows; the slots differ in size and leave padding."""
    return lambda num_rows: RegionGeometry(num_rows, (5000, 1000), 2)
