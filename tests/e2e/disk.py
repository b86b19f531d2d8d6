"""The filesystem tier's directory seen from outside: what is in it, whether it is whole, and how to harm it."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from http_client import Metrics

from vllm_tiered_offload.contract.keys import OffloadKey, make_offload_keys
from vllm_tiered_offload.tiers.block_frame import HEADER_BYTES, FrameError, decode_header, expect, verify

from .engine import CONNECTOR, Engine
from .workload import ANSWER_TOKENS, BLOCK, conversations

TEMPORARY = ".tmp-"
MANIFEST = "manifest.json"


def connector(root: Path, **tier: Any) -> dict[str, Any]:
    """The connector's configuration with one fs tier behind host memory; `tier` are more of the tier's settings."""
    extra = {**CONNECTOR["kv_connector_extra_config"], "tiers": [{"type": "fs", "root": str(root), **tier}]}
    return {**CONNECTOR, "kv_connector_extra_config": extra}


# What is there. Engines add and remove files while we look, so a file that vanishes is no error.


def files(root: Path) -> list[Path]:
    """Every file below `root`."""
    return [Path(where, name) for where, _, names in os.walk(root) for name in names]


def chunk_files(root: Path) -> list[Path]:
    return [file for file in files(root) if not file.name.startswith(".") and file.name != MANIFEST]


def temporaries(root: Path) -> list[Path]:
    return [file for file in files(root) if file.name.startswith(TEMPORARY)]


def generations(root: Path, *, private: bool) -> list[Path]:
    """Namespace directories whose manifest says that one engine keeps them for itself, or that it does not."""
    return [
        manifest.parent
        for manifest in root.glob(f"v1/*/{MANIFEST}")
        if (json.loads(manifest.read_text())["private_to"] is not None) == private
    ]


def state(root: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of every file: two equal states mean that nobody wrote there in between."""
    return {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in files(root)}


def is_whole(file: Path) -> bool:
    """Whether a reader takes the file for the chunk that its name and its directory promise."""
    data = file.read_bytes()
    try:
        header = decode_header(data)
        fingerprint = bytes.fromhex(file.parents[1].name)
        expect(header, OffloadKey(bytes.fromhex(file.name)), fingerprint, len(data) - HEADER_BYTES)
        verify(header, data[HEADER_BYTES:])
    except FrameError:
        return False
    return True


def chunk_names(prompt: list[int]) -> list[str]:
    """File names of a prompt's chunks, in order, hashed as vLLM's scheduler hashes them."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    init_none_hash(sha256)
    hashes: list[bytes] = []
    for start in range(0, len(prompt) // BLOCK * BLOCK, BLOCK):
        hashes.append(hash_block_tokens(sha256, hashes[-1] if hashes else None, prompt[start : start + BLOCK]))
    return [key.hex() for key in make_offload_keys(hashes, 0)]


def loadable_tokens(prompt: list[int], names: Iterable[str]) -> int:
    """Tokens of the prompt's leading chunks that are among `names`. The last token is always computed."""
    names, tokens = set(names), 0
    for name in chunk_names(prompt[:-1]):
        if name not in names:
            break
        tokens += BLOCK
    return tokens


# How much there should be.


def stored_chunks() -> int:
    """Full chunks of the conversations and their answers; the answer's last token has no KV yet."""
    return sum((len(one) + ANSWER_TOKENS - 1) // BLOCK for one in conversations())


def prompt_chunks() -> int:
    """Chunks of the conversations that can be loaded: the last token of a prompt is always computed."""
    return sum((len(one) - 1) // BLOCK for one in conversations())


def wait_until(happened: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.05)


# The tier's counters.


def tier_bytes(metrics: Metrics, direction: str) -> float:
    return metrics.total("vllm:tiered_offload_tier_bytes_total", tier="fs", direction=direction)


def tier_failures(metrics: Metrics, **labels: str) -> float:
    return metrics.total("vllm:tiered_offload_tier_failures_total", tier="fs", **labels)


# Harm.

# One byte of each of these, by turns: magic, payload checksum, key, header checksum; first, middle and last of the
# payload. Not version and checksum algorithm: a file that another version wrote is left alone, by design.
HEADER_OFFSETS = [0, 64, 85, HEADER_BYTES - 1]
PAYLOAD_OFFSETS = [HEADER_BYTES, (HEADER_BYTES + 49_152) // 2, -1]


def flip_a_byte_in_each(chunks: list[Path]) -> None:
    offsets = HEADER_OFFSETS + PAYLOAD_OFFSETS
    for number, file in enumerate(sorted(chunks)):
        data = bytearray(file.read_bytes())
        data[offsets[number % len(offsets)]] ^= 0x40
        file.write_bytes(data)


def kill_in_mid_write(engine: Engine, root: Path, timeout_s: float = 60) -> list[str]:
    """SIGKILL to the engine's processes while a chunk is half written; the names of the chunks that were whole then.

    The engine is frozen first and looked at: an unfinished file in a frozen engine is a write in flight. The files must
    have grown in number since the look before, too. Otherwise it goes on for a moment. Only Python's resource tracker
    is spared: it removes the shared memory that vLLM's processes exchange messages through.
    """
    (core,) = engine.members("EngineCore")
    deadline, seen = time.monotonic() + timeout_s, len(chunk_files(root))
    while time.monotonic() < deadline:
        time.sleep(0.02)
        os.kill(core, signal.SIGSTOP)
        wait_until(lambda: is_stopped(core), "EngineCore stops", 5)
        whole = [file.name for file in chunk_files(root)]
        if len(whole) > seen and any(str(core) in file.name for file in temporaries(root)):
            for pid in set(engine.members()) - set(engine.members("resource_tracker")):
                os.kill(pid, signal.SIGKILL)
            return whole
        seen = len(whole)
        os.kill(core, signal.SIGCONT)
    raise AssertionError("no write was caught in flight")


def is_stopped(pid: int) -> bool:
    """Whether every thread is: a write that had begun may end after the signal, and none begins."""
    states = [task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(state == "T" for state in states)


@contextmanager
def read_only(directory: Path) -> Iterator[bool]:
    """Nobody can write below `directory`, not even the superuser; False where mounting is not allowed."""
    mounted = _mount("mount", "--bind", str(directory), str(directory))
    try:
        yield mounted and _mount("mount", "-o", "remount,bind,ro", str(directory))
    finally:
        if mounted:
            _mount("umount", "--lazy", str(directory))


class SmallDisk:
    """A filesystem of a few hundred KiB in memory, mounted read-only at first. Needs the right to mount."""

    def __init__(self, at: Path, kib: int) -> None:
        self.at = at
        self._kib = kib

    def mount(self) -> bool:
        self.at.mkdir()
        return _mount("mount", "-t", "tmpfs", "-o", f"size={self._kib}k,ro", "tmpfs", str(self.at))

    def make_writable(self) -> None:
        assert _mount("mount", "-o", f"remount,size={self._kib}k,rw", str(self.at))

    def unmount(self) -> None:
        _mount("umount", "--lazy", str(self.at))


def _mount(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def lines_with(engine: Engine, text: str) -> Iterator[str]:
    return (line for line in engine.log_text().splitlines() if text in line)
