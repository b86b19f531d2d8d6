"""Run `vllm serve` as a real process: started, watched until healthy, ended, and proved gone.

Used by the end-to-end tests and by ci/bench. Each engine gets a process group of its own, so that everything it starts
can be found and ended, and a log file whose last lines are shown when it does not come up.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from http_client import Server

MODEL_NAME = "model-under-test"

CONNECTOR: dict[str, Any] = {
    "kv_connector": "TieredOffloadConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu": {"capacity": "256MiB"}, "lifecycle": "strict"},
}

BASE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume, /sleep, /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM sets one core more aside when there is a connector. Engines are only comparable with as many threads, and
    # the number of threads also decides how sums are rounded.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_CPU_CI_ENV": "1",  # no warm-up of a model that answers in milliseconds
}

BASE_ARGS = [
    *("--host", "127.0.0.1"),
    *("--served-model-name", MODEL_NAME),
    *("--dtype", "bfloat16"),
    "--enforce-eager",
    # Without it vLLM kills EngineCore at once; with it, EngineCore has to come to an end by itself.
    *("--shutdown-timeout", "20"),
]


RANK_FILE = re.compile(r"/dev/shm/(vllm_dist_\S+)")


class EngineFailed(RuntimeError):
    """The engine stopped, or did not come up in time. Carries the end of its log."""


class Engine:
    """One `vllm serve` process group. Use it as a context manager; leaving it ends everything it started."""

    def __init__(
        self,
        model: Path | str,
        log: Path,
        *args: str,
        connector: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [*serve_command(str(model)), *BASE_ARGS, "--port", str(self.port), *args]
        if connector is not None:
            self.command += ["--kv-transfer-config", json.dumps(connector)]
        self.env = {**os.environ, **BASE_ENV, **(env or {})}
        self.shm_before = shared_memory()
        self.rank_files: set[str] = set()
        self.process: subprocess.Popen[bytes] | None = None
        self.group = 0

    def start(self, timeout_s: float = 240) -> "Engine":
        """Start and return once it answers; EngineFailed with the end of the log otherwise."""
        self.launch()
        deadline = time.monotonic() + timeout_s
        while not self.healthy():
            if not self.running():
                raise EngineFailed(f"vllm serve stopped while starting:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                self.kill_group()
                raise EngineFailed(f"vllm serve was not ready after {timeout_s:.0f} s:\n{self.log_tail()}")
            time.sleep(0.25)
        return self

    def launch(self) -> None:
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.group = self.process.pid

    def server(self) -> Server:
        return Server(self.url, MODEL_NAME)

    def post(self, path: str, timeout: float = 30, **params: Any) -> httpx.Response:
        return httpx.post(self.url + path, params=params, timeout=timeout, verify=False).raise_for_status()

    def healthy(self) -> bool:
        try:
            return httpx.get(self.url + "/health", timeout=5, verify=False).status_code == 200
        except httpx.HTTPError:
            return False

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def members(self, title: str = "") -> list[int]:
        """Living processes of the group whose title holds `title`, e.g. EngineCore or Worker."""
        return [pid for pid in group_members(self.group) if title in process_title(pid)]

    def stop(self, timeout_s: float = 30) -> int | None:
        """End it politely. Returns the exit status, or None when it had to be killed."""
        assert self.process is not None
        self.note_rank_files()
        self.process.send_signal(signal.SIGTERM)
        try:
            status: int | None = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        # Workers may need a moment after their parent has gone.
        if not self.wait_empty(10):
            status = None
        self.kill_group()
        if "force killing" in self.log_text():
            status = None
        return status

    def kill_group(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)
            self.process.wait(10)
        for name in self.rank_files:
            Path("/dev/shm", name).unlink(missing_ok=True)

    def note_rank_files(self) -> None:
        """vLLM's CPU ranks exchange tensors through files in shared memory that vLLM itself never removes."""
        for pid in group_members(self.group):
            self.rank_files |= set(RANK_FILE.findall(memory_map(pid)))

    def wait_empty(self, timeout_s: float) -> bool:
        """Whether every process of the group is gone within the time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process is not None:
                self.process.poll()  # reap the leader, or it stays a zombie
            if not group_members(self.group):
                return True
            time.sleep(0.1)
        return not group_members(self.group)

    def leftovers(self) -> list[str]:
        """What this engine left in shared memory and among the processes."""
        left = [f"process {pid} ({process_title(pid)})" for pid in group_members(self.group)]
        mapped = mapped_inodes()
        new = [name for name in shared_memory() - self.shm_before - self.rank_files if inode_of(name) not in mapped]
        return left + [f"/dev/shm/{name}" for name in sorted(new)]

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def __enter__(self) -> "Engine":
        try:
            return self.start()
        except BaseException:
            self.kill_group()
            raise

    def __exit__(self, *exc: object) -> None:
        if group_members(self.group):
            self.stop()
        self.kill_group()


def serve_command(model: str) -> list[str]:
    """`vllm serve`. The vllm-cpu distribution's `vllm` command looks for a distribution called vllm and fails without
    it, so there the module behind the command is started instead; it is the same server."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        module = ["-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server"]
        return [sys.executable, *module, "--model", model]
    return [str(Path(sys.executable).with_name("vllm")), "serve", model]


def python_path(*first: Path) -> dict[str, str]:
    """Environment in which Python looks into these directories first, for modules and for installed packages."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def shared_memory() -> set[str]:
    shm = Path("/dev/shm")
    return {entry.name for entry in shm.iterdir()} if shm.is_dir() else set()


def inode_of(name: str) -> int | None:
    """Of a file in shared memory; None when it has gone meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return Path("/dev/shm", name).stat().st_ino
    return None


def mapped_inodes() -> set[int | None]:
    """What some living process maps is of no engine, once its processes are gone; what has gone (None) neither.

    By inode: a semaphore is mapped under the name that it had while it was made.
    """
    inodes: set[int | None] = {None}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # ended meanwhile, or not ours to look into
            continue
        inodes |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return inodes


def group_members(group: int) -> list[int]:
    """Living (not zombie) processes of a process group."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and process_group(int(entry.name)) == group:
            members.append(int(entry.name))
    return members


def process_group(pid: int) -> int | None:
    try:
        # The name in parentheses may hold spaces; the fields after it are state, parent, group.
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(group)


def memory_map(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def process_title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
