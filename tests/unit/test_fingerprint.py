"""The fingerprint (D5): any change of what decides the bytes changes it, and nothing is left out silently."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.contract.fingerprint import FIELDS, FieldDifference, Fingerprint

VALUES: dict[str, object] = dict.fromkeys(FIELDS) | {
    "model": "tiny",
    "revision": "A",
    "hf_config": {"rope_scaling": {"factor": 1.0}, "layers": 2},
    "kv_dtype": "bfloat16",
    "block_tokens": [16],
    "blocks_per_chunk": 1,
    "tensor_parallel": 1,
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def test_order_of_the_mapping_does_not_matter() -> None:
    backwards = dict(reversed(VALUES.items()))
    backwards["hf_config"] = {"layers": 2, "rope_scaling": {"factor": 1.0}}
    assert Fingerprint.of(VALUES) == Fingerprint.of(backwards)
    assert Fingerprint.of(VALUES).digest == Fingerprint.of(backwards).digest


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_decides(name: str) -> None:
    """Cases 43, 44: a changed field is another namespace, and the difference is named."""
    here, there = Fingerprint.of(VALUES), Fingerprint.of(VALUES | {name: "changed"})
    assert here.digest != there.digest
    assert here.short != there.short
    assert here.diff(there) == [
        FieldDifference(name, json.dumps(VALUES[name], separators=(",", ":"), sort_keys=True), '"changed"')
    ]
    assert here.diff(here) == []


def test_revision_and_rope_factor() -> None:
    """Case 44: RoPE factor 1 then 2, revision A then B, same path."""
    changed = VALUES | {"revision": "B", "hf_config": {"rope_scaling": {"factor": 2.0}, "layers": 2}}
    difference = Fingerprint.of(VALUES).diff(Fingerprint.of(changed))
    assert [entry.name for entry in difference] == ["hf_config", "revision"]
    assert str(difference[1]) == 'revision: "A" here, "B" there'


def test_the_digest_is_the_same_in_every_process() -> None:
    """A constant would pin the format; a second interpreter with another hash seed shows what matters."""
    program = (
        "import sys; from vllm_tiered_offload.contract.fingerprint import Fingerprint\n"
        "print(Fingerprint.from_json(sys.argv[1]).digest)"
    )
    here = Fingerprint.of(VALUES)
    output = subprocess.run(
        [sys.executable, "-c", program, here.to_json()],
        env={"PYTHONHASHSEED": "7"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert output.strip() == here.digest
    assert len(here.digest) == 64
    assert here.digest.startswith(here.short)


@given(json_values, json_values)
def test_equal_digests_mean_equal_values(first: object, second: object) -> None:
    here = Fingerprint.of(VALUES | {"layout": first})
    there = Fingerprint.of(VALUES | {"layout": second})
    same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert (here.digest == there.digest) == same
    assert (here.diff(there) == []) == same


@given(json_values)
def test_json_round_trip(value: object) -> None:
    fingerprint = Fingerprint.of(VALUES | {"device": value})
    read = Fingerprint.from_json(fingerprint.to_json())
    assert read == fingerprint
    assert read.digest == fingerprint.digest
    assert "\n" not in fingerprint.to_json()


def test_another_versions_fields_can_be_read_and_compared() -> None:
    newer = Fingerprint.from_json('[["model","\\"tiny\\""],["weather","1"]]')
    entries = {entry.name: entry for entry in Fingerprint.of(VALUES).diff(newer)}
    assert "model" not in entries
    assert entries["weather"] == FieldDifference("weather", None, "1")
    assert str(entries["weather"]) == "weather: nothing here, 1 there"


def test_nothing_is_forgotten_or_invented() -> None:
    without = {name: value for name, value in VALUES.items() if name != "hash_seed"}
    with pytest.raises(ValueError, match=r"missing .'hash_seed'.*unknown .'hash_sed'"):
        Fingerprint.of(without | {"hash_sed": 1})


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, float("nan"), object()])
def test_values_without_canonical_json_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="fingerprint: device: "):
        Fingerprint.of(VALUES | {"device": value})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "7",
        "[1]",
        '[["a"]]',
        '[["a",1]]',
        '[["b","1"],["a","1"]]',
        '[["a","1"],["a","1"]]',
        b"\xff",
        "[" * 9999,
    ],
)
def test_foreign_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"fingerprint: |utf-8"):
        Fingerprint.from_json(text)
