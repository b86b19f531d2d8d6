"""What must hold before the connector starts, and the one line that it says when it has."""

import logging
from collections.abc import Mapping
from typing import Any

from vllm.platforms import current_platform

from vllm_tiered_offload.connector.intree_config import translate
from vllm_tiered_offload.settings import Settings, SettingsError

logger = logging.getLogger(__name__)


def share_vllm_log() -> None:
    """Send our log lines where vLLM sends its own, in its format and level."""
    ours, theirs = logging.getLogger("vllm_tiered_offload"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False


def check_engine(vllm_config: Any) -> None:
    """Refuse what cannot work, each with the reason (SettingsError, one line)."""
    if not (current_platform.is_cpu() or current_platform.is_cuda_alike() or current_platform.is_xpu()):
        raise SettingsError(
            [
                f"vllm-tiered-offload has no copy engine for {current_platform.device_name}: it runs on vLLM's CUDA, "
                "ROCm, XPU and CPU backends; name another kv_connector"
            ]
        )
    parallel = vllm_config.parallel_config
    if parallel.local_world_size < parallel.world_size:
        raise SettingsError(
            [
                f"the engine's {parallel.world_size} workers span several hosts ({parallel.local_world_size} a host) "
                "and share memory: lower tensor_parallel_size x pipeline_parallel_size to the workers of one host"
            ]
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise SettingsError(["context parallelism is not supported: set its decode and prefill sizes to 1"])


def parse_settings(vllm_config: Any) -> Settings:
    """The typed settings of this engine's connector, which may be written as for vLLM's in-tree connector."""
    return Settings.parse(_own_dialect(vllm_config)[0])


def _own_dialect(vllm_config: Any) -> tuple[Mapping[str, Any] | None, list[str]]:
    extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
    return translate(extra_config, vllm_config.cache_config.block_size)


def warn_once_at_start(vllm_config: Any) -> None:
    """Said by the scheduler half alone, so once an engine."""
    for note in _own_dialect(vllm_config)[1]:
        logger.warning("settings of the in-tree connector: %s", note)
    if vllm_config.kv_transfer_config.kv_load_failure_policy == "fail":
        logger.warning(
            'kv_load_failure_policy is "fail" (vLLM\'s default): a failed load ends its request with an error. '
            'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config to compute it instead'
        )
    if not current_platform.is_cpu():
        logger.warning(
            "copies to and from %s have been tested on a simulated device only: compare answers with and without the "
            "connector before you trust them, and run ci/gpu_check.sh of the source tree",
            current_platform.device_name,
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        logger.warning("prefix caching is off: prompts come back from host memory only, never from the device")
