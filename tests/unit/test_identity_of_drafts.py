"""D5: what a draft model adds to the fingerprint, and that nothing is added where there is none."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tiered_offload.connector.identity import fingerprint_of
from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.testing.simulator import builders
from vllm_tiered_offload.testing.simulator.config import SimConfig, SimGroup

LAYERS = [["one"], ["two"]]


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def speculation(model: Path, method: str = "eagle") -> Any:
    """vLLM's SpeculativeConfig, as far as it matters."""
    config = SimpleNamespace(to_json_string=lambda use_diff: json.dumps({"layers": 1, "use_diff": use_diff}))
    return SimpleNamespace(
        method=method,
        draft_model_config=SimpleNamespace(model=str(model), revision=None, quantization=None, hf_config=config),
        use_eagle=lambda: method == "eagle",
        uses_draft_model=lambda: method == "draft_model",
    )


def fingerprint(speculative_config: Any = None, marked: bool = False) -> Fingerprint:
    config = SimConfig(groups=(SimGroup(), SimGroup(draft=marked)))
    built = SimpleNamespace(**vars(builders.vllm_config(config, "world")))
    built.speculative_config = speculative_config
    return fingerprint_of(built, builders.kv_cache_config(config, LAYERS), 1, "NHD")


def differing(one: Fingerprint, other: Fingerprint) -> set[str]:
    return {difference.name for difference in one.diff(other)}


def test_without_drafts_nothing_is_added(draft: Path) -> None:
    """What older versions stored of such models is still found."""
    plain = fingerprint()
    assert plain == fingerprint(speculation(draft, "ngram"))
    assert "draft" not in plain.to_json()
    assert "ahead" not in plain.to_json()


def test_keys_ahead_are_told_apart_from_those_of_before(draft: Path) -> None:
    """Which groups have them, too: vLLM's marks may change. Fails when the hash scheme is that of every model."""
    marked, all_groups = fingerprint(marked=True), fingerprint(speculation(draft))
    assert differing(fingerprint(), marked) == {"hash_scheme"}
    assert differing(fingerprint(speculation(draft), marked=True), all_groups) == {"hash_scheme"}
    assert dict(marked.fields)["hash_scheme"].endswith('one hash ahead in groups [1]"')


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_another_draft_model_has_other_bytes(draft: Path, method: str) -> None:
    """Its layers are cached among the target's. Fails when the target's weights alone are looked at."""
    before = fingerprint(speculation(draft, method), marked=method == "eagle")
    assert before == fingerprint(speculation(draft, method), marked=method == "eagle")
    (draft / "model.safetensors").write_bytes(b"other weights")
    assert differing(before, fingerprint(speculation(draft, method), marked=method == "eagle")) == {"weights"}
