"""Kills a process that writes through the tier, again and again, and looks at what it leaves.

    python fs_crash.py KILLS

The writer stores new chunks for ever under a capacity, so it evicts too; every third one resets at first and so writes
in a private generation. Each kill comes at a random moment at which a write is in flight: the writer is stopped
(SIGSTOP), and killed there if a temporary of its own lies in the directory; otherwise it goes on for another while.
Every few kills the root is a new one, so that the first writes to it are hit as well.

After each kill, on the same root: the bytes are within the capacity; every visible file is whole and holds its key's
bytes; a new tier finds and serves them all, and nothing else; its used bytes are those that are there; no temporary and
no private generation is left.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from fs_kit import HIT, MISS, Bench, content, fingerprint, keys_of, make_rows, temporaries

from vllm_tiered_offload.cli.verifying import verify_root
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import JobMetadata, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.block_frame import HEADER_BYTES
from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.inspect import Entry, Kind, RootSurvey, survey, walk
from vllm_tiered_offload.tiers.fs.owner import Owner
from vllm_tiered_offload.tiers.fs.tier import FsTier

ROW_BYTES = 64 << 10
ROWS = 32
CAPACITY = 80 * (ROW_BYTES + HEADER_BYTES)
KILLS_A_ROOT = 8
KILLS_A_RESET = 3
ENGINE = "engine"


# The writer


def write_for_ever(root: str, name: str, mode: str) -> None:
    """Store and evict until killed; after one batch reset, if the mode is that."""
    rows = make_rows(ROWS, ROW_BYTES)
    tier = FsTier.from_settings({"root": root, "capacity": CAPACITY}, engine_id=ENGINE)
    print("ready", flush=True)
    tier.bind_region(rows, RegionGeometry(ROWS, (ROW_BYTES,), 1), fingerprint())
    for batch in count():
        tier.on_schedule_end()
        if mode == "reset" and batch == 1:
            tier.reset()
        keys = keys_of(f"{name} {batch} ", ROWS)
        for row, key in zip(rows, keys, strict=True):
            row[:] = content(key, ROW_BYTES)
        tier.submit_store(JobMetadata(batch, tuple(keys), tuple(range(ROWS)), False, ReqContext("req")))
        assert tier.drain(60)
        list(tier.get_finished_jobs())


# The killer


@dataclass
class Tally:
    """What the kills have brought to light; `other` are lines about what is wrong beside corrupt and left files."""

    kills: int = 0
    chunks: int = 0  # that were found whole
    private_kills: int = 0  # kills that hit a private generation
    corrupt: int = 0
    leftovers: int = 0
    other: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.corrupt or self.leftovers or self.other)

    def __str__(self) -> str:
        line = f"{self.kills} kills, {self.corrupt} corrupt, {self.leftovers} leftovers"
        return line + (f", {len(self.other)} other mistakes" if self.other else "")


def crash(root: Path, kills: int, seed: int = 0) -> Tally:
    """Kill so many writers on `root`."""
    tally, chance = Tally(), random.Random(seed)
    for number in range(kills):
        home = root / f"root {number // KILLS_A_ROOT}"
        mode = "reset" if number % KILLS_A_RESET == KILLS_A_RESET - 1 else "shared"
        kill_while_writing(home, [f"writer {number}", mode], chance)
        tally.kills += 1
        look_at_the_remains(home, tally)
        restart(home, keys_of(f"writer {number} 0 ", ROWS), tally)
    return tally


def kill_while_writing(root: Path, writer: list[str], chance: random.Random) -> None:
    """Raises AssertionError when no write is seen in flight for a minute, or when the writer ends by itself."""
    command = [sys.executable, __file__, "--write", str(root), *writer]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            deadline = time.monotonic() + 60
            time.sleep(chance.random() * 0.1)
            while not stopped_while_writing(process.pid, root):
                assert time.monotonic() < deadline, "no write was in flight"
                os.kill(process.pid, signal.SIGCONT)
                time.sleep(chance.random() * 0.01)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL, "the writer ended before it was killed"


def stopped_while_writing(pid: int, root: Path) -> bool:
    """Stop the process; whether a file that it has begun is not finished. It stays stopped."""
    os.kill(pid, signal.SIGSTOP)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "the writer has ended"
    return any((owner := Owner.of_temporary(name)) and owner.pid == pid for name in temporaries(root))


def look_at_the_remains(root: Path, tally: Tally) -> None:
    """Before anybody cleans up."""
    found = look(root)
    for digest, namespace in found.namespaces.items():
        usage = namespace.usage
        if (held := usage.bytes[Kind.CHUNK] + usage.bytes[Kind.TEMPORARY]) > CAPACITY:
            tally.other.append(f"{digest}: {held} bytes of {CAPACITY}")
        tally.private_kills += namespace.owner is not None and usage.files[Kind.TEMPORARY] > 0
    result = verify_root(found, Files(), stop_at_trouble, 2, lambda _: None)
    tally.chunks += result.chunks
    tally.corrupt += len(result.bad)
    tally.other += [str(file) for file in [*result.bad, *result.unchecked]]


def restart(root: Path, first_keys: list[OffloadKey], tally: Tally) -> None:
    """A new tier of the same engine: does it find, count and serve what is there, and clean up?"""
    rows = make_rows(ROWS, ROW_BYTES)
    bench = Bench(root, rows=rows, engine_id=ENGINE, capacity=CAPACITY)
    found = look(root)
    private = [namespace for namespace in found.namespaces.values() if namespace.owner is not None]
    tally.leftovers += len(found.temporaries) + len(private)
    keys = [OffloadKey(bytes.fromhex(entry.parts[-1])) for entry in chunks(root, fingerprint().digest)]
    used = bench.stat("tier_bytes_used|tier=fs") - bench.stat("fs_elsewhere_bytes")
    held = len(keys) * (HEADER_BYTES + ROW_BYTES)
    if used != held:
        tally.other.append(f"{used} bytes used, {held} held")
    asked = [*keys, *(key for key in first_keys if key not in keys)]
    for start in range(0, len(asked), ROWS):
        check_answers(bench, asked[start : start + ROWS], set(keys), tally)
    bench.assert_idle()
    bench.tier.shutdown()


def check_answers(bench: Bench, keys: list[OffloadKey], there: set[OffloadKey], tally: Tally) -> None:
    bench.wipe()
    if bench.lookup(keys) != [HIT if key in there else MISS for key in keys]:
        tally.other.append("a lookup was wrong")
    loaded = set(bench.load(keys).successful_keys)
    if loaded != there.intersection(keys):
        tally.other.append("a load failed, or there was nothing to load")
    for row, key in zip(bench.rows, keys, strict=False):
        tally.corrupt += key in loaded and row != content(key, ROW_BYTES)


def look(root: Path) -> RootSurvey:
    return survey(str(root), walk(str(root), stop_at_trouble), Files())


def chunks(root: Path, digest: str) -> Iterator[Entry]:
    return (e for e in walk(str(root), stop_at_trouble) if e.kind is Kind.CHUNK and e.namespace == digest)


def stop_at_trouble(path: str, error: OSError) -> None:
    raise error


def main(kills: int) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=os.environ.get("ROOT_DIRECTORY")) as root:
        tally = crash(Path(root), kills, seed=int(os.environ.get("SEED", "0")))
    for line in tally.other:
        print(line)
    print(f"{tally.chunks} whole files found, {tally.private_kills} kills in a private generation,", end=" ")
    print(f"{time.monotonic() - began:.0f} s")
    print(tally)
    return not tally.is_clean


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write_for_ever(*sys.argv[2:])
    sys.exit(main(int(sys.argv[1])))
