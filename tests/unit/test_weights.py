"""Which weights an engine loaded (D5, case 44), from files alone."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tiered_offload.connector.weights import weights_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def identity(model: object, load_format: str = "auto", revision: str | None = None, **config: Any) -> Any:
    hf_config = SimpleNamespace(**config)
    return weights_identity(
        SimpleNamespace(model=str(model), revision=revision, hf_config=hf_config),
        SimpleNamespace(load_format=load_format, download_dir=None),
    )


def write(file: Path, tensors: dict[str, Any], payload: bytes = b"\0" * 16) -> None:
    header = json.dumps(tensors).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + payload)
    os.utime(file, ns=(1, 1))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(tmp_path / "model.safetensors", {"w": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]}})
    return tmp_path


def test_equal_files_are_equal_weights(model: Path) -> None:
    (model / "README.md").write_text("not a weight")
    assert identity(model) == identity(model)
    assert json.loads(json.dumps(identity(model))) == identity(model)


def test_another_header_of_the_same_size_is_another_model(model: Path) -> None:
    """Case 44. Mutation: without the header's digest the two are equal."""
    before = identity(model)
    write(model / "model.safetensors", {"w": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]}})
    assert identity(model) != before


def test_other_values_change_the_time(model: Path) -> None:
    before = identity(model)
    (model / "model.safetensors").touch()
    assert identity(model) != before


def test_one_file_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"gguf")
    (tmp_path / "another.gguf").write_bytes(b"other")
    assert [row[0] for row in identity(file)] == ["auto", "model.gguf"]


@pytest.mark.parametrize("damage", [b"", b"abc", (1 << 62).to_bytes(8, "little") + b"{}"])
def test_a_broken_header_does_not_end_the_start(model: Path, damage: bytes) -> None:
    before = identity(model)
    (model / "model.safetensors").write_bytes(damage)
    assert identity(model) != before


def test_dummy_weights_are_never_shared(model: Path) -> None:
    assert identity(model, "dummy") != identity(model, "dummy")


def test_a_hub_model_is_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    """What is in the snapshot counts too, but not when it was downloaded. A branch's name tells nothing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert identity("someone/something", _commit_hash=COMMIT) == identity("someone/something", _commit_hash=COMMIT)
    assert identity("someone/something", revision=COMMIT) == identity("someone/something", _commit_hash=COMMIT)
    assert identity("someone/something", _commit_hash=COMMIT[::-1]) != identity("someone/something", revision=COMMIT)
    assert not caplog.records
    assert identity("someone/something", revision="main") != identity("someone/something", revision="main")
    assert "--revision" in caplog.text
    assert identity("s3://bucket/something", revision=COMMIT) == identity("s3://bucket/something", revision=COMMIT)


def test_the_snapshot_of_a_hub_model(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    config = model / "config.json"
    config.write_text("{}")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_args, **_kwargs: str(config))
    before = identity("someone/something", revision=COMMIT)
    assert len(before) == 2
    (model / "model.safetensors").touch()
    assert identity("someone/something", revision=COMMIT) == before
