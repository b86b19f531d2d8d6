"""`fs gc` and `fs drop`: what nobody uses goes, what somebody may use stays."""

import os
import time
from pathlib import Path

import pytest
from cli_kit import Command
from fs_kit import HIT, MISS, Bench, FaultyFiles, chunk_files, content, fingerprint, keys_of, temporaries

from vllm_tiered_offload.cli import fs as commands
from vllm_tiered_offload.tiers.fs.manifest import Manifest
from vllm_tiered_offload.tiers.fs.namespace import try_root
from vllm_tiered_offload.tiers.fs.owner import Owner, host_token

KEYS = keys_of("a", 4)
DEAD = Owner("engine", host_token(), 2**30)
ALIVE = Owner("engine", host_token(), os.getpid())
ELSEWHERE = Owner("engine", "0" * 12, 1)


def private_generation(root: Path, owner: Owner) -> Path:
    """Of some engine, with two chunks, one quarantined file and a temporary."""
    directory = root / "v1" / fingerprint(generation=str(owner)).digest
    (directory / "ab").mkdir(parents=True)
    (directory / "quarantine").mkdir()
    manifest = Manifest.new(fingerprint(generation=str(owner)), owner)
    (directory / "manifest.json").write_bytes(manifest.to_bytes())
    for name in ["ab/abcd", "ab/abce", "quarantine/abcf", f"ab/{owner.temporary_name()}"]:
        (directory / name).write_bytes(b"x")
    return directory


def age(path: Path, seconds: float) -> None:
    for each in [path, *path.rglob("*")]:
        os.utime(each, (time.time() - seconds,) * 2)


def removed(outcome: object) -> dict[str, str]:
    return {r["path"]: r["what"] for r in outcome.json["removed"]}  # type: ignore[attr-defined]


def test_gc_takes_what_the_dead_left_and_nothing_else(tmp_path: Path, fs: Command) -> None:
    """Mutation: not asking whether the owner is alive removes the living one's."""
    bench = Bench(tmp_path)
    bench.store(KEYS)
    shared = Path(bench.tier.namespace_path)
    (shared / "quarantine").mkdir()
    bad = shared / "quarantine" / KEYS[0].hex()
    bad.write_bytes(b"bad")
    temporary = {owner: bench.path(KEYS[0]).parent / owner.temporary_name() for owner in (DEAD, ALIVE, ELSEWHERE)}
    for path in temporary.values():
        path.write_bytes(b"x")
    half_removed = tmp_path / "v1" / DEAD.temporary_name()
    (half_removed / "ab").mkdir(parents=True)
    (half_removed / "ab" / "chunk").write_bytes(b"x" * 10)
    private = {owner: private_generation(tmp_path, owner) for owner in (DEAD, ALIVE, ELSEWHERE)}
    (tmp_path / "v0").mkdir()
    strange = shared / "letter"
    strange.write_text("mine")
    expected = {
        str(bad): "quarantined file",
        str(temporary[DEAD]): "temporary",
        str(half_removed): "temporary",
        str(private[DEAD]): "private generation",
    }
    before = set(tmp_path.rglob("*"))
    assert removed(fs("gc", tmp_path, "--dry-run", "--json")) == expected
    assert set(tmp_path.rglob("*")) == before
    outcome = fs("gc", tmp_path, "--json")
    assert outcome.code == 0
    assert removed(outcome) == expected
    gone = {path for path in before if any(path.is_relative_to(top) for top in expected)}
    assert set(tmp_path.rglob("*")) == before - gone
    assert (shared / "quarantine").is_dir(), "a live engine may be about to rename into it"
    assert "0 items (0 B) removed" in fs("gc", tmp_path).out


def test_gc_keeps_the_quarantine_when_asked(tmp_path: Path, fs: Command) -> None:
    bench = Bench(tmp_path, on_corrupt="quarantine")
    bench.store(KEYS)
    bench.path(KEYS[0]).write_bytes(b"bad")
    bench.load(KEYS[:1])
    assert removed(fs("gc", tmp_path, "--keep-quarantine", "--json")) == {}
    assert len(removed(fs("gc", tmp_path, "--json"))) == 1


def test_gc_takes_what_was_left_elsewhere_only_when_asked_and_old(tmp_path: Path, fs: Command) -> None:
    old, new, alive = (
        private_generation(tmp_path, owner)
        for owner in (ELSEWHERE, Owner("engine", "1" * 12, 1), Owner("other", host_token(), os.getpid()))
    )
    age(old, 7200)
    age(alive, 7200)
    age(new, 7200)
    (new / "ab" / "abff").write_bytes(b"x")  # it lives
    assert removed(fs("gc", tmp_path, "--json")) == {}
    assert removed(fs("gc", tmp_path, "--json", "--elsewhere", "3h")) == {}
    assert removed(fs("gc", tmp_path, "--json", "--elsewhere", "1h")) == {str(old): "private generation"}
    assert new.exists()
    assert alive.exists()


@pytest.mark.parametrize("text", ["", "h", "1", "1w", "-1h", "1.5h", "²h", "1 h"])
def test_an_age_that_is_none(tmp_path: Path, fs: Command, text: str) -> None:
    outcome = fs("gc", tmp_path, f"--elsewhere={text}")
    assert outcome.code == 2
    assert 'such as "12h"' in outcome.err


def test_drop_takes_one_namespace_and_its_engine_goes_on(tmp_path: Path, fs: Command) -> None:
    """Mutation: emptying the directory in place lets an engine store into what is being removed."""
    bench, other = Bench(tmp_path), Bench(tmp_path, model=fingerprint(model="other"))
    for each in (bench, other):
        each.fill(KEYS)
        each.store(KEYS)
    name = Path(bench.tier.namespace_path).name
    outcome = fs("drop", tmp_path, name[:8].upper(), "--yes", "--json")
    assert outcome.code == 0
    assert removed(outcome) == {bench.tier.namespace_path: "namespace"}
    assert not Path(bench.tier.namespace_path).exists()
    assert not temporaries(tmp_path)
    assert other.load(KEYS).success
    assert not bench.load(KEYS).successful_keys
    bench.fill(KEYS)
    assert bench.store(KEYS).success
    assert bench.load(KEYS).success
    assert bytes(bench.rows[2]) == content(KEYS[2], 4096)
    again = Bench(tmp_path)
    assert again.lookup(KEYS) == [HIT] * 4
    assert fs("verify", tmp_path).code == 0


def test_drop_takes_old_formats_and_leaves_new_ones(tmp_path: Path, fs: Command) -> None:
    """Mutation: dropping whatever is not of this version loses what a newer one stored."""
    bench = Bench(tmp_path)
    bench.store(KEYS)
    for name in ("v0", "v2", "v01", "vault"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_text("x")
    outcome = fs("drop", tmp_path, "--old-formats", "--yes", "--json")
    assert removed(outcome) == {str(tmp_path / "v0"): "older format"}
    assert {path.name for path in tmp_path.iterdir()} == {"v1", "v2", "v01", "vault"}
    assert len(chunk_files(tmp_path / "v1")) == 4
    assert "0 items" in fs("drop", tmp_path, "--old-formats").out, "nothing to ask about"


def test_an_engine_says_that_older_formats_are_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "v0").mkdir()
    try_root(str(tmp_path))
    assert len([r for r in caplog.records if "older version" in r.message and str(tmp_path) in r.message]) == 1
    caplog.clear()
    (tmp_path / "v0").rename(tmp_path / "v2")
    try_root(str(tmp_path))
    assert "older version" not in caplog.text


def test_drop_asks(tmp_path: Path, fs: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.store(KEYS)
    name = Path(bench.tier.namespace_path).name
    refused = fs("drop", tmp_path, name)
    assert refused.code == 2
    assert "--yes" in refused.err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: (_ for _ in ()).throw(SystemExit(1)))
    asked = fs("drop", tmp_path, name)
    assert asked.code == 1
    assert bench.tier.namespace_path in asked.out
    assert len(chunk_files(tmp_path)) == 4
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    assert fs("drop", tmp_path, name).code == 0
    assert not chunk_files(tmp_path)


def test_drop_refuses_what_is_unclear_or_in_use(tmp_path: Path, fs: Command) -> None:
    for number in range(20):  # of twenty digests, two begin alike
        Bench(tmp_path, model=fingerprint(model=str(number))).store(KEYS[:1])
    digests = [path.name for path in (tmp_path / "v1").iterdir()]
    twice = next(d[0] for d in digests if sum(other[0] == d[0] for other in digests) > 1)
    alive, elsewhere = private_generation(tmp_path, ALIVE), private_generation(tmp_path, ELSEWHERE)
    for arguments, words in [
        ([twice], "several namespaces"),
        (["abcdef0123456789"], "`fs ls` lists them"),
        (["../../etc"], "`fs ls` lists them"),
        ([""], "`fs ls` lists them"),
        ([], "--old-formats"),
        ([alive.name], "may be alive"),
        ([elsewhere.name], "may be alive"),
    ]:
        outcome = fs("drop", tmp_path, *arguments, "--yes")
        assert outcome.code == 2
        assert words in outcome.err
        assert len(outcome.err.splitlines()) == 1
    assert len(chunk_files(tmp_path)) == 20


def test_what_cannot_be_removed_is_said_and_the_rest_goes(
    tmp_path: Path, fs: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (tmp_path / "v1" / fingerprint().digest / Owner.temporary_name(DEAD) for _ in range(2))
    one.parent.mkdir(parents=True)
    one.write_bytes(b"x")
    two.write_bytes(b"x")
    files = FaultyFiles()
    files.fail("unlink", 13, match=one.name)
    monkeypatch.setattr(commands, "Files", lambda: files)
    outcome = fs("gc", tmp_path, "--json")
    assert outcome.code == 3
    assert removed(outcome) == {str(two): "temporary"}
    assert str(one) in outcome.err
    assert "be the user that runs the engine" in outcome.err
    assert outcome.json["troubles"]


def test_a_drop_that_was_killed_is_finished_by_gc_and_by_the_next_engine(tmp_path: Path, fs: Command) -> None:
    bench = Bench(tmp_path)
    bench.store(KEYS)
    for collect in (lambda: fs("gc", tmp_path), lambda: Bench(tmp_path, model=fingerprint(model="other"))):
        left = tmp_path / "v1" / DEAD.temporary_name()
        Path(bench.tier.namespace_path).rename(left)
        assert Bench(tmp_path).lookup(KEYS) == [MISS] * 4
        collect()
        assert not left.exists()
        bench = Bench(tmp_path)
        bench.store(KEYS)
