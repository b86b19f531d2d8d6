"""`p2p keygen | public-key | ping | status`: keys, and engines that are looked at while they run."""

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cli_kit import Command
from p2p_kit import Engine, Serving, keys_of, wait_until
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from vllm_tiered_offload.telemetry import OffloadStats, PrometheusMetrics
from vllm_tiered_offload.telemetry.metrics import parse_key
from vllm_tiered_offload.tiers.p2p.keys import read_key_file

# ---- keys ----------------------------------------------------------------------------------------------------------


def test_a_key_pair(p2p: Command, tmp_path: Path) -> None:
    """The secret half is in the file alone, which is its owner's, whatever the umask says.

    Made to fail by printing the pair, and by a mode that the umask decides.
    """
    file = tmp_path / "key"
    umask = os.umask(0)
    try:
        made = p2p("keygen", file)
    finally:
        os.umask(umask)
    keys = read_key_file(str(file))
    assert made == (0, f"{keys.public.decode()}\n", "")
    assert keys.secret.decode() not in made.out
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert p2p("public-key", file, "--json").json == {"key_file": str(file), "public_key": keys.public.decode()}


def test_a_key_that_is_there_stays(p2p: Command, tmp_path: Path) -> None:
    """An engine uses it: a new one would lock that engine out. Made to fail by writing over it."""
    file = tmp_path / "key"
    p2p("keygen", file)
    before = file.read_bytes()
    again = p2p("keygen", file)
    assert (again.code, again.out) == (2, "")
    assert f"{file} is there already" in again.err
    assert file.read_bytes() == before


def test_mistakes_with_keys_are_one_line(p2p: Command, tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("x")
    for arguments, code, words in [
        (("keygen", tmp_path / "no" / "key"), 3, "No such file or directory"),
        (("public-key", tmp_path / "nowhere"), 2, "No such file or directory"),
        (("public-key", tmp_path / "letter"), 2, "40 characters of Z85"),
        (("ping", "localhost"), 2, "expected HOST:PORT"),
        (("ping", "localhost:0"), 2, "expected HOST:PORT"),
        (("ping", "localhost:1", "--public-key", "k" * 40), 2, "go together"),
    ]:
        outcome = p2p(*arguments)
        [line] = outcome.err.splitlines()
        assert (outcome.code, outcome.out) == (code, "")
        assert words in line


# ---- ping ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def serving() -> Iterator[list[Serving]]:
    engines: list[Serving] = []
    yield engines
    for engine in engines:
        engine.close()


def test_ping(p2p: Command, serving: list[Serving]) -> None:
    """The engine stays as it was: no session, no promise."""
    serving.append(Serving())
    address = f"127.0.0.1:{serving[0].port}"
    outcome = p2p("ping", address, "--count", 2)
    assert outcome.code == 0
    assert [line.split(" alive, ")[0] for line in outcome.out.splitlines()] == [f"{address}:"] * 2
    told = p2p("ping", address, "--json").json
    assert told["alive"]
    assert len(told["round_trips_ms"]) == 3
    assert all(0 < number < 1000 for number in told["round_trips_ms"])
    assert serving[0].server.stats()["p2p_sessions"] == 0


def test_ping_of_a_thread_that_hangs(p2p: Command, serving: list[Serving]) -> None:
    """Its process holds the connection. Made to fail by taking a connection for an answer."""
    serving.append(Serving())
    stuck, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        go_on.wait()

    serving[0].server._turn = lambda ready: hang()  # type: ignore[method-assign]
    outcome = p2p("ping", f"127.0.0.1:{serving[0].port}", "--timeout", 0.3)
    go_on.set()
    assert stuck.is_set()
    assert (outcome.code, outcome.out) == (1, f"127.0.0.1:{serving[0].port}: no answer within 0.3 s\n")


def test_ping_where_nobody_listens(p2p: Command, serving: list[Serving]) -> None:
    gone = Serving()
    port = gone.port
    gone.close()
    outcome = p2p("ping", f"127.0.0.1:{port}", "--json")
    assert outcome.code == 1
    assert outcome.json == {"address": f"127.0.0.1:{port}", "alive": False, "error": "nobody listens there"}


def test_ping_with_keys(p2p: Command, serving: list[Serving], tmp_path: Path) -> None:
    """It shows who is let in: the key on the list, with the right public key of the engine."""
    for name in ("owner", "friend", "stranger"):
        p2p("keygen", tmp_path / name)
    public = {name: read_key_file(str(tmp_path / name)).public.decode() for name in ("owner", "friend", "stranger")}
    serving.append(Serving(key_file=str(tmp_path / "owner"), allowed_keys=[public["friend"]]))
    address = f"127.0.0.1:{serving[0].port}"

    def ping(who: str, engine: str) -> int:
        return p2p("ping", address, "--key-file", tmp_path / who, "--public-key", public[engine]).code

    assert ping("friend", "owner") == 0
    assert ping("stranger", "owner") == 1
    assert ping("friend", "stranger") == 1
    assert p2p("ping", address).code == 1


def test_ping_of_something_else(p2p: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        outcome = p2p("ping", f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert outcome.code == 1
    assert "no peer tier of this version" in outcome.out


# ---- status --------------------------------------------------------------------------------------------------------


class Page:
    """An engine's /metrics."""

    def __init__(self) -> None:
        self.text = b""
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(page.text)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def show(self, stats: dict[str, float]) -> None:
        """These numbers, the way that vLLM shows them."""
        registry = CollectorRegistry()
        metrics = PrometheusMetrics(
            lambda **kwargs: Counter(**kwargs, registry=registry),
            lambda **kwargs: Gauge(**kwargs, registry=registry),
            ["model_name", "engine"],
            {0: ["tiny", "0"]},
        )
        known = {key: value for key, value in stats.items() if (parsed := parse_key(key)) and parsed[0].kind == "gauge"}
        counted = {key: value for key, value in stats.items() if key not in known}
        metrics.observe(OffloadStats(counted, known).to_dict())
        self.text = generate_latest(registry)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page()
    yield made
    made.close()


@pytest.fixture
def new_engine() -> Iterator[Callable[..., Engine]]:
    with ExitStack() as engines:
        yield lambda *ports: engines.enter_context(closing(Engine(*ports)))


def test_status(p2p: Command, page: Page, new_engine: Callable[..., Engine]) -> None:
    """What a puller and its owner really count, as vLLM would show it: every number of theirs has its metric."""
    keys = keys_of("told", 3)
    owner = new_engine()
    owner.put(keys)
    puller = new_engine([owner.port])
    puller.begin()
    assert puller.load(keys) == tuple(keys)
    wait_until(lambda: owner.memory.pinned == 0, "fetching everything")
    peer = f"127.0.0.1:{owner.port}"
    owners, pullers = dict(owner.tier.get_stats()), dict(puller.tier.get_stats())
    for key in [*owners, *pullers]:
        assert parse_key(key) is not None, key

    page.show(pullers)
    told = p2p("status", page.url, "--json").json["0"]["peers"][peer]
    assert told["up"] == 1
    assert told["pulled_bytes"] == pullers[f"p2p_pulled_bytes_total|peer={peer}"] == 3 * 4096
    assert told["seconds"] > 0
    assert told["failures"] == {}
    assert peer in p2p("status", f"{page.url}/metrics").out

    page.show(owners)
    outcome = p2p("status", page.url)
    assert outcome.code == 0
    assert "serves 1 session, 0 leased rows, 0 expired leases" in outcome.out
    assert "refused: none" in outcome.out


def test_status_tells_failures(p2p: Command, page: Page) -> None:
    lost, silent = (f"p2p_peer_failures_total|peer=a:1|kind={kind}" for kind in ("lost", "silent"))
    page.show({lost: 2, silent: 1, "p2p_refused_total|reason=fingerprint": 4})
    outcome = p2p("status", page.url)
    assert "lost 2, silent 1" in outcome.out
    assert "refused: fingerprint 4" in outcome.out


def test_status_of_what_is_no_engine(p2p: Command, page: Page) -> None:
    outcome = p2p("status", page.url)
    assert outcome.code == 2
    assert "tells nothing of a peer tier" in outcome.err
    page.text = b"\xff<html>"
    assert p2p("status", page.url).code == 1
    page.close()
    assert p2p("status", page.url).code == 1
    assert p2p("status", "nonsense").code == 1
