"""What `pip install` leaves: entry points that resolve, a plugin that registers cheaply and twice, typed modules."""

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PACKAGE = "vllm_tiered_offload"
GROUPS = {
    "vllm.general_plugins": {"tiered_offload"},
    "vllm_tiered_offload.tiers": {"cpu", "fs", "p2p"},
    "vllm_tiered_offload.eviction_policies": {"lru", "arc"},
}

PLUGIN_IMPORTS_NOTHING = """
import sys
before = set(sys.modules)
import vllm_tiered_offload.connector.plugin
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names)))
"""

REGISTERS_TWICE = """
import sys
from vllm_tiered_offload.connector.plugin import register
register()
register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
assert "TieredOffloadConnector" in KVConnectorFactory._registry
assert "vllm_tiered_offload.connector.connector" not in sys.modules, "the connector class is not lazy"
"""


def run_python(code: str) -> str:
    """In a fresh interpreter that does not look into the current directory."""
    done = subprocess.run([sys.executable, "-P", "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(
    os.environ.get("VTO_EXPECT_INSTALLED") != "1", reason="ci/test.sh alone promises an installed wheel"
)
def test_tests_run_against_the_installed_wheel() -> None:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    assert Path(spec.origin).resolve().parents[1] in installed


@pytest.mark.parametrize("group", GROUPS)
def test_entry_points_resolve(group: str) -> None:
    ours = [e for e in importlib.metadata.entry_points(group=group) if e.value.startswith(PACKAGE)]
    assert {entry.name for entry in ours} >= GROUPS[group]
    for entry in ours:
        assert callable(entry.load())


def test_version_is_the_distributions() -> None:
    assert importlib.metadata.version("vllm-tiered-offload").count(".") >= 2


def test_package_is_typed() -> None:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).with_name("py.typed").is_file()


def test_entry_point_module_imports_nothing() -> None:
    """vLLM loads it in every process, also where nobody asked for a connector."""
    assert run_python(PLUGIN_IMPORTS_NOTHING) == PACKAGE


def test_registering_twice_is_no_error() -> None:
    """A second registration under one name raises inside vLLM, and the plugin loads in four kinds of process."""
    pytest.importorskip("vllm")
    run_python(REGISTERS_TWICE)
