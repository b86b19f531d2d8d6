"""From settings to the manager."""

from vllm_tiered_offload.contract.managers import PrimaryTier
from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.hierarchy.manager import HierarchyLimits, TieringOffloadingManager
from vllm_tiered_offload.hierarchy.region_access import RegionAccess
from vllm_tiered_offload.settings import ROOT_PATH, Settings, SettingsError
from vllm_tiered_offload.tiers.cpu.tier import CpuTier
from vllm_tiered_offload.tiers.errors import RegistryError
from vllm_tiered_offload.tiers.guard import GuardLimits, TierGuard
from vllm_tiered_offload.tiers.registry import load_primary_tier, load_secondary_tier

PRIMARY_TIER = "cpu"


def build_manager(
    settings: Settings,
    *,
    engine_id: str = "engine",
    events: bool = False,
    clock: Clock = monotonic,
    region_access: RegionAccess | None = None,
) -> TieringOffloadingManager:
    """The manager over the tiers that `settings` names; `events` keeps residency events for somebody to take.

    `engine_id` is unique among live engines. Raises SettingsError, one line that names the setting.
    """
    strict = settings.lifecycle == "strict"
    primary = _build_primary(settings, strict=strict, events=events)
    return TieringOffloadingManager(
        primary,
        _build_guards(settings, engine_id, events, clock),
        strict=strict,
        limits=HierarchyLimits(
            promotion_headroom=settings.promotion_headroom,
            promotion_hold=settings.promotion_hold,
            cascade_share=settings.cascade_share,
            drain_timeout=settings.drain_timeout,
        ),
        clock=clock,
        region_access=region_access,
    )


def _build_primary(settings: Settings, *, strict: bool, events: bool) -> PrimaryTier:
    path = f"{ROOT_PATH}.{PRIMARY_TIER}"
    try:
        cls = load_primary_tier(PRIMARY_TIER)
    except RegistryError as error:
        raise SettingsError([f"{path}: {error}"]) from error
    if not issubclass(cls, CpuTier):
        raise SettingsError([f"{path}: {cls.__qualname__} cannot be built from this block, only a CpuTier can"])
    return cls.from_settings(settings.cpu.options, path, strict=strict, events=events)


def _build_guards(settings: Settings, engine_id: str, events: bool, clock: Clock) -> list[TierGuard]:
    """One guarded tier for each block, nearest first. Two of one type are told apart by a number."""
    limits = GuardLimits(settings.tier_job_timeout, settings.breaker_failures, settings.breaker_cooldown)
    guards: list[TierGuard] = []
    for index, block in enumerate(settings.tiers):
        path = f"{ROOT_PATH}.tiers[{index}]"
        try:
            cls = load_secondary_tier(block.type)
            tier = cls.from_settings(block.options, path, engine_id=engine_id, events=events)
        except RegistryError as error:
            raise SettingsError([f"{path}.type: {error}"]) from error
        same = sum(guard.name.partition("#")[0] == block.type for guard in guards)
        guards.append(TierGuard(tier, f"{block.type}#{same + 1}" if same else block.type, limits, clock))
    return guards
