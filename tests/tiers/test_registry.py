"""Tiers and policies by name."""

from importlib.metadata import EntryPoint

import pytest

from vllm_tiered_offload.contract.managers import PrimaryTier, SecondaryTierManager
from vllm_tiered_offload.tiers import registry as registry_module
from vllm_tiered_offload.tiers.cpu.policies.arc import ArcPolicy
from vllm_tiered_offload.tiers.cpu.policies.base import EvictionPolicy
from vllm_tiered_offload.tiers.cpu.policies.lru import LruPolicy
from vllm_tiered_offload.tiers.cpu.tier import CpuTier
from vllm_tiered_offload.tiers.errors import RegistryError
from vllm_tiered_offload.tiers.registry import (
    EVICTION_POLICIES,
    TIERS,
    Registry,
    load_eviction_policy,
    load_primary_tier,
    load_secondary_tier,
)


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_built_in_names_come_through_their_entry_points():
    assert load_primary_tier("cpu") is CpuTier
    assert load_eviction_policy("lru") is LruPolicy
    assert load_eviction_policy("arc") is ArcPolicy


def test_unknown_name_gets_the_nearest_and_the_list():
    with pytest.raises(RegistryError) as error:
        load_eviction_policy("lruu")
    assert "did you mean 'lru'?" in one_line(error)
    assert "arc, lru" in one_line(error)


def test_wrong_kind_says_what_it_is_instead():
    with pytest.raises(RegistryError) as error:
        load_secondary_tier("cpu")
    assert "is not a secondary tier (SecondaryTierManager), but a primary tier (PrimaryTier)" in one_line(error)


def test_abstract_class_says_what_it_lacks():
    class Half(EvictionPolicy):
        def clear(self):
            pass

    with EVICTION_POLICIES.registered("half", Half), pytest.raises(RegistryError, match="lacks __contains__"):
        load_eviction_policy("half")


def test_in_process_registration_lasts_as_long_as_its_block():
    class Mine(LruPolicy):
        pass

    with EVICTION_POLICIES.registered("mine", Mine):
        assert load_eviction_policy("mine") is Mine
        assert "mine" in EVICTION_POLICIES.names()
        with pytest.raises(RegistryError, match="registered already"):
            EVICTION_POLICIES.register("mine", Mine)
    with pytest.raises(RegistryError, match="unknown eviction policy 'mine'"):
        load_eviction_policy("mine")


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """A registry with entry points that do not load, and a module that counts its imports."""
    (tmp_path / "needs_missing.py").write_text("import surely_not_installed_anywhere\n")
    (tmp_path / "fine_policy.py").write_text("THING = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = [
        EntryPoint("needy", "needs_missing:Thing", "g"),
        EntryPoint("typo", "fine_policy:Thign", "g"),
        EntryPoint("number", "fine_policy:THING", "g"),
    ]
    monkeypatch.setattr(registry_module, "entry_points", lambda group: entries)
    return Registry("g", "tier")


def test_missing_dependency_gives_a_hint_instead_of_a_traceback(broken):
    with pytest.raises(RegistryError) as error:
        broken.load("needy", PrimaryTier)
    assert "No module named 'surely_not_installed_anywhere'" in one_line(error)
    assert "installed" in one_line(error)


def test_hint_names_distribution_and_extra():
    class Metadata:
        def get_all(self, _):
            return ["needy", "other"]

    class Dist:
        name, metadata = "some-tiers", Metadata()

    entry = EntryPoint("needy", "m:c", "g")
    vars(entry)["dist"] = Dist()
    assert registry_module._install_hint(entry) == "try: pip install 'some-tiers[needy]'"


def test_names_does_not_import(broken):
    assert broken.names() == ["needy", "number", "typo"]


@pytest.mark.parametrize(("name", "text"), [("typo", "does not exist"), ("number", "is not a class")])
def test_entry_point_that_leads_nowhere(broken, name, text):
    with pytest.raises(RegistryError, match=text):
        broken.load(name, SecondaryTierManager)


def test_tier_registry_knows_cpu():
    assert "cpu" in TIERS.names()
