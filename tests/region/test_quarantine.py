"""D4: a row is reusable only when the last late I/O that holds it has ended."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.region import Quarantine

pytestmark = pytest.mark.fast


def test_a_row_waits_for_its_last_token() -> None:
    quarantine = Quarantine()
    quarantine.hold(7, "read")
    quarantine.hold(7, "write")
    quarantine.hold(3, "write")
    quarantine.hold(3, "write")
    assert len(quarantine) == 2
    assert 7 in quarantine
    assert quarantine.end("write") == [3]
    assert quarantine.end("write") == [], "a late second end changes nothing"
    assert quarantine.end("never heard of") == []
    assert quarantine.end("read") == [7]
    assert len(quarantine) == 0
    assert 7 not in quarantine


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 3))))
def test_against_the_obvious_model(steps: list[tuple[bool, int, int]]) -> None:
    """The model is a set of (row, token). Breaking `hold` for a second token of a row fails this at once."""
    quarantine, held = Quarantine(), set[tuple[int, int]]()
    for is_hold, row, token in steps:
        if is_hold:
            quarantine.hold(row, token)
            held.add((row, token))
        else:
            before = {r for r, _ in held}
            held = {(r, t) for r, t in held if t != token}
            assert quarantine.end(token) == sorted(before - {r for r, _ in held})
        assert len(quarantine) == len({r for r, _ in held})
        assert all((r in quarantine) == any(r == row_held for row_held, _ in held) for r in range(5))
    for token in range(4):
        quarantine.end(token)
    assert len(quarantine) == 0
