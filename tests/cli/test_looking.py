"""`fs ls` and `fs du`: what is there, and how many bytes that is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import Command
from fs_kit import FRAME, Bench, fingerprint, keys_of

from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.inspect import survey, walk
from vllm_tiered_offload.tiers.fs.owner import Owner

IMPORTS = """
import sys
from vllm_tiered_offload.cli.main import main
try:
    main(["fs", "ls", sys.argv[1]])
finally:
    print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def furnish(root: Path) -> Bench:
    """Two models, a private generation, and one of everything that is no chunk."""
    keys = keys_of("a", 5)
    other = Bench(root, model=fingerprint(model="other", kv_dtype=["fp8", "fp8"]))
    other.store(keys[:2])
    bench = Bench(root, on_corrupt="quarantine")
    bench.store(keys)
    bench.path(keys[0]).write_bytes(b"bad")
    bench.load(keys[:1])
    shared = Path(bench.tier.namespace_path)
    (bench.path(keys[1]).parent / Owner.of("engine").temporary_name()).write_bytes(b"x" * 100)
    os.link(bench.path(keys[1]), bench.path(keys[1]).parent / "second name")
    (shared / "link").symlink_to("/etc/passwd")
    os.mkfifo(shared / "pipe")
    (root / "README").write_text("mine")
    (root / "v0" / "deep" / "er").mkdir(parents=True)
    (root / "v0" / "deep" / "er" / "file").write_bytes(b"x" * 1234)
    (root / "v7").mkdir()
    bench.tier.reset()
    bench.store(keys[:3])
    return bench


def du_sb(path: Path) -> int:
    return int(subprocess.run(["du", "-sb", path], check=True, capture_output=True, text=True).stdout.split()[0])


def test_du_is_the_systems_du(tmp_path: Path, fs: Command) -> None:
    """Directories, links, several names of one file, temporaries and strangers: every byte once.

    Mutations: counting a second name, following the link, forgetting the root's own size.
    """
    bench = furnish(tmp_path)
    (tmp_path / "plain").mkdir()
    directories_count = du_sb(tmp_path / "plain") > 0  # newer coreutils leave directories out
    outcome = fs("du", tmp_path, "--json")
    assert outcome.code == 0
    assert outcome.json["bytes" if directories_count else "file_bytes"] == du_sb(tmp_path)
    assert outcome.json["bytes"] == sum(outcome.json["bytes_by_kind"].values())
    assert outcome.json["bytes_by_kind"]["chunks"] == (2 + 4 + 3) * FRAME
    assert outcome.json["bytes_by_kind"]["quarantined"] == 3
    assert outcome.json["bytes_by_kind"]["temporaries"] == 100
    assert outcome.json["chunks"] == 9
    name = Path(bench.tier.namespace_path).name
    private = outcome.json["namespaces"][name]
    assert private["bytes" if directories_count else "file_bytes"] == du_sb(Path(bench.tier.namespace_path))
    text = fs("du", tmp_path)
    assert text.code == 0
    assert f"{outcome.json['bytes']:,}" in text.out
    assert name[:12] in text.out


def test_ls_says_what_is_there(tmp_path: Path, fs: Command) -> None:
    bench = furnish(tmp_path)
    found = fs("ls", tmp_path, "--json").json
    assert {n["fields"]["model"] for n in found["namespaces"]} == {"tiny", "other"}
    by_name = {n["fingerprint"]: n for n in found["namespaces"]}
    private = by_name[Path(bench.tier.namespace_path).name]
    assert private["private_to"] == {"engine": "engine", "pid": os.getpid(), "state": "which runs"}
    assert sorted(n["chunks"] for n in found["namespaces"]) == [2, 3, 4]
    assert [(f["name"], f["older"]) for f in found["other_formats"]] == [("v0", True), ("v7", False)]
    assert (found["temporaries"], found["quarantined"], found["strange"]) == (1, 1, 4)
    assert found["troubles"] == []
    text = fs("ls", tmp_path)
    assert text.code == 0
    for part in [
        "tiny",
        "other",
        "fp8",
        "private to engine, which runs",
        "--old-formats",
        "v7: ",
        "1 quarantined file",
    ]:
        assert part in text.out
    assert "fp8, fp8" not in text.out


def test_a_manifest_that_is_none_is_said(tmp_path: Path, fs: Command) -> None:
    bench = Bench(tmp_path)
    bench.store(keys_of("a", 1))
    manifest = Path(bench.tier.namespace_path) / "manifest.json"
    manifest.write_text("{}")
    assert "is not of the format" in fs("ls", tmp_path).out
    manifest.unlink()
    assert fs("ls", tmp_path).code == 0
    [namespace] = fs("ls", tmp_path, "--json").json["namespaces"]
    assert namespace["problem"] is not None
    assert namespace["chunks"] == 1


def test_hostile_names_neither_colour_nor_break_anything(tmp_path: Path, fs: Command) -> None:
    """A model's name, and a file's, may hold escape sequences, markup, and what is not even text."""
    model = "[bold]red\x1b[31m\n\ud800\u202e"
    Bench(tmp_path, model=fingerprint(model=model)).store(keys_of("a", 1))
    (tmp_path / os.fsdecode(b"\xff\x1b[31m")).write_bytes(b"x")
    for arguments in (["ls"], ["du"], ["verify"], ["gc", "--dry-run"], ["explain"]):
        outcome = fs(*arguments, tmp_path)
        assert outcome.code == 0
        assert "\x1b" not in outcome.out
    assert "[bold]red\\x1b[31m\\n\\ud800\\u202e" in fs("ls", tmp_path).out
    assert fs("ls", tmp_path, "--json").json["namespaces"][0]["fields"]["model"] == model


def test_an_empty_root_is_a_root(tmp_path: Path, fs: Command) -> None:
    assert fs("ls", tmp_path).code == 0
    assert fs("verify", tmp_path, "--json").json["chunks"] == 0
    assert fs("du", tmp_path, "--json").json["chunks"] == 0


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    Bench(tmp_path).store(keys_of("a", 1))
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(tmp_path)], check=True, capture_output=True, text=True, timeout=60
    )
    modules = set(done.stderr.split())
    assert "vllm_tiered_offload" in modules
    assert modules.isdisjoint({"vllm", "torch", "numpy"})


def test_what_vanishes_meanwhile_was_never_there(tmp_path: Path) -> None:
    keys = keys_of("a", 8)
    bench = Bench(tmp_path)
    bench.store(keys)

    def walk_while_files_go() -> object:
        for number, entry in enumerate(walk(str(tmp_path), pytest.fail)):
            if number == 3:
                for key in keys:
                    bench.path(key).unlink(missing_ok=True)
                    bench.path(key).parent.rmdir()
            yield entry

    found = survey(str(tmp_path), walk_while_files_go(), Files())
    assert len(found.namespaces) == 1
