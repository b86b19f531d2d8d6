"""A namespace comes and goes whole, and nothing but the namespace goes with it."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fs_kit import HIT, Bench, FaultyFiles, fingerprint, keys_of, temporaries

from vllm_tiered_offload.tiers.fs.files import Files, remove_tree
from vllm_tiered_offload.tiers.fs.namespace import Namespace
from vllm_tiered_offload.tiers.fs.owner import STALE_AGE, Owner, host_token

DEAD = Owner("whoever", host_token(), 2**30)


def test_a_link_goes_and_what_it_points_to_stays(tmp_path: Path) -> None:
    """Mutation: looking into whatever is no plain file empties `precious`."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "letter").write_text("dear")
    bench = Bench(tmp_path / "root")
    bench.tier.reset()
    bench.store(keys_of("a", 2))
    private = Path(bench.tier.namespace_path)
    (private / "ab").symlink_to(precious)
    (private / "letter").symlink_to(precious / "letter")
    os.mkfifo(private / "pipe")
    bench.tier.shutdown()
    assert not private.exists()
    assert (precious / "letter").read_text() == "dear"


def test_trouble_with_a_file_is_raised_and_not_taken_for_a_directory(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("x")

    class Refuses(Files):
        def unlink(self, path: str) -> None:
            raise PermissionError(13, "Permission denied", path)

    with pytest.raises(PermissionError):
        remove_tree(Refuses(), str(tmp_path / "tree"))
    assert (tmp_path / "tree" / "file").exists()


@pytest.mark.parametrize("operation", ["mkdir", "open", "chmod", "pwritev", "fdatasync", "rename"])
def test_a_namespace_that_could_not_be_made_is_not_there_at_all(tmp_path: Path, operation: str) -> None:
    files = FaultyFiles()
    keys = keys_of("a", 1)
    bench = Bench(tmp_path, files=files, model=fingerprint(model="later"))
    namespace = Namespace(files, str(tmp_path), fingerprint(), "engine", private=True)
    files.fail(operation, errno.EIO)
    with pytest.raises(Exception, match="cannot be written"):
        namespace.prepare_for_writing()
    files.rules.clear()
    assert os.listdir(tmp_path / "v1") == [Path(bench.tier.namespace_path).name]
    namespace.prepare_for_writing()
    bench.store(keys)
    assert bench.lookup(keys) == [HIT]


def test_a_namespace_is_not_there_before_its_manifest_is(tmp_path: Path) -> None:
    """A kill in between would leave a directory that says nobody's name. Mutation: making it in its place."""
    files, seen = FaultyFiles(), []
    namespace = Namespace(files, str(tmp_path), fingerprint(), "engine", private=True)
    files.rules["fdatasync"] = lambda _: seen.append(os.listdir(tmp_path / "v1"))
    namespace.prepare_for_writing()
    [[name]] = seen
    assert Owner.of_temporary(name) == Owner.of("engine")
    assert os.listdir(tmp_path / "v1") == [Path(namespace.path).name]


def test_half_made_and_half_removed_namespaces_of_the_dead_are_collected(tmp_path: Path) -> None:
    left = [tmp_path / "v1" / owner.temporary_name() for owner in (DEAD, Owner.of("engine"))]
    for directory in left:
        (directory / "ab").mkdir(parents=True)
        (directory / "ab" / "chunk").write_bytes(b"x")
    Bench(tmp_path)
    assert [directory.exists() for directory in left] == [False, True]


def private_generation(root: Path, owner: Owner, seconds: float) -> Path:
    """One that `owner` left, made and last used so long ago."""
    files = Files()
    namespace = Namespace(files, str(root), fingerprint(model=repr(owner)), owner.engine, private=True)
    namespace.owner = owner
    namespace.prepare_for_writing()
    path = Path(namespace.path)
    (path / "ab").mkdir()
    (path / "ab" / "abcd").write_bytes(b"x")
    for name in ("manifest.json", "ab/abcd"):
        os.utime(path / name, (time.time() - seconds,) * 2)
    return path


def test_a_process_id_that_was_given_away_again_is_no_sign_of_life(tmp_path: Path) -> None:
    """Mutation: without the start in `is_alive` both stay, for a process of that id is there."""
    me = Owner.of("engine")
    assert me.started, "this system says when a process began"
    before = replace(me, engine="whoever", started=me.started - 1)
    left = [private_generation(tmp_path, before, 0.0), tmp_path / "v1" / before.temporary_name()]
    alive = [private_generation(tmp_path, me, 0.0), tmp_path / "v1" / me.temporary_name()]
    unknown = private_generation(tmp_path, replace(me, started=0), 0.0)
    for path in (left[1], alive[1]):
        path.mkdir()
    Bench(tmp_path)
    assert not [path for path in left if path.exists()]
    assert all(path.exists() for path in (*alive, unknown))


def test_an_engine_of_our_id_on_another_host_keeps_what_it_uses(tmp_path: Path) -> None:
    """Two hosts, one id, one network filesystem. Mutation: judged by the age of its manifest alone, `used` goes."""
    owners = [Owner("engine", digit * 12, os.getpid(), 1) for digit in "123"]
    used, idle, young = (private_generation(tmp_path, owner, STALE_AGE + 60) for owner in owners)
    os.utime(used / "ab" / "abcd", (time.time() - 60, time.time() - STALE_AGE - 60))
    os.utime(young / "manifest.json")
    somebody = private_generation(tmp_path, Owner("other", "1" * 12, 1, 1), STALE_AGE + 60)
    Bench(tmp_path, engine_id="engine")
    assert [path.exists() for path in (used, idle, young, somebody)] == [True, False, True, True]


def test_a_removal_that_was_held_up_goes_on_where_it_was(tmp_path: Path) -> None:
    files = FaultyFiles()
    namespace = Namespace(files, str(tmp_path), fingerprint(), "engine", private=True)
    namespace.prepare_for_writing()
    files.fail("unlink", errno.EBUSY, times=1)
    with pytest.raises(OSError, match="busy"):
        namespace.remove()
    assert not Path(namespace.path).exists(), "out of everybody's sight at once"
    assert len(temporaries(tmp_path)) == 1
    namespace.remove()
    assert not list((tmp_path / "v1").iterdir())


def test_a_manifest_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    keys = keys_of("a", 2)
    first = Bench(tmp_path)
    first.store(keys[:1])
    manifest = Path(first.tier.namespace_path) / "manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    second = Bench(tmp_path)
    assert second.store(keys[1:]).success
    assert manifest.read_text()[-200:] == text[-200:]
    assert not temporaries(tmp_path)
    assert second.lookup(keys) == [HIT, HIT]
