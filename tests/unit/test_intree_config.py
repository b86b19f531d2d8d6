"""A configuration written for vLLM's in-tree connector means the same here, or says in one line what does not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tiered_offload.connector.intree_config import IN_TREE_KEYS, OWN_KEYS, translate
from vllm_tiered_offload.settings import Settings, SettingsError

BLOCK = 32
MIGRATING = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"

FULL = {
    "spec_name": "TieringOffloadingSpec",
    "cpu_bytes_to_use": 10737418240,
    "block_size": 64,
    "eviction_policy": "arc",
    "offload_prompt_only": False,
    "secondary_tiers": [{"type": "fs", "root_dir": "/kv", "n_read_threads": 8, "n_write_threads": 2}],
}


def ours(raw: dict[str, Any]) -> Settings:
    return Settings.parse(translate(raw, BLOCK)[0])


def notes(raw: dict[str, Any]) -> list[str]:
    return translate({"offload_prompt_only": True, "cpu_bytes_to_use": 1 << 30, **raw}, BLOCK)[1]


def problems(raw: dict[str, Any], block: int | None = BLOCK) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as error:
        translate(raw, block)
    assert all(text.startswith("kv_connector_extra_config") and "\n" not in text for text in error.value.problems)
    return error.value.problems


def test_a_whole_configuration() -> None:
    settings = ours(FULL)
    assert settings.cpu.options == {"capacity": 10737418240, "eviction_policy": "arc"}
    assert settings.blocks_per_chunk == 2
    assert settings.offload_prompt_only is False
    (tier,) = settings.tiers
    assert tier.type == "fs"
    assert tier.options == {"root": "/kv", "read_threads": 8, "write_threads": 2}
    assert translate(FULL, BLOCK)[1] == []


def test_our_own_dialect_is_handed_back_as_it_is() -> None:
    for raw in ({"cpu": {"capacity": 1}, "blocks_per_chunk": 2, "offload_prompt_only": True}, {}, None):
        translated, said = translate(raw, BLOCK)
        assert translated is raw
        assert said == []


def test_the_smallest_configuration_tells_that_the_default_differs() -> None:
    raw = {"cpu_bytes_to_use": 1 << 30}
    assert ours(raw).offload_prompt_only is False
    (note,) = translate(raw, BLOCK)[1]
    assert note.startswith("offload_prompt_only is not given")
    assert "set it to true" in note


@pytest.mark.parametrize(("given", "bytes_"), [(2.0 * (1 << 30), 1 << 31), ("8GiB", 1 << 33), ("4096", 4096)])
def test_sizes_as_people_and_command_lines_write_them(given: Any, bytes_: int) -> None:
    """--kv-offloading-size makes a float of it."""
    assert ours({"cpu_bytes_to_use": given}).cpu.capacity == bytes_


def test_numbers_that_in_tree_would_convert() -> None:
    assert ours({"cpu_bytes_to_use": 1 << 30, "block_size": "96"}).blocks_per_chunk == 3
    assert ours({"cpu_bytes_to_use": 1 << 30, "blocks_per_chunk": "4"}).blocks_per_chunk == 4
    assert ours({"cpu_bytes_to_use": 1 << 30, "offload_prompt_only": 1}).offload_prompt_only is True


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"spec_name": "MySpec"}, 'spec_name "MySpec" is not loaded'),
        ({"spec_name": "CPUOffloadingSpec", "spec_module_path": "a.b"}, "is not loaded"),
        ({"store_threshold": 2, "max_tracker_size": 10}, "store_threshold 2 is not honoured"),
        ({"cache_policy_module_path": "a.b", "eviction_policy": "Mine"}, "cache_policy_module_path is not honoured"),
        ({"canonical_layout": True}, "canonical_layout is not honoured"),
        ({"backpressure": {"backpressure_cls": "X"}}, "backpressure is not honoured"),
        ({"self_describing_kv_events": False}, "self_describing_kv_events is not honoured"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "/kv"}]}, "by default CPUOffloadingSpec"),
        ({"secondary_tiers": [{"type": "obj", "bucket": "b"}]}, 'secondary_tiers[0] of type "obj" is left out'),
        ({"secondary_tiers": [{"type": "Mine", "module_path": "a.b"}]}, "is left out"),
        (
            {
                "spec_name": "TieringOffloadingSpec",
                "secondary_tiers": [{"type": "fs", "root": "/", "locality": "LOCAL"}],
            },
            "secondary_tiers[0].locality is not honoured",
        ),
    ],
)
def test_what_is_not_honoured_is_one_line(raw: dict[str, Any], line: str) -> None:
    (note,) = notes(raw)
    assert line in note
    assert "\n" not in note
    ours({"cpu_bytes_to_use": 1 << 30, **raw})


@pytest.mark.parametrize(
    "raw",
    [
        {"spec_name": "CPUOffloadingSpec"},
        {"store_threshold": 1},
        {"store_threshold": 0, "max_tracker_size": 10},
        {"self_describing_kv_events": True},
        {"canonical_layout": False},
    ],
)
def test_what_changes_nothing_is_not_talked_about(raw: dict[str, Any]) -> None:
    assert notes(raw) == []


def test_a_policy_from_a_module_falls_back_to_lru() -> None:
    raw = {"cpu_bytes_to_use": 1 << 30, "eviction_policy": "Mine", "cache_policy_module_path": "a.b"}
    assert ours(raw).cpu.eviction_policy == "lru"


def test_a_tier_that_is_left_out_leaves_the_others() -> None:
    raw = FULL | {"secondary_tiers": [{"type": "p2p", "port": 1}, *FULL["secondary_tiers"], {"type": "mine", "x": 1}]}
    assert [tier.type for tier in ours(raw).tiers] == ["fs", "mine"]


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"cpu_bytes_to_use": 1, "cpu": {"capacity": 1}}, ".cpu_bytes_to_use: cpu.capacity says the same thing"),
        (
            {"eviction_policy": "lru", "cpu": {"capacity": 1, "eviction_policy": "arc"}},
            ".eviction_policy: cpu.eviction_policy says the same thing",
        ),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": [], "tiers": []}, ".secondary_tiers: tiers says the same thing"),
        ({"cpu_bytes_to_use": 1, "block_size": 32, "blocks_per_chunk": 1}, ".block_size: blocks_per_chunk says"),
        (
            {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "fs", "root_dir": "/", "root": "/"}]},
            ".secondary_tiers[0].root_dir: root says the same thing",
        ),
        ({"cpu_bytes_to_use": 1, "block_size": 40}, "multiple of the device block size (32 tokens), such as 64"),
        ({"cpu_bytes_to_use": 1, "block_size": "x"}, '.block_size: got "x", expected tokens of a chunk'),
        ({"cpu_bytes_to_use": 0}, ".cpu_bytes_to_use: got 0, expected more than 0"),
        ({"cpu_bytes_to_use": "lots"}, '.cpu_bytes_to_use: got "lots", expected a size'),
        ({"spec_name": "CPUOffloadingSpec"}, ".cpu_bytes_to_use: missing; expected a size"),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": {}}, ".secondary_tiers: got {}, expected a list"),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "fs"}]}, ".secondary_tiers[0].root_dir: missing"),
        ({"cpu_bytes_to_use": 1, "store_threshold": True}, ".store_threshold: got true, expected a whole number"),
        ({"cpu_bytes_use": 1}, '["cpu_bytes_use"]: unknown key; did you mean "cpu_bytes_to_use"?'),
    ],
)
def test_a_mistake_is_one_line_in_the_users_words(raw: dict[str, Any], line: str) -> None:
    (text,) = problems(raw)
    assert line in text


def test_block_size_needs_to_know_the_device() -> None:
    (text,) = problems({"cpu_bytes_to_use": 1, "block_size": 32}, block=None)
    assert "give blocks_per_chunk instead" in text


def test_dialects_may_stand_side_by_side() -> None:
    raw = {"cpu_bytes_to_use": 1 << 20, "cpu": {"eviction_policy": "arc"}, "tiers": [{"type": "fs", "root": "/kv"}]}
    settings = ours(raw)
    assert settings.cpu.options == {"capacity": 1 << 20, "eviction_policy": "arc"}
    assert settings.tiers[0].options == {"root": "/kv"}


def test_unknown_keys_are_still_refused_with_the_nearest_named() -> None:
    for raw in ({"cpu": {"capacity": 1}}, {"cpu_bytes_to_use": 1}):
        with pytest.raises(SettingsError, match='retry_timeut: unknown key; did you mean "retry_timeout"'):
            ours(raw | {"retry_timeut": 1})


def test_blocks_that_are_no_blocks_are_left_to_the_settings() -> None:
    for raw in ({"cpu": 1, "spec_name": "x"}, {"cpu_bytes_to_use": 1, "secondary_tiers": [1]}):
        with pytest.raises(SettingsError, match="expected an object with keys"):
            ours(raw)


def test_both_halves_read_it_and_the_notes_are_said(caplog: pytest.LogCaptureFixture) -> None:
    from vllm_tiered_offload.connector.startup import parse_settings, warn_once_at_start

    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=FULL | {"store_threshold": 3},
                                           kv_load_failure_policy="recompute"),
        cache_config=SimpleNamespace(block_size=BLOCK, enable_prefix_caching=True),
    )  # fmt: skip
    assert parse_settings(config).blocks_per_chunk == 2
    assert not caplog.records
    warn_once_at_start(config)
    (record,) = caplog.records
    assert "store_threshold 3 is not honoured" in record.getMessage()


def test_the_table_for_users_has_every_key() -> None:
    text = MIGRATING.read_text()
    assert [key for key in sorted(IN_TREE_KEYS) if f"`{key}`" not in text] == []
    assert not IN_TREE_KEYS & OWN_KEYS
