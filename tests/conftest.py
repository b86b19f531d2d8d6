"""Which tests are `fast`, decided in this one place, and how hypothesis looks for failures under a mutant."""

from pathlib import Path

import pytest
from hypothesis import Phase, settings

HERE = Path(__file__).parent

# All tests but these: real engines, fresh processes by the dozen, suites that run whole suites, the mutants' own, and
# what takes seconds and is the only guard of no mutant.
NOT_FAST = (
    "e2e/",
    "mutants/",
    "cli/",
    "conformance/test_example.py",
    "conformance/test_fs_conformance.py",
    "conformance/test_suite_can_fail.py",
    "fs/test_crash.py",
    "fs/test_fs_processes.py::test_killed_at_any_moment",
    "fs/test_fs_processes.py::test_two_engines",
    "fs/test_namespace_identity.py",
    "fs/test_parsers_fuzz.py",
    "p2p/test_directory.py",
    "p2p/test_hostile_packets.py",
    "p2p/test_nixl.py",
    "p2p/test_hosts.py",
    "p2p/test_p2p_conformance.py",
    "p2p/test_p2p_hierarchy.py",
    "p2p/test_p2p_processes.py",
    "p2p/test_pulling.py",
    "p2p/test_server.py",
    "p2p/test_tier.py",
    "region/test_processes.py",
    "simulator/test_cases_finish.py",
    "simulator/test_cases_trouble.py",
    "simulator/test_shrinking.py",
    "worker/test_engine_choice.py",
    "worker/test_gpu_check.py",
    "unit/test_packaging.py::test_registering_twice_is_no_error",
)

# A mutant is found by the same examples in every run, few of them, and its failure need not be made small.
settings.register_profile(
    "mutants", max_examples=30, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`pytest -m fast` takes less than a minute: it is what one runs after each change, and against each mutant."""
    for item in items:
        test = item.nodeid.removeprefix(f"{HERE.name}/")
        if HERE in item.path.parents and not test.startswith(NOT_FAST) and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.fast)
