"""Ways to reach the connector other than its registered name alone."""

from pathlib import Path

from .checks import comes_to_rest, equal_and_loaded
from .engine import CONNECTOR, Engine, python_path
from .workload import SMALL_DEVICE_CACHE, Answers


def test_module_path_inside_multi_connector_without_the_plugin(tiny_model: Path, logs: Path, wanted: Answers) -> None:
    """VLLM_PLUGINS names none, so nothing has registered us; kv_connector_module_path finds the class."""
    ours = {**CONNECTOR, "kv_connector_module_path": "vllm_tiered_offload.connector.connector"}
    neighbour = {
        "kv_connector": "NeighbourConnector",
        "kv_connector_module_path": "neighbour",
        "kv_role": "kv_both",
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [neighbour, ours]},
    }
    env = {"VLLM_PLUGINS": "", **python_path(Path(__file__).parent)}
    with Engine(tiny_model, logs / "multi.log", *SMALL_DEVICE_CACHE, connector=both, env=env) as engine:
        equal_and_loaded(engine.server(), wanted)
        comes_to_rest(engine)
        assert engine.stop() == 0
        assert engine.leftovers() == []
