"""Settings: every mistake is one clear line; request parameters never raise."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload import settings as settings_module
from vllm_tiered_offload.settings import (
    Block,
    ByteSize,
    RequestParams,
    Settings,
    SettingsError,
    parse_request_params,
    parse_size,
    settings_table,
    validate_block,
)

GOOD = {"cpu": {"capacity": "8GiB"}}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=200),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=8,
)


def problems(raw: Any) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        Settings.parse(raw)
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None, "a chained pydantic error would print its own lines"
    return caught.value.problems


@pytest.mark.parametrize(
    ("given_size", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        (" 2 kib ", 2048),
        ("1kB", 1000),
        ("3TiB", 3 << 40),
        ("0.3B", 0),
    ],
)
def test_sizes(given_size: object, expected: int) -> None:
    assert parse_size(given_size) == expected


@pytest.mark.parametrize(
    "given_size",
    [True, False, -1, 1.5, None, "", "GiB", "-1GiB", "8G", "8 XB", "1e9", "1_000", "٣GiB", "9" * 5000, [], 1 << 61],
)
def test_no_sizes(given_size: object) -> None:
    with pytest.raises(ValueError, match="8GiB"):
        parse_size(given_size)


@given(st.integers(0, 1 << 60))
def test_a_size_in_bytes_reads_back(size: int) -> None:
    assert parse_size(size) == parse_size(str(size)) == parse_size(f"{size} B") == size


def test_defaults() -> None:
    settings = Settings.parse(GOOD)
    assert settings.cpu.capacity == 8 << 30
    assert settings.cpu.eviction_policy == "lru"
    assert settings.tiers == ()
    assert settings.blocks_per_chunk == 1
    assert settings.offload_prompt_only is False
    assert settings.lifecycle == "tolerant"
    worker = settings.worker_config()
    assert (worker.capacity, worker.blocks_per_chunk, worker.copy_threads, worker.populate) == (8 << 30, 1, 1, True)


def test_tier_blocks_stay_raw() -> None:
    raw = {
        "cpu": {"capacity": "1MiB", "hold_time": 3},
        "tiers": [{"type": "fs", "root": "/kv", "capacity": "2GiB"}, {"type": "p2p"}],
    }
    settings = Settings.parse(raw)
    assert settings.cpu.options == {"capacity": 1 << 20, "hold_time": 3}
    assert [(tier.type, tier.options) for tier in settings.tiers] == [
        ("fs", {"root": "/kv", "capacity": "2GiB"}),
        ("p2p", {}),
    ]


def test_settings_are_frozen() -> None:
    settings = Settings.parse(GOOD)
    with pytest.raises(ValueError, match="frozen"):
        settings.blocks_per_chunk = 2  # type: ignore[misc]


@pytest.mark.parametrize("raw", [None, {}])
def test_capacity_has_no_default(raw: Any) -> None:
    assert problems(raw) == ("kv_connector_extra_config.cpu: missing; expected an object with capacity",)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"block_per_chunk": 2}, '.block_per_chunk: unknown key; did you mean "blocks_per_chunk"?'),
        ({"cpu": {"capacity": "8G"}}, '.cpu.capacity: got "8G", expected a size: bytes as a whole number, or text'),
        ({"cpu": {"capacity": True}}, ".cpu.capacity: got true, expected a size"),
        ({"cpu": {"capacity": 0}}, ".cpu.capacity: got 0, expected more than 0"),
        ({"cpu": {"capcity": 5}}, '.cpu.capacity: missing (is "capcity" meant to be it?); expected a size'),
        ({"cpu": 5}, ".cpu: got 5, expected an object with keys"),
        ({"tiers": {}}, ".tiers: got {}, expected a list"),
        ({"tiers": [{"root": "/x"}]}, '.tiers[0].type: missing; Which tier this is: "fs", "p2p"'),
        ({"tiers": [{"type": "fs"}, 3]}, ".tiers[1]: got 3, expected an object with keys"),
        ({"blocks_per_chunk": 0}, ".blocks_per_chunk: got 0, expected at least 1"),
        ({"blocks_per_chunk": "4"}, '.blocks_per_chunk: got "4", expected a whole number'),
        ({"blocks_per_chunk": True}, ".blocks_per_chunk: got true, expected a whole number"),
        ({"max_pinned_device_share": 1.5}, ".max_pinned_device_share: got 1.5, expected at most 1"),
        ({"retry_timeout": float("nan")}, ".retry_timeout: got nan, expected a finite number"),
        ({"job_timeout": 0}, ".job_timeout: got 0, expected more than 0"),
        ({"lifecycle": "loose"}, ".lifecycle: got \"loose\", expected 'tolerant' or 'strict'"),
        ({"populate": "yes\nno"}, '.populate: got "yes\\nno", expected true or false'),
        ({"populate": "x" * 500}, "…, expected true or false"),
    ],
)
def test_one_mistake_is_one_line(change: dict[str, Any], line: str) -> None:
    (text,) = problems(GOOD | change)
    assert text.startswith("kv_connector_extra_config.")
    assert line in text
    assert "\n" not in text
    assert len(text) < 300


def test_unknown_key_without_a_near_one_lists_the_known() -> None:
    (text,) = problems(GOOD | {"zzz": 1})
    assert text.startswith("kv_connector_extra_config.zzz: unknown key; known keys: blocks_per_chunk, breaker_")


def test_several_mistakes_are_all_told() -> None:
    texts = problems({"cpu": {"capacity": -1}, "job_timeout": "x", "tier": []})
    assert len(texts) == 3
    assert [text.split(":")[0].rpartition(".")[2] for text in texts] == ["capacity", "job_timeout", "tier"]


@given(json_values)
def test_nothing_but_settings_errors_of_one_line_each(raw: Any) -> None:
    for value in (raw, {"cpu": raw}, GOOD | {"tiers": raw, "job_timeout": raw}):
        texts: tuple[str, ...] = ("",)
        try:
            Settings.parse(value)
        except SettingsError as error:
            texts = error.problems
        assert texts
        assert all(len(text.splitlines()) <= 1 for text in texts)


class Inner(Block):
    root: str
    capacity: ByteSize = 0


class Outer(Block):
    nested: Inner
    maybe: list[Inner] | None = None


def test_a_tiers_own_block_gets_the_same_errors() -> None:
    path = "kv_connector_extra_config.tiers[0]"
    outer = validate_block(Outer, {"nested": {"root": "/x", "capacity": "1KiB"}}, path)
    assert outer.nested.capacity == 1024
    with pytest.raises(SettingsError) as caught:
        validate_block(Outer, {"nested": {"rot": "/x"}, "maybe": [{"root": "", "capacty": 1}]}, path)
    assert caught.value.problems == (
        f'{path}.nested.root: missing (is "rot" meant to be it?); expected a value',
        f'{path}.nested.rot: unknown key; did you mean "root"?',
        f'{path}.maybe[0].capacty: unknown key; did you mean "capacity"?',
    )
    with pytest.raises(SettingsError, match="got 7, expected an object"):
        validate_block(Outer, 7, path)


def test_the_table_has_every_key_and_a_description() -> None:
    rows = {key: (default, text) for key, default, text in settings_table()}
    assert set(Settings.model_fields) <= set(rows)
    assert rows["cpu.capacity"][0] == "required"
    assert rows["cpu.eviction_policy"][0] == '"lru"'
    assert "tiers[].type" in rows
    for key, (default, text) in rows.items():
        assert len(text) > 10, key
        assert default == "required" or json.loads(default) is not Ellipsis


def test_the_module_text_lists_every_key() -> None:
    lines = [
        line.split()[0]
        for line in (settings_module.__doc__ or "").splitlines()
        if line.startswith("    ") and line[4] != " "
    ]
    assert sorted(lines) == sorted(Settings.model_fields)


def test_request_params_fast_path() -> None:
    assert parse_request_params(None) is parse_request_params({}) is parse_request_params({"do_remote_prefill": True})
    assert parse_request_params(None) == RequestParams(None, None, ())


def test_request_params() -> None:
    assert parse_request_params({"max_load_tokens": 0, "max_offload_tokens": 70}) == RequestParams(0, 70)
    assert parse_request_params({"max_load_tokens": None}) == RequestParams()


@pytest.mark.parametrize("bad", [True, -1, 1.0, "5", [], {}, float("nan"), pytest.param(-(10**5000), id="huge")])
def test_a_bad_request_param_is_ignored_and_told(bad: object) -> None:
    params = parse_request_params({"max_load_tokens": bad, "max_offload_tokens": 5})
    assert (params.max_load_tokens, params.max_offload_tokens) == (None, 5)
    (problem,) = params.problems
    assert problem.startswith("kv_transfer_params.max_load_tokens: got ")
    assert len(problem.splitlines()) == 1
    assert len(problem) < 200


@given(json_values)
def test_request_params_never_raise(raw: Any) -> None:
    for value in (raw, {"max_load_tokens": raw}):
        params = parse_request_params(value)
        for limit in (params.max_load_tokens, params.max_offload_tokens):
            assert limit is None or limit >= 0
