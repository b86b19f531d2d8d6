"""The live port: rows come out of it while the engine's own threads sleep, to those who may have them."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from p2p_kit import PATIENCE, ROW, KeyedPuller, Memory, Puller, Serving, content, cpu_seconds, keys_of, wait_until

from vllm_tiered_offload.settings import SettingsError, validate_block
from vllm_tiered_offload.tiers.block_frame import RunningChecksum, decode_header, expect, verify
from vllm_tiered_offload.tiers.p2p import tcp_listener
from vllm_tiered_offload.tiers.p2p.messages import (
    Data,
    Fetch,
    Found,
    Lookup,
    Ping,
    Pong,
    Reason,
    Refuse,
    Release,
    Welcome,
)
from vllm_tiered_offload.tiers.p2p.settings import P2pTierSettings

KEYS = keys_of("served", 6)


@pytest.fixture
def serving() -> Iterator[Serving]:
    serving = Serving(lease_seconds=5.0)
    serving.put(KEYS)
    yield serving
    serving.close()


@pytest.fixture
def puller(serving: Serving) -> Iterator[Puller]:
    puller = Puller(serving.port)
    assert isinstance(puller.greet(serving.own), Welcome)
    yield puller
    puller.close()


def test_rows_come_with_their_proof_while_nobody_else_runs(serving: Serving, puller: Puller) -> None:
    """The test is the owner's scheduler thread, and only waits here."""
    found = puller.ask(Lookup(1, 1, tuple(KEYS)))
    assert isinstance(found, Found)
    assert len(found.parts) == len(KEYS)
    puller.say(Fetch(1, 1, found.epoch, (1, 0, 5)))
    heard = puller.hear()
    assert heard is not None
    data, behind = heard
    assert data == Data(1, 1, (1, 0, 5))
    for part, row, header_bytes in zip((1, 0, 5), behind[0::2], behind[1::2], strict=True):
        header = decode_header(header_bytes)
        expect(header, KEYS[part], serving.own.fingerprint, ROW)
        verify(header, row)
        assert row == content(KEYS[part], ROW)


def test_a_row_is_read_for_its_checksum_once(serving: Serving, puller: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it is the same. Made to fail by keeping nothing, and by keeping checksums by row alone."""
    read: list[int] = []

    def reading(size: int) -> RunningChecksum:
        read.append(size)
        return RunningChecksum(size)

    monkeypatch.setattr(tcp_listener, "RunningChecksum", reading)

    def fetch(round_: int, salt: str = "") -> None:
        found = puller.ask(Lookup(1, round_, tuple(KEYS)))
        assert isinstance(found, Found)
        puller.say(Fetch(1, round_, found.epoch, (0, 3)))
        heard = puller.hear()
        assert heard is not None
        _, behind = heard
        for part, row, header in zip((0, 3), behind[0::2], behind[1::2], strict=True):
            verify(decode_header(header), row)
            assert row == content(KEYS[part], ROW, salt)
        puller.say(Release(1, round_))

    fetch(1)
    fetch(2)
    assert read == [ROW, ROW]
    primary, req = serving.memory.primary, serving.memory.req
    primary.complete_load(primary.prepare_load(KEYS, req), KEYS)
    wait_until(lambda: serving.memory.pinned == 0, "the releases")
    serving.put(KEYS, "anew")
    fetch(3, "anew")
    assert read == [ROW] * 4


def test_case_57_a_late_fetch_is_refused_in_one_round_trip() -> None:
    """Case 57, with sockets: the timer alone unpins, and the late fetch gets its answer at once."""
    serving = Serving(lease_seconds=0.2)
    serving.put(KEYS)
    puller = Puller(serving.port)
    puller.greet(serving.own)
    found = puller.ask(Lookup(1, 1, tuple(KEYS)))
    assert isinstance(found, Found)
    wait_until(lambda: serving.memory.pinned == 0, "unpinning at the deadline")
    assert puller.ask(Fetch(1, 1, found.epoch, (0,))) == Refuse(1, 1, Reason.GONE)
    puller.close()
    serving.close()


def test_case_57_the_deadline_is_a_setting() -> None:
    for wrong in (0, -1, 3601, "10"):
        with pytest.raises(SettingsError, match=r"p2p\.lease_seconds"):
            validate_block(P2pTierSettings, {"lease_seconds": wrong}, "p2p")


def test_a_puller_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs a bounded queue, its promises end, and others are served meanwhile."""
    serving = Serving(Memory(rows=64, row_bytes=1 << 20), lease_seconds=60.0)
    keys = keys_of("large", 60)
    serving.put(keys)
    monkeypatch.setattr("vllm_tiered_offload.tiers.p2p.tcp_listener.STALL_SECONDS", 0.3)
    greedy, other = Puller(serving.port), Puller(serving.port)
    for puller in (greedy, other):
        assert isinstance(puller.greet(serving.own), Welcome)
    epoch = serving.owner.promises.epoch
    greedy.say(Lookup(1, 1, tuple(keys[:30])))
    greedy.say(Fetch(1, 1, epoch, tuple(range(30))))
    for round_ in range(12):
        assert isinstance(other.ask(Ping(round_)), Pong)
    wait_until(lambda: serving.server.stats().get("p2p_dropped_peers_total"), "dropping the greedy one")
    wait_until(lambda: serving.memory.pinned == 0, "unpinning what was not taken")
    assert isinstance(other.ask(Lookup(1, 1, tuple(keys[:2]))), Found)
    greedy.close()
    other.close()
    serving.close()


def test_idle_costs_no_cpu(serving: Serving, puller: Puller) -> None:
    """With a session and a promise open, the thread sleeps until the promise's deadline. Made to fail by a poll of
    1 ms in place of the timer."""
    puller.ask(Lookup(1, 1, tuple(KEYS)))
    before = cpu_seconds("p2p-tier-server")
    time.sleep(1.0)
    assert cpu_seconds("p2p-tier-server") - before < 0.01


def test_stop_is_bounded_and_leaves_nothing(serving: Serving, puller: Puller) -> None:
    puller.ask(Lookup(1, 1, tuple(KEYS)))
    started = time.monotonic()
    assert serving.server.stop(PATIENCE)
    assert time.monotonic() - started < 2.0
    assert serving.server.stop(PATIENCE)
    assert serving.memory.pinned == 0
    wait_until(lambda: "p2p-tier-server" not in [thread.name for thread in threading.enumerate()], "the thread's end")


def test_a_port_that_is_taken_is_said(caplog: pytest.LogCaptureFixture, serving: Serving) -> None:
    with caplog.at_level(logging.ERROR):
        second = Serving(port=serving.port)
    wait_until(lambda: caplog.records, "the log line")
    assert "choose another `listen` or `port`" in caplog.text
    assert second.server.stop(PATIENCE)


# ---- keys ----------------------------------------------------------------------------------------------------------


class Keyed:
    """An owner with keys, and a puller's options by its own pair."""

    def __init__(self, tmp_path: Path) -> None:
        self.public, self.secret = zmq.curve_keypair()
        self.mine, self.stranger = zmq.curve_keypair(), zmq.curve_keypair()
        file = tmp_path / "key"
        file.write_bytes(self.secret + b"\n")
        self.serving = Serving(key_file=str(file), allowed_keys=[self.mine[0].decode()])
        self.serving.put(KEYS)

    def puller(self, pair: tuple[bytes, bytes], server: bytes | None = None) -> KeyedPuller:
        public, secret = pair
        return KeyedPuller(
            self.serving.port,
            curve_publickey=public,
            curve_secretkey=secret,
            curve_serverkey=server or self.public,
        )


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Keyed]:
    keyed = Keyed(tmp_path)
    yield keyed
    keyed.serving.close()


def test_a_key_on_the_list_is_served_and_is_the_identity(keyed: Keyed) -> None:
    puller = keyed.puller(keyed.mine)
    puller.say(keyed.serving.own)
    heard = puller.hear()
    assert heard is not None
    assert isinstance(heard[0], Welcome)
    [session] = keyed.serving.owner._sessions.values()
    assert session.user == keyed.mine[0].decode()
    puller.close()


def test_other_keys_and_none_are_not_heard(keyed: Keyed) -> None:
    """Made to fail by a ZAP handler that allows every key, and by a socket that is no CURVE server."""
    wrong_server = zmq.curve_keypair()[0]
    strangers = [
        keyed.puller(keyed.stranger),
        keyed.puller(keyed.mine, server=wrong_server),
        KeyedPuller(keyed.serving.port),
    ]
    for stranger in strangers:
        stranger.say(keyed.serving.own)
    assert [stranger.hear(0.3) for stranger in strangers] == [None] * 3
    assert keyed.serving.owner.num_sessions == 0
    for stranger in strangers:
        stranger.close()


def test_a_key_file_without_a_key_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And nobody is served: least of all without keys."""
    empty = tmp_path / "empty"
    empty.write_text("not a key")
    for file in (empty, tmp_path / "none"):
        caplog.clear()
        serving = Serving(key_file=str(file))
        wait_until(lambda: caplog.records, "the log line")
        assert f"key_file {file}" in caplog.text
        assert serving.server.port is None
        assert serving.server.stop(PATIENCE)


PEER = {"host": "10.0.0.1", "port": 1}
KEY = "k" * 40


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"listen": "0.0.0.0"}, "key_file"),
        ({"peers": [PEER]}, "insecure_trusted_network"),
        ({"peers": [PEER], "key_file": "/k"}, "public_key"),
        ({"peers": [{**PEER, "public_key": "short"}], "key_file": "/k"}, "public_key"),
        ({"peers": [{"host": "a b", "port": 1}]}, "host"),
        ({"peers": [{"host": "localhost", "port": 0}]}, "port"),
        ({"key_file": ""}, "key_file"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_settings_that_would_be_open_or_useless_are_refused(block: dict[str, object], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as caught:
        validate_block(P2pTierSettings, block, "tiers[0]")
    assert str(caught.value).startswith("tiers[0]")


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"listen": "::1", "peers": [{"host": "127.0.0.5", "port": 1}, {"host": "localhost", "port": 2}]},
        {"listen": "0.0.0.0", "insecure_trusted_network": True, "peers": [PEER]},
        {"listen": "0.0.0.0", "key_file": "/k", "peers": [{**PEER, "public_key": KEY}]},
    ],
)
def test_settings_that_are_safe_or_say_that_they_are_not(block: dict[str, object]) -> None:
    settings = validate_block(P2pTierSettings, block, "tiers[0]")
    assert settings.keys_that_may_pull == ({KEY} if "key_file" in block else frozenset())
