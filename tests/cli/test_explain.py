"""`fs explain`: why two namespaces do not share, in words."""

from pathlib import Path

import pytest
from cli_kit import Command
from fs_kit import Bench, fingerprint, keys_of

from vllm_tiered_offload.cli.explain import WORDS, explain
from vllm_tiered_offload.contract.fingerprint import FIELDS
from vllm_tiered_offload.tiers.fs.manifest import Manifest


def namespace(root: Path, **fields: object) -> Path:
    bench = Bench(root, model=fingerprint(**fields))
    bench.store(keys_of("a", 1))
    return Path(bench.tier.namespace_path)


def test_every_field_has_words() -> None:
    assert WORDS.keys() == FIELDS.keys()


@pytest.mark.parametrize("field", FIELDS)
def test_the_field_that_differs_is_named(tmp_path: Path, fs: Command, field: str) -> None:
    """Cases 43 and 44, asked afterwards. Mutation: comparing `fields`, which people may edit, names another one."""
    a, b = namespace(tmp_path, **{field: "one"}), namespace(tmp_path, **{field: "two"})
    outcome = fs("explain", a, b / "manifest.json")
    assert outcome.code == 1
    assert [line for line in outcome.out.splitlines() if line.startswith("  ") and line.endswith(":")] == [
        f"  {field} ({WORDS[field][0]}):"
    ]
    assert '"one" | "two"' in outcome.out
    assert WORDS[field][1] in outcome.out
    [pair] = fs("explain", a, b, "--json").json["pairs"]
    [difference] = pair["differences"]
    assert (difference["field"], difference["a"], difference["b"]) == (field, "one", "two")
    assert difference["about"] == FIELDS[field]
    assert not pair["same"]


def test_the_same_is_the_same(tmp_path: Path, fs: Command) -> None:
    a, b = namespace(tmp_path / "a"), namespace(tmp_path / "b")
    outcome = fs("explain", a, b)
    assert outcome.code == 0
    assert "the two share" in outcome.out
    assert fs("explain", a, b, "--json").json["pairs"][0]["same"]


def test_places_inside_long_values_are_named() -> None:
    files = [["auto"], *([f"{i:05}.safetensors", 1000, i] for i in range(40))]
    changed = [list(file) for file in files]
    changed[3][1] = 1001
    old = Manifest.new(fingerprint(weights=files, hf_config={"rope": {"factor": 1.0}, "n": 1}), None)
    new = Manifest.new(fingerprint(weights=changed, hf_config={"rope": {"factor": 2.0}, "m": 1}), None)
    rope, weights = explain(old, new)
    assert rope.details == ("m: nothing | 1", "n: 1 | nothing", "rope.factor: 1.0 | 2.0")
    assert weights.details == ("[3][1]: 1000 | 1001",)
    [all_gone] = explain(old, Manifest.new(fingerprint(weights=[], hf_config={"rope": {"factor": 1.0}, "n": 1}), None))
    assert len(all_gone.details) == 6
    assert all_gone.details[-1] == "and 36 more"


def test_true_and_one_and_null_stay_apart() -> None:
    values = [None, 1, True, "1", 1.0]
    for one in values:
        for other in values:
            pair = [Manifest.new(fingerprint(layout=value), None) for value in (one, other)]
            found = explain(*pair)
            assert bool(found) == (one is not other)
            assert all(difference.details for difference in found)


def test_a_root_compares_all_with_the_shared_one_that_changed_last(tmp_path: Path, fs: Command) -> None:
    namespace(tmp_path, model="first")
    bench = Bench(tmp_path, model=fingerprint(model="last"))
    bench.store(keys_of("a", 8))
    last = bench.tier.namespace_path
    bench.tier.reset()
    bench.store(keys_of("a", 2))
    outcome = fs("explain", tmp_path, "--json")
    assert outcome.code == 0
    assert {pair["a"] for pair in outcome.json["pairs"]} == {last}
    fields = sorted([d["field"] for d in pair["differences"]] for pair in outcome.json["pairs"])
    assert fields == [["generation"], ["model"]]
    assert "PYTHONHASHSEED" not in fs("explain", tmp_path).out


def test_one_namespace_is_nothing_to_compare(tmp_path: Path, fs: Command) -> None:
    namespace(tmp_path)
    outcome = fs("explain", tmp_path)
    assert outcome.code == 0
    assert "nothing to compare" in outcome.out


def test_a_field_of_another_version_is_shown(tmp_path: Path, fs: Command) -> None:
    a, b = namespace(tmp_path / "a"), namespace(tmp_path / "b")
    manifest = b / "manifest.json"
    manifest.write_text(manifest.read_text().replace(r"[[\"block_tokens", r"[[\"astrology\",\"7\"],[\"block_tokens"))
    outcome = fs("explain", a, b)
    assert outcome.code == 1
    assert "nothing | 7" in outcome.out
    assert "another version of vllm-tiered-offload" in outcome.out


def test_what_is_no_namespace_is_one_line(tmp_path: Path, fs: Command) -> None:
    a = namespace(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "manifest.json").write_bytes(b"\xff")
    for other, words in [
        (tmp_path / "nowhere", "has no manifest.json"),
        (tmp_path, "has no manifest.json"),
        (tmp_path / "bad", "is not UTF-8 text"),
        (tmp_path / "bad" / "manifest.json", "is not UTF-8 text"),
    ]:
        outcome = fs("explain", a, other)
        assert outcome.code == 2
        assert words in outcome.err
        assert len(outcome.err.splitlines()) == 1
