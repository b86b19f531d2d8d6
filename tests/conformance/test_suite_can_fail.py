"""A suite that cannot fail is worse than none: each broken tier is found by the test that is there for it.

Mutation note: BROKEN and BROKEN_PRIMARIES are the lists of mistakes, each with one test of the suite; other tests may
find it too. The healthy tiers of which they derive pass every one of these tests.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from broken_primaries import BROKEN_PRIMARIES
from memory_tiers import BROKEN, SelfDrivingMemoryTier

from vllm_tiered_offload.tiers.cpu.tier import CpuTier

MISTAKES = [(f"Test{tier.__name__}", test) for tier, test in (*BROKEN.items(), *BROKEN_PRIMARIES.items())]
HEALTHY = [
    *((f"Test{SelfDrivingMemoryTier.__name__}", test) for test in sorted(set(BROKEN.values()))),
    *((f"Test{CpuTier.__name__}", test) for test in sorted(set(BROKEN_PRIMARIES.values()))),
]
SUITE = Path(__file__).with_name("broken_suite.py")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """class::test -> PASSED, FAILED or ERROR, for the named tests, in one pytest of its own."""
    wanted = MISTAKES + HEALTHY
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(SUITE.parent),
    ]
    command += ["-c", "/dev/null", *(f"{SUITE}::{name}::{test}" for name, test in wanted)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=SUITE.parent)
    found = re.findall(r"::(\w+)::(\w+) (PASSED|FAILED|ERROR)", done.stdout)
    outcomes: dict[str, str] = {}
    for name, test, outcome in found:
        # A test that failed may be followed by an error of its teardown: the failure is what counts.
        outcomes.setdefault(f"{name}::{test}", outcome)
    assert len(outcomes) == len(wanted), done.stdout + done.stderr
    return outcomes


@pytest.mark.parametrize(("name", "test"), MISTAKES)
def test_broken_tier_is_found(outcomes: dict[str, str], name: str, test: str) -> None:
    assert outcomes[f"{name}::{test}"] == "FAILED"


@pytest.mark.parametrize(("name", "test"), HEALTHY)
def test_healthy_tier_passes(outcomes: dict[str, str], name: str, test: str) -> None:
    assert outcomes[f"{name}::{test}"] == "PASSED"
