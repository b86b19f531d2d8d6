"""Mistakes of the user and trouble of the system: one line that names the path and says what to do, and a code."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Command
from fs_kit import Bench, keys_of

from vllm_tiered_offload.cli.main import main

COMMANDS = [["ls"], ["du"], ["verify"], ["gc"], ["drop", "ab", "--yes"], ["explain"]]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    bench = Bench(tmp_path / "root")
    bench.store(keys_of("a", 2))
    (tmp_path / "file").write_text("x")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("x")
    namespace = Path(bench.tier.namespace_path)
    return {
        "does not exist": tmp_path / "nowhere",
        "is a file": tmp_path / "file",
        "is no root of the fs tier": tmp_path / "home",
        "is one namespace of a root": namespace,
        "is one format version of a root": namespace.parent,
    }


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_is_no_root(fs: Command, places: dict[str, Path], command: list[str]) -> None:
    """Mutation: taking any directory for a root makes `gc` and `drop` walk through somebody's home."""
    for words, path in places.items():
        outcome = fs(command[0], path, *command[1:])
        assert outcome.code == 2, words
        assert outcome.out == ""
        [line] = outcome.err.splitlines()
        assert line.startswith(f"error: {path} {words}")
        assert "name the" in line


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_root_that_may_not_be_read(
    tmp_path: Path, fs: Command, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.listdir", refuse)
    outcome = fs(command[0], tmp_path, *command[1:])
    assert outcome.code == 2
    [line] = outcome.err.splitlines()
    assert str(tmp_path) in line
    assert "Permission denied" in line
    assert "be the user that runs the engine" in line


@pytest.mark.parametrize("command", [["ls"], ["du"], ["verify"], ["gc"]], ids=lambda command: command[0])
def test_a_directory_that_may_not_be_read_is_said_and_the_rest_is_shown(
    tmp_path: Path, fs: Command, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.store(keys_of("a", 4))
    locked = str(bench.path(keys_of("a", 1)[0]).parent)
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if path == locked:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)
    outcome = fs(*command, tmp_path, "--json")
    assert outcome.code == 3
    assert locked in outcome.err
    assert locked in outcome.json["troubles"][0]
    if command == ["verify"]:
        assert outcome.json["chunks"] == 3


def test_trouble_that_nobody_thought_of_is_one_line_too(
    tmp_path: Path, fs: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> Iterator[str]:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr("os.lstat", fail)
    outcome = fs("ls", tmp_path)
    assert outcome.code == 3
    assert outcome.err.splitlines() == [f"error: {tmp_path}: Input/output error"]


@pytest.mark.parametrize("arguments", [["fs", "nonsense"], ["fs", "ls"], ["fs", "ls", "--nonsense", "/"], ["nonsense"]])
def test_nonsense_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["version"])
    assert not end.value.code
    assert capsys.readouterr().out.count(".") == 2


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"v{number + 2}").mkdir()
    (tmp_path / "v1").mkdir()
    program = f"{sys.executable} -c 'from vllm_tiered_offload.cli.main import main; main()' fs ls {tmp_path}"
    done = subprocess.run(
        ["bash", "-c", f"{program} --json | head -c 1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""


def test_without_typer_there_is_a_hint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    for name in [name for name in sys.modules if name.startswith("vllm_tiered_offload.cli")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as end:
        main(["fs"])
    assert "typer is missing: pip install" in str(end.value.code)
