"""The filesystem tier behind host memory, on real engines that share one directory.

An engine start takes half a minute, so the tests of this file are one story; each chapter needs the one before it, and
fixtures bring that about when a test runs alone:

    first    stores the conversations; a reset; ends by itself
    second   a restart: answers from disk; then lives on beside
    beside   another engine on the same directory, killed while it writes
    third    a restart after the kill; then every file is damaged
    fourth   a restart over damaged files
    ranks    two engines of two ranks, one after the other, on the same directory

A last engine has a disk of its own that takes nothing, and then next to nothing.
"""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from http_client import Answer, Metrics, Server

from vllm_tiered_offload.tiers.fs.owner import Owner, host_token

from .checks import comes_to_rest, equal_and_loaded, reset_succeeds, served_well
from .conftest import TWO_RANKS, one_core_per_rank
from .disk import (
    SmallDisk,
    chunk_files,
    chunk_names,
    connector,
    flip_a_byte_in_each,
    generations,
    is_whole,
    kill_in_mid_write,
    lines_with,
    loadable_tokens,
    prompt_chunks,
    read_only,
    state,
    stored_chunks,
    temporaries,
    tier_bytes,
    tier_failures,
    wait_until,
)
from .engine import Engine, python_path
from .workload import ANSWER_TOKENS, BLOCK, SMALL_DEVICE_CACHE, Answers, ask_twice, contents, conversations, prompt

HELD_BACK = prompt(2000, 1500)  # on disk since the first engine of two ranks, not loaded by the second before its time
KILLED_PROMPTS = 12
KILLED_PROMPT_LENGTH = 2990  # 93 full chunks and a tail
FRESH_LOOKS = {"share_refresh": 0.2}  # seconds until a chunk that was not there is looked for again


@dataclass
class Starter:
    """Starts engines that have the fs tier over one directory."""

    model: Path
    logs: Path
    root: Path

    def engine(
        self, name: str, *args: str, env: dict[str, str] | None = None, root: Path | None = None, **tier: Any
    ) -> Engine:
        config = connector(root or self.root, **tier)
        return Engine(self.model, self.logs / f"{name}.log", *SMALL_DEVICE_CACHE, *args, connector=config, env=env)


@pytest.fixture(scope="module")
def starter(tiny_model: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory, wanted: Answers) -> Starter:
    """`wanted` comes first: the engine without us would only slow ours."""
    return Starter(tiny_model, logs, tmp_path_factory.mktemp("disk") / "kv")


# ---- first -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first(starter: Starter) -> Iterator[Engine]:
    with starter.engine("disk-first") as engine:
        yield engine


@pytest.fixture(scope="module")
def on_disk(first: Engine, starter: Starter) -> Answers:
    """What the first engine answered; every full chunk of it has reached the disk."""
    answers = ask_twice(first.server(), conversations())
    wait_until(lambda: len(chunk_files(starter.root)) >= stored_chunks(), "every chunk is on disk")
    return answers


def test_everything_reaches_the_disk(wanted: Answers, first: Engine, on_disk: Answers, starter: Starter) -> None:
    assert contents(on_disk.cold) == contents(wanted.cold)
    assert contents(on_disk.device) == contents(wanted.device)
    metrics, chunks = first.server().settled_metrics(), chunk_files(starter.root)
    assert len(chunks) == stored_chunks()
    assert tier_bytes(metrics, "store") == sum(file.stat().st_size for file in chunks)
    assert metrics.failures() == tier_failures(metrics) == 0
    assert temporaries(starter.root) == []
    assert all(is_whole(file) for file in chunks)
    assert set(chunk_names(conversations()[0])) <= {file.name for file in chunks}


def test_reset_leaves_the_shared_directory_alone(
    wanted: Answers, first: Engine, on_disk: Answers, starter: Starter
) -> None:
    """CASES 14. Sent a third time after a reset, a prompt is computed; what it stores is the engine's own until it
    ends. Last test of its engine."""
    (shared,) = generations(starter.root, private=False)
    before, untouched = first.server().settled_metrics(), state(shared)
    assert reset_succeeds(first)
    third = [first.server().complete(one, ANSWER_TOKENS) for one in conversations()]
    after = first.server().settled_metrics()
    assert contents(third) == contents(wanted.cold)
    for source in ("device", "host", "disk"):
        assert after.cached_tokens(source) == before.cached_tokens(source), source

    wait_until(lambda: len(chunk_files(starter.root)) >= 2 * stored_chunks(), "every chunk is in the private directory")
    (private,) = generations(starter.root, private=True)
    assert {file.name for file in chunk_files(private)} == {file.name for file in chunk_files(shared)}
    assert state(shared) == untouched
    served_well(first)
    assert not private.exists()
    assert state(shared) == untouched


# ---- second: a restart -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def second(first: Engine, on_disk: Answers, starter: Starter) -> Iterator[Engine]:
    assert first.stop() == 0
    with starter.engine("disk-second", **FRESH_LOOKS) as engine:
        yield engine


@pytest.fixture(scope="module")
def restarted(second: Engine) -> "Read":
    return read_conversations(second.server())


@dataclass
class Read:
    """Answers to the conversations, and the counters around them."""

    answers: list[Answer]
    before: Metrics
    after: Metrics = field(repr=False)

    def grown(self, source: str) -> float:
        return self.after.cached_tokens(source) - self.before.cached_tokens(source)

    def came_from_disk(self) -> None:
        """Every full chunk was read from disk, once, and nothing else was of use or failed."""
        chunks = prompt_chunks()
        assert self.grown("disk") == chunks * BLOCK
        assert self.grown("host") == self.grown("device") == 0
        read = tier_bytes(self.after, "load") - tier_bytes(self.before, "load")
        loaded = self.after.moved_bytes("load") - self.before.moved_bytes("load")
        assert read > loaded > 0  # the frames are read too
        assert read % chunks == 0
        assert self.after.failures() == tier_failures(self.after) == 0


def read_conversations(server: Server) -> Read:
    before = server.settled_metrics()
    answers = [server.complete(one, ANSWER_TOKENS) for one in conversations()]
    return Read(answers, before, server.settled_metrics())


def test_restart_answers_from_disk(wanted: Answers, restarted: Read) -> None:
    """A prompt that comes from disk computes the tail that a device hit computes, and answers as that does. It also
    shows that the reset of the first engine is over."""
    assert contents(restarted.answers) == contents(wanted.device)
    restarted.came_from_disk()


# ---- beside: two engines at once -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def beside(second: Engine, restarted: Read, starter: Starter) -> Iterator[Engine]:
    """Flushes every file to the device, so that a write takes long enough to be caught half done."""
    with starter.engine("disk-beside", **FRESH_LOOKS, fsync="data") as engine:
        yield engine


def test_two_engines_share_what_they_store(wanted: Answers, second: Engine, beside: Engine) -> None:
    """CASES 45. Each finds what was there, and what the other stores while both live."""
    there = read_conversations(beside.server())
    assert contents(there.answers) == contents(wanted.device)
    there.came_from_disk()
    for number, (writer, reader) in enumerate([(second, beside), (beside, second)]):
        one = prompt(3000 + number, 1000)
        told, found, tokens = hand_over(writer, reader, one)
        assert found.content() == told.content()
        assert tokens == len(one) // BLOCK * BLOCK


def hand_over(writer: Engine, reader: Engine, one: list[int]) -> tuple[Answer, Answer, float]:
    """One engine's answer from its device, the other's from disk, and the tokens that it found there."""
    before = writer.server().settled_metrics()
    writer.server().complete(one, ANSWER_TOKENS)
    told = writer.server().complete(one, ANSWER_TOKENS)
    wait_until(
        lambda: (
            tier_bytes(writer.server().metrics(), "store") - tier_bytes(before, "store") >= len(one) // BLOCK * 4096
        ),
        "the writer stored the prompt",
    )
    writer.server().settled_metrics()
    seen = reader.server().settled_metrics().cached_tokens("disk")
    found = reader.server().complete(one, ANSWER_TOKENS)
    return told, found, reader.server().settled_metrics().cached_tokens("disk") - seen


# ---- the kill, and third: a restart after it -------------------------------------------------------------------


@dataclass
class Killed:
    """What an engine that was killed while writing left behind."""

    prompts: list[list[int]]
    whole: list[str]  # names of the chunks that were whole
    unfinished: list[Path]
    planted: Path  # an unfinished file of a process that lives


@pytest.fixture(scope="module")
def killed(second: Engine, beside: Engine, starter: Starter) -> Killed:
    prompts = [prompt(4000 + i, KILLED_PROMPT_LENGTH) for i in range(KILLED_PROMPTS)]
    with ThreadPoolExecutor(KILLED_PROMPTS) as pool:
        requests = [pool.submit(beside.server().complete, one, 200) for one in prompts]
        whole = kill_in_mid_write(beside, starter.root)
        wait(requests, timeout=60)  # most are cut off; writes trail behind answers, so some may have been given
    (shared,) = generations(starter.root, private=False)
    planted = shared / Owner("somebody", host_token(), os.getpid()).temporary_name()
    planted.write_bytes(b"half a chunk")
    return Killed(prompts, whole, [file for file in temporaries(starter.root) if file != planted], planted)


def test_kill_while_writing_leaves_the_neighbour_alone(wanted: Answers, second: Engine, killed: Killed) -> None:
    """CASES 48, 39. Last test of the second engine, which does not notice."""
    assert killed.unfinished
    assert second.server().complete(conversations()[0], ANSWER_TOKENS).content() == wanted.device[0].content()
    served_well(second)


@pytest.fixture(scope="module")
def third(second: Engine, beside: Engine, killed: Killed, starter: Starter) -> Iterator[Engine]:
    assert second.stop() == 0
    assert beside.wait_empty(30)
    assert beside.leftovers() == []
    with starter.engine("disk-third") as engine:
        yield engine


def test_restart_after_a_kill(wanted: Answers, third: Engine, killed: Killed, starter: Starter) -> None:
    """CASES 48, 39. Whole chunks are hits, half written ones are not there, and the leftovers of the dead go."""
    assert {*killed.whole} <= {file.name for file in chunk_files(starter.root)}
    assert all(is_whole(file) for file in chunk_files(starter.root))
    conversations_again = read_conversations(third.server())
    assert contents(conversations_again.answers) == contents(wanted.device)
    conversations_again.came_from_disk()
    # The directory is looked through when the first request is there, not before.
    wait_until(lambda: temporaries(starter.root) == [killed.planted], "stale temporaries are removed")

    answers, tokens = read_cut_off(third.server(), killed)
    assert tokens == [loadable_tokens(one, killed.whole) for one in killed.prompts]
    assert sum(tokens) > 0
    assert tier_failures(third.server().settled_metrics(), direction="load") == 0
    assert reset_succeeds(third)
    same_text(answers, [third.server().complete(one, ANSWER_TOKENS) for one in killed.prompts])
    killed.planted.unlink()
    served_well(third)


def read_cut_off(server: Server, killed: Killed) -> tuple[list[Answer], list[float]]:
    """Answers to the prompts that were cut off, and how many tokens of each came from disk."""
    answers, tokens = [], []
    for one in killed.prompts:
        before = server.settled_metrics().cached_tokens("disk")
        answers.append(server.complete(one, ANSWER_TOKENS))
        tokens.append(server.settled_metrics().cached_tokens("disk") - before)
    return answers, tokens


def same_text(some: list[Answer], others: list[Answer]) -> None:
    """For answers whose batches had different shapes: sums are rounded differently, so the last bits may differ."""
    for one, other in zip(some, others, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=0.05)


# ---- fourth: damaged files -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fourth(first: Engine, on_disk: Answers, starter: Starter) -> Iterator[Engine]:
    """Its predecessors have ended, and there is one flipped byte in every chunk."""
    assert first.stop() == 0
    (shared,) = generations(starter.root, private=False)
    flip_a_byte_in_each(chunk_files(shared))
    assert not any(is_whole(file) for file in chunk_files(shared))
    with starter.engine("disk-fourth") as engine:
        yield engine


def test_one_flipped_byte_in_every_file(wanted: Answers, fourth: Engine, starter: Starter) -> None:
    """CASES 39. Every chunk that is read is found out, counted, taken away and computed; what nobody read stays.

    A prompt whose head is found out has no use for the rest.
    """
    read = read_conversations(fourth.server())
    assert contents(read.answers) == contents(wanted.cold)
    assert read.grown("disk") == read.grown("host") == read.grown("device") == 0
    assert tier_failures(read.after, direction="load", kind="corrupt") > 0
    assert tier_failures(read.after, direction="load", kind="foreign") > 0  # without its magic, a file is no chunk
    found_out = tier_failures(read.after)
    assert len(conversations()) <= found_out <= prompt_chunks()
    assert read.after.total("vllm:tiered_offload_fs_discarded_files_total") == found_out
    assert tier_bytes(read.after, "load") == 0
    assert len(damaged_places(starter.root)) == prompt_chunks() - found_out
    assert fourth.healthy()


def test_damaged_chunks_are_stored_anew(fourth: Engine, starter: Starter) -> None:
    """V3: no hole stays behind, neither where a chunk came too late to be promoted nor where the scan at the start had
    seen the file that then went. Last test of its engine."""
    places = places_of_conversations(starter.root)
    unread = damaged_places(starter.root)
    wait_until(lambda: all(place.exists() for place in places), "every chunk is stored anew", 10)
    assert damaged_places(starter.root) == unread
    assert len(unread) < prompt_chunks()
    served_well(fourth)


def places_of_conversations(root: Path) -> list[Path]:
    """Where an engine of one rank keeps the chunks that the conversations' prompts can be loaded from."""
    (shared,) = [path for path in generations(root, private=False) if tensor_parallel(path) == 1]
    names = [name for one in conversations() for name in chunk_names(one[:-1])]
    return [shared / name[:2] / name for name in names]


def damaged_places(root: Path) -> list[Path]:
    """Those that are there and not what they should be."""
    return [place for place in places_of_conversations(root) if place.exists() and not is_whole(place)]


def tensor_parallel(generation: Path) -> int:
    """As the manifest tells it to a reader."""
    size: int = json.loads((generation / "manifest.json").read_text())["fields"]["tensor_parallel"]
    return size


# ---- two ranks -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks_on_disk(on_disk: Answers, first: Engine, starter: Starter) -> Answers:
    """What an engine of two ranks answers. It stores every chunk in the directory that engines of one rank use."""
    assert first.stop() == 0
    there = len(chunk_files(starter.root))
    with starter.engine("disk-tp2-first", *TWO_RANKS, env=one_core_per_rank()) as engine:
        engine.server().complete(HELD_BACK, 1)
        answers = ask_twice(engine.server(), conversations())
        metrics = engine.server().settled_metrics()
        assert metrics.cached_tokens("disk") == metrics.failures() == tier_failures(metrics) == 0
        wait_until(
            lambda: len(chunk_files(starter.root)) >= there + stored_chunks() + len(HELD_BACK) // BLOCK,
            "every chunk of two ranks is on disk",
        )
        served_well(engine)
    return answers


def test_two_ranks_store_apart_from_one(two_ranks_on_disk: Answers, starter: Starter) -> None:
    """CASES 43. The directory was full of chunks of these very prompts, and none was taken: its fingerprint differs."""
    directories = generations(starter.root, private=False)
    assert len(directories) == 2
    names = [{file.name for file in chunk_files(directory)} for directory in directories]
    assert set(chunk_names(conversations()[0])) <= names[0] & names[1]


@pytest.fixture(scope="module")
def two_ranks(two_ranks_on_disk: Answers, starter: Starter) -> Iterator[Engine]:
    with starter.engine("disk-tp2-second", *TWO_RANKS, env=one_core_per_rank()) as engine:
        yield engine


def test_two_ranks_restart_from_disk(two_ranks_on_disk: Answers, two_ranks: Engine) -> None:
    read = read_conversations(two_ranks.server())
    assert contents(read.answers) == contents(two_ranks_on_disk.device)
    read.came_from_disk()


def test_directory_that_turned_read_only_is_still_read(two_ranks: Engine, starter: Starter) -> None:
    """V4. Stores that the medium refuses are no reason not to load what is there. Last test of its engine."""
    server = two_ranks.server()
    with read_only(starter.root) as is_read_only:
        if not is_read_only:
            pytest.skip("mounting is not allowed here")
        refused = tier_failures(server.settled_metrics(), direction="store")
        for number in range(3):
            server.complete(prompt(6000 + number, 3000), 1)
        before = server.settled_metrics()
        assert tier_failures(before, direction="store") > refused
        server.complete(HELD_BACK, 1)
        after = server.settled_metrics()
    assert after.cached_tokens("disk") - before.cached_tokens("disk") == len(HELD_BACK) // BLOCK * BLOCK
    served_well(two_ranks)


# ---- a disk that takes nothing ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk | None]:
    """A read-only filesystem with room for about ten chunks; None where mounting is not allowed."""
    disk = SmallDisk(tmp_path_factory.mktemp("small") / "disk", kib=600)
    if not disk.mount():
        yield None
        return
    yield disk
    disk.unmount()


@pytest.fixture(scope="module")
def refused(
    starter: Starter, small_disk: SmallDisk | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine whose root cannot be written, and whose block hashes are seeded at random.

    A directory without write permission would not stop the superuser, so the filesystem is read-only, or else the root
    is a file.
    """
    if small_disk is None:
        root = tmp_path_factory.mktemp("file") / "kv"
        root.write_text("in the way")
    else:
        root = small_disk.at / "kv"
    env = with_xxhash(tmp_path_factory.mktemp("xxhash"))
    engine = starter.engine("disk-refused", "--prefix-caching-hash-algo", "xxhash", env=env, root=root)
    engine.env.pop("PYTHONHASHSEED", None)
    with engine:
        yield engine


def with_xxhash(directory: Path) -> dict[str, str]:
    """Environment in which xxhash can be imported: where it is not installed, another hash under its name serves."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        (directory / "xxhash.py").write_text(
            "import hashlib\n\n\ndef xxh3_128_digest(data):\n    return hashlib.md5(data).digest()\n"
        )
        return python_path(directory)
    return {}


def test_root_that_cannot_be_written(wanted: Answers, refused: Engine) -> None:
    """Said in one line; host memory works as ever."""
    equal_and_loaded(refused.server(), wanted)
    metrics = refused.server().settled_metrics()
    assert metrics.cached_tokens("disk") == tier_bytes(metrics, "store") == 0
    assert tier_failures(metrics, direction="store") > 0
    (line,) = lines_with(refused, "fs tier:")
    assert "cannot be written" in line
    assert "WARNING" in line
    comes_to_rest(refused)


def test_random_hash_seed_is_said(refused: Engine) -> None:
    """CASES 45. In one line of ours that names the setting, whatever vLLM says about it."""
    (line,) = lines_with(refused, "nothing that this engine stores is found again")
    assert "PYTHONHASHSEED" in line
    assert "WARNING" in line


def test_full_root(wanted: Answers, refused: Engine, small_disk: SmallDisk | None) -> None:
    """The disk becomes writable and is full at once. Last test of its engine."""
    if small_disk is None:
        pytest.skip("mounting a small filesystem is not allowed here")
    small_disk.make_writable()
    server, deadline = refused.server(), time.monotonic() + 60
    number = 0
    while not tier_failures(server.settled_metrics(), direction="store", kind="no_space"):
        assert time.monotonic() < deadline, f"the disk never was full: {chunk_files(small_disk.at)}"
        server.complete(prompt(5000 + number, 1000), 1)
        number += 1
    assert reset_succeeds(refused)
    equal_and_loaded(server, wanted)
    assert len(list(lines_with(refused, "fs tier:"))) == 2, "one line for each trouble"
    assert temporaries(small_disk.at) == []
    assert all(is_whole(file) for file in chunk_files(small_disk.at))
    served_well(refused)
