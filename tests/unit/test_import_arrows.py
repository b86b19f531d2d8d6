"""Imports point downwards only, and vLLM and torch stay in their rooms (DESIGN, layout of the package)."""

import importlib.util
from pathlib import Path

import pytest
from import_rules import PACKAGE, modules_of, violations


def package_directory() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_package_keeps_the_rules() -> None:
    modules = list(modules_of(package_directory()))
    assert len(modules) > 10, "the package was not found where it is imported from"
    broken = [
        line
        for module, file in modules
        for line in violations(module, file.read_text(), is_package=file.name == "__init__.py")
    ]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("contract.keys", "from vllm_tiered_offload.region import host_region"),
        ("contract.keys", "import numpy"),
        ("region.rows", "import vllm_tiered_offload.tiers.cpu.tier"),
        ("region.rows", "from vllm_tiered_offload import settings"),
        ("tiers.cpu.tier", "from vllm_tiered_offload.hierarchy.tiering import TieringOffloadingManager"),
        ("hierarchy.tiering", "from ..scheduler import scheduler"),
        ("scheduler.scheduler", "from vllm_tiered_offload.connector import views"),
        ("scheduler.scheduler", "from vllm_tiered_offload.worker.worker import OffloadingConnectorWorker"),
        ("worker.worker", "from vllm_tiered_offload.settings import Settings"),
        ("worker.worker", "from vllm_tiered_offload.telemetry import metrics"),
        ("worker.worker", "import pydantic"),
        ("worker.copy_engines.host", "def late():\n    from vllm_tiered_offload.tiers import registry"),
        ("connector.connector", "from vllm_tiered_offload.testing.fakes import seams"),
        ("connector.connector", "import vllm_tiered_offload.cli.main"),
        ("settings", "from vllm_tiered_offload.tiers import registry"),
        ("newroom.thing", "from vllm_tiered_offload.contract import keys"),
        ("scheduler.scheduler", "from vllm.v1.request import Request"),
        ("scheduler.scheduler", "if TYPE_CHECKING:\n    import vllm"),
        ("scheduler.scheduler", "import importlib\nx = importlib.import_module('vllm.config')"),
        ("testing.fakes.driver", "import vllm"),
        ("hierarchy.tiering", "import torch"),
        ("connector.views", "from vllm.v1.kv_offload.base import OffloadKey"),
        ("connector.views", "from vllm.v1 import kv_offload"),
        ("testing.simulator.engine", "import vllm.v1.kv_offload"),
    ],
)
def test_catches(module: str, source: str) -> None:
    assert len(violations(f"{PACKAGE}.{module}", source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("connector.connector", "import torch, vllm\nfrom vllm_tiered_offload.worker import worker"),
        ("connector.connector", "from vllm_tiered_offload.settings import Settings\nfrom . import views"),
        ("scheduler.scheduler", "from vllm_tiered_offload.hierarchy import tiering\nfrom .views import RequestView"),
        ("tiers.cpu.tier", "from vllm_tiered_offload.settings import Block\nfrom ...region import rows\nimport mmap"),
        ("worker.copy_engines.host", "import torch\nimport numpy as np\nimport numba"),
        ("testing.simulator.engine", "import vllm\nfrom vllm_tiered_offload.connector import connector"),
        ("cli.main", "from vllm_tiered_offload.testing import simulator"),
        ("settings", "import pydantic"),
        ("connector.views", "from vllm.v1.kv_cache_interface import KVCacheConfig"),
    ],
)
def test_allows(module: str, source: str) -> None:
    assert violations(f"{PACKAGE}.{module}", source) == []
