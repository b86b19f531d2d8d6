"""From settings to the manager."""

from vllm_tiered_offload.contract.managers import PrimaryTier
from vllm_tiered_offload.hierarchy.manager import TieringOffloadingManager
from vllm_tiered_offload.settings import ROOT_PATH, Settings, SettingsError
from vllm_tiered_offload.tiers.cpu.tier import CpuTier
from vllm_tiered_offload.tiers.errors import RegistryError
from vllm_tiered_offload.tiers.registry import load_primary_tier

PRIMARY_TIER = "cpu"


def build_manager(settings: Settings, *, events: bool = False) -> TieringOffloadingManager:
    """The manager over the tiers that `settings` names; `events` keeps residency events for somebody to take.

    Raises SettingsError, one line that names the setting.
    """
    if settings.tiers:
        types = ", ".join(tier.type for tier in settings.tiers)
        raise SettingsError([f"{ROOT_PATH}.tiers: secondary tiers are not available yet (got {types}); remove the key"])
    strict = settings.lifecycle == "strict"
    return TieringOffloadingManager(_build_primary(settings, strict=strict, events=events), strict=strict)


def _build_primary(settings: Settings, *, strict: bool, events: bool) -> PrimaryTier:
    path = f"{ROOT_PATH}.{PRIMARY_TIER}"
    try:
        cls = load_primary_tier(PRIMARY_TIER)
    except RegistryError as error:
        raise SettingsError([f"{path}: {error}"]) from error
    if not issubclass(cls, CpuTier):
        raise SettingsError([f"{path}: {cls.__qualname__} cannot be built from this block, only a CpuTier can"])
    return cls.from_settings(settings.cpu.options, path, strict=strict, events=events)
