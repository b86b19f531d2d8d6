"""Rows that are read out of another engine's memory, by real NIXL over TCP on loopback."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from p2p_kit import ROW, Engine, attach_at_once, content, keys_of, needs_nixl, wait_until
from test_p2p_processes import BYTES, CHUNKS, KEYS, ROW_BYTES, OwnerProcess, check_bytes, check_nothing_lands

from vllm_tiered_offload import JobResult, LookupResult, ReqContext
from vllm_tiered_offload.tiers.p2p import nixl_agent, nixl_reader, read_queue
from vllm_tiered_offload.tiers.p2p.instructions import Address, Source, Wanted
from vllm_tiered_offload.tiers.p2p.leases import PromisedRow
from vllm_tiered_offload.tiers.p2p.messages import Confirm, Proof
from vllm_tiered_offload.tiers.p2p.nixl_agent import Agent, ucx_settings, why_not_nixl
from vllm_tiered_offload.tiers.p2p.settings import P2pTierSettings

pytestmark = needs_nixl

HIT, MISS = LookupResult.HIT, LookupResult.MISS
SOME = keys_of("read", 8)


@pytest.fixture(autouse=True)
def _over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where UCX can, it reads another process's memory by a system call, which a stopped process does not stop."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    attach_at_once(monkeypatch)


@pytest.fixture
def owners() -> Iterator[list[OwnerProcess]]:
    started: list[OwnerProcess] = []
    yield started
    for owner in started:
        owner.end()


@pytest.fixture
def pullers() -> Iterator[list[Engine]]:
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.close()


def new_puller(pullers: list[Engine], *ports: int, **settings: object) -> Engine:
    engine = Engine(ports, rows=CHUNKS, row_bytes=ROW_BYTES, transport="nixl", **settings)
    pullers.append(engine)
    return engine


def test_rows_are_read_while_the_owner_s_main_thread_sleeps(owners: list[OwnerProcess], pullers: list[Engine]) -> None:
    owners.append(OwnerProcess(transport="nixl"))
    puller = new_puller(pullers, owners[0].port)
    puller.begin()
    assert puller.look(KEYS) == [HIT] * CHUNKS
    result = puller.result(puller.submit(KEYS))
    assert result.success
    check_bytes(puller, result)
    assert puller.stat("p2p_rows_read_total") == CHUNKS
    assert puller.stat(BYTES) >= CHUNKS * ROW_BYTES


def test_the_owner_is_killed_in_the_middle_of_a_read(owners: list[OwnerProcess], pullers: list[Engine]) -> None:
    """Case 60: the job ends once and at once, with what was confirmed; what follows is unaffected."""
    owners.append(OwnerProcess(seconds_a_row=0.004, transport="nixl"))
    puller = new_puller(pullers, owners[0].port, pull_timeout=30.0, silence_timeout=20.0)
    puller.begin()
    assert puller.look(KEYS) == [HIT] * CHUNKS
    job = puller.submit(KEYS)
    wait_until(lambda: puller.stat(BYTES) > 0, "a part of it")
    owners[0].process.kill()
    killed = time.monotonic()
    result = puller.result(job)
    assert time.monotonic() - killed < 2.0, "a dead peer was waited for"
    assert 0 < len(result.successful_keys) < CHUNKS
    check_bytes(puller, result)
    assert puller.look(KEYS[:1], puller.begin(ReqContext("after"))) == [MISS]


def test_the_owner_is_stopped_in_the_middle_of_a_read(
    owners: list[OwnerProcess], pullers: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 60: the job ends after `silence_timeout`; when the process goes on, nothing gets into the rows that belong
    to others by then. Made to fail by removing the peer from an agent that goes on, instead of ending the agent."""
    monkeypatch.setattr(read_queue, "READ_BYTES", 16 << 20)  # so that much is in flight
    owners.append(OwnerProcess(0.0, "nixl", "restless"))
    puller = new_puller(pullers, owners[0].port, pull_timeout=30.0, silence_timeout=0.5)
    client = puller.tier._client
    assert client is not None
    puller.begin()
    assert puller.look(KEYS) == [HIT] * CHUNKS
    reader = client._reader
    assert reader is not None
    read = reader.read

    def stop_then_read(*args: object) -> None:
        """The owner has heard of the read when it is stopped, and some of it is on its way."""
        read(*args)  # type: ignore[arg-type]
        time.sleep(0.003)
        owners[0].process.send_signal(signal.SIGSTOP)

    monkeypatch.setattr(reader, "read", stop_then_read)
    stopped = time.monotonic()
    result = puller.result(puller.submit(KEYS))
    assert time.monotonic() - stopped < 3.0
    assert not result.success
    check_bytes(puller, result)
    check_nothing_lands(puller, owners[0], 0.5)


def test_two_threads_read_where_a_read_is_a_copy(
    owners: list[OwnerProcess], pullers: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As UCX chooses by itself within one machine. Case 60: the owner is killed; both end, and the job does.

    Made to fail by never adding the second one.
    """
    monkeypatch.delenv("UCX_TLS")
    owners.append(OwnerProcess(transport="nixl"))
    puller = new_puller(pullers, owners[0].port, pull_timeout=30.0, silence_timeout=20.0, lookup_cache=0.0)

    def pull(name: str) -> JobResult:
        request = puller.begin(ReqContext(name))
        assert puller.look(KEYS, request) == [HIT] * CHUNKS
        for row in puller.memory.rows:
            row[:] = bytes(ROW_BYTES)
        return puller.result(puller.submit(KEYS, req=request))

    assert pull("first").success
    client = puller.tier._client
    assert client is not None
    [peer], reader = client._pulling._peers.values(), client._reader
    if not peer.reads_alone:
        pytest.skip("processes do not read each other's memory here")
    assert reader is not None
    lanes = reader._peers[peer.address]._lanes
    assert len(lanes) == nixl_reader.LANES
    assert all(lane.is_made.wait(10.0) for lane in lanes)
    for number in range(3):
        result = pull(f"both {number}")
        assert result.success
        check_bytes(puller, result)
    assert puller.stat("p2p_rows_read_total") == 4 * CHUNKS
    request = puller.begin(ReqContext("killed"))
    assert puller.look(KEYS, request) == [HIT] * CHUNKS
    job = puller.submit(KEYS, req=request)
    owners[0].process.kill()
    killed = time.monotonic()
    check_bytes(puller, puller.result(job))
    assert time.monotonic() - killed < 2.0, "a dead peer was waited for"
    wait_until(lambda: not any(lane._thread.is_alive() for lane in lanes), "the end of both")


def test_rows_side_by_side_at_both_ends_are_one_piece() -> None:
    """Fewer pieces are fewer system calls. Made to fail by looking at one end alone."""

    def wanted(*pairs: tuple[int, int]) -> list[Wanted]:
        address = Address("a", 1)
        return [Wanted(SOME[0], ours, Source(address, 1, 1, 0, b"", 1.0, theirs)) for ours, theirs in pairs]

    runs = list(nixl_reader._runs(wanted((4, 7), (5, 8), (6, 9), (7, 11), (8, 12), (3, 13), (4, 12), (6, 13))))
    assert runs == [(4, 7, 3), (7, 11, 2), (3, 13, 1), (4, 12, 1), (6, 13, 1)]
    assert list(nixl_reader._runs([])) == []


def test_rows_that_are_scattered_at_either_end_are_read_each_from_its_place(pullers: list[Engine]) -> None:
    """Runs of two and three, in another order here than there. Made to fail by pieces that are a row too long."""
    owner = Engine(transport="nixl")
    owner.put(SOME)
    puller = Engine([owner.port], transport="nixl")
    pullers.extend([puller, owner])
    puller.begin()
    order = [SOME[index] for index in (5, 6, 7, 0, 1, 3, 2, 4)]
    assert puller.look(order) == [HIT] * len(SOME)
    rows = [10, 11, 12, 3, 4, 0, 1, 20]
    result = puller.result(puller.submit(order, rows))
    assert result.success
    for row, key in zip(rows, order, strict=True):
        assert bytes(puller.memory.rows[row]) == content(key, puller.memory.geometry.row_bytes)
    others = set(range(len(puller.memory.rows))) - set(rows)
    assert all(bytes(puller.memory.rows[row]) == bytes(puller.memory.geometry.row_bytes) for row in others)
    assert puller.stat("p2p_rows_read_total") == len(SOME)


def two_engines(
    pullers: list[Engine], puller_transport: str = "nixl", *, rows: int = 128, row_bytes: int = ROW, **settings: Any
) -> tuple[Engine, Engine]:
    """The owner has these `settings`."""
    owner = Engine(rows=rows, row_bytes=row_bytes, **{"transport": "nixl", **settings})
    owner.put(SOME)
    puller = Engine([owner.port], rows=rows, row_bytes=row_bytes, transport=puller_transport)
    pullers.extend([puller, owner])
    puller.begin()
    assert puller.look(SOME) == [HIT] * len(SOME)
    return owner, puller


@pytest.mark.parametrize(("owner", "puller"), [("nixl", "sockets"), ("sockets", "nixl"), ("sockets", "auto")])
def test_one_end_without_nixl_is_enough_for_sockets(pullers: list[Engine], owner: str, puller: str) -> None:
    _, engine = two_engines(pullers, puller, transport=owner)
    assert engine.load(SOME) == tuple(SOME)
    assert engine.stat("p2p_rows_read_total") == 0


def test_a_row_that_changed_under_the_read_is_not_let_in(
    pullers: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6: what was read is not what the owner has proved. Made to fail by taking proofs for granted."""
    owner, puller = two_engines(pullers)
    serving = owner.tier._server._serving
    assert serving is not None
    right = serving.proofs.of

    def another(row: PromisedRow, payload: memoryview) -> Proof:
        """Of what the row was, or will be."""
        if row.key != SOME[3]:
            return right(row, payload)
        changed = bytearray(payload)
        changed[0] ^= 1
        return right(row, changed)

    monkeypatch.setattr(serving.proofs, "of", another)
    assert puller.load(SOME) == tuple(key for key in SOME if key != SOME[3])
    assert puller.look([SOME[3]]) == [MISS]


def proved(owner: Engine) -> list[bool]:
    """Whether the owner has the proofs of what is in its memory now."""
    serving = owner.tier._server._serving
    assert serving is not None
    lease = owner.memory.primary.lease(SOME)
    owner.memory.primary.release(lease)
    rows = zip(lease.keys, lease.block_ids, lease.versions, strict=True)
    return [serving.proofs.has(PromisedRow(part, *row)) for part, row in enumerate(rows)]


def store_anew(owner: Engine) -> None:
    """The same chunks into the same rows, with other bytes."""
    primary, req = owner.memory.primary, owner.memory.req
    primary.complete_load(primary.prepare_load(SOME, req), SOME)
    owner.put(SOME, salt="anew")


def test_what_a_peer_that_reads_was_promised_is_proved_before_it_asks(pullers: list[Engine]) -> None:
    """It has looked, and loads nothing yet. Made to fail by proving only what is being read, and for whoever asks."""
    owner, puller = two_engines(pullers)
    time.sleep(0.1)
    assert proved(owner) == [False] * len(SOME), "it has read nothing so far"
    assert puller.load(SOME) == tuple(SOME)
    store_anew(owner)
    assert puller.look(SOME, puller.begin(ReqContext("again"))) == [HIT] * len(SOME)
    wait_until(lambda: all(proved(owner)), "the proofs")


def test_a_row_is_proved_again_when_it_was_written_again(pullers: list[Engine]) -> None:
    """D6: the same chunk in the same row, computed anew, may differ in its last bits. A second puller of the same bytes
    gets the proofs that are there. Made to fail by keeping proofs by row alone, and by keeping none."""
    owner, puller = two_engines(pullers)
    assert puller.load(SOME) == tuple(SOME)
    assert proved(owner) == [True] * len(SOME)
    store_anew(owner)
    assert proved(owner) == [False] * len(SOME)
    second = Engine([owner.port], transport="nixl")
    pullers.insert(0, second)
    second.begin()
    assert second.look(SOME) == [HIT] * len(SOME)
    result = second.result(second.submit(SOME))
    assert result.success
    for row, key in enumerate(SOME):
        assert bytes(second.memory.rows[row]) == content(key, second.memory.geometry.row_bytes, "anew")
    assert second.stat("p2p_rows_read_total") == len(SOME)


def test_a_lease_that_ended_under_the_read_lets_nothing_in(
    pullers: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6: the bytes may even be right. Made to fail by proofs that do not look at the promise."""
    owner, puller = two_engines(pullers)
    serving = owner.tier._server._serving
    assert serving is not None
    confirm = serving.owner.promises.confirm

    def too_late(peer: bytes, question: object) -> object:
        serving.owner.promises.release(peer, question.request, question.round)  # type: ignore[attr-defined]
        return confirm(peer, question)  # type: ignore[arg-type]

    monkeypatch.setattr(serving.owner.promises, "confirm", too_late)
    assert puller.load(SOME) == ()
    assert puller.stat(f"p2p_peer_failures_total|peer=127.0.0.1:{owner.port}|kind=gone") > 0


def test_a_lease_that_ends_under_a_read_does_not_keep_it_waiting(
    pullers: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 57: the second half is on its way when the first one is refused, and over TCP it comes no further unless the
    owner helps. Made to fail by helping those alone whose promises hold."""
    monkeypatch.setattr(read_queue, "READ_BYTES", 2 << 20)  # a row, so that some have not begun
    owner, puller = two_engines(pullers, row_bytes=2 << 20, rows=64)
    promises = owner.tier._server._serving.owner.promises  # type: ignore[union-attr]
    confirm = promises.confirm

    def too_late(peer: bytes, question: Confirm) -> object:
        promises.release(peer, question.request, question.round)
        return confirm(peer, question)

    monkeypatch.setattr(promises, "confirm", too_late)
    assert puller.load(SOME) == ()
    assert puller.stat(f"p2p_peer_failures_total|peer=127.0.0.1:{owner.port}|kind=late") == 0
    assert puller.tier.leftovers()["loads"] == 0


def test_a_damaged_description_is_not_believed(pullers: list[Engine], caplog: pytest.LogCaptureFixture) -> None:
    """NIXL itself often believes it. Rows come over sockets then. Made to fail by leaving the digest out."""
    owner = Engine(transport="nixl")
    owner.put(SOME)
    wait_until(lambda: owner.tier._server._is_serving, "serving")
    serving = owner.tier._server._serving
    assert serving is not None
    memory = serving.owner.memory
    assert memory is not None
    damaged = bytearray(memory.agent)
    damaged[len(damaged) // 2] ^= 4
    serving.owner.memory = type(memory)(bytes(damaged), memory.base, memory.num_rows, memory.row_bytes, memory.digest)
    puller = Engine([owner.port], transport="nixl")
    pullers.extend([puller, owner])
    puller.begin()
    assert puller.load(SOME) == tuple(SOME)
    assert puller.stat("p2p_rows_read_total") == 0
    assert "is damaged" in caplog.text


def test_idle_threads_sleep(pullers: list[Engine]) -> None:
    """After a read, with everything attached. Made to fail by polling whenever there is an agent."""
    _, puller = two_engines(pullers)
    assert puller.load(SOME) == tuple(SOME)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.03


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others use UCX in this process. What the user has set is respected."""
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    assert "UCX_NET_DEVICES" not in ucx_settings("127.0.0.1")
    monkeypatch.delenv("UCX_NET_DEVICES")
    assert ucx_settings("127.0.0.1")["UCX_NET_DEVICES"] == "lo"
    assert "UCX_NET_DEVICES" not in ucx_settings("0.0.0.0")
    before = dict(os.environ)
    Agent("environment", "127.0.0.1").close()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"transport": "sockets"}, "transport is sockets"),
        ({"key_file": "/k"}, "NIXL does not encrypt"),
        ({"key_file": "/k", "transport": "nixl"}, None),
        (
            {"listen": "10.0.0.1", "insecure_trusted_network": True},
            "whoever reaches NIXL's own port reaches this process's memory (transport: nixl accepts that)",
        ),
        ({"listen": "10.0.0.1", "insecure_trusted_network": True, "transport": "nixl"}, None),
    ],
)
def test_how_rows_travel(settings: dict[str, object], expected: str | None) -> None:
    assert why_not_nixl(P2pTierSettings.model_validate(settings)) == expected


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent.importlib.util, "find_spec", lambda name: None)
    assert why_not_nixl(P2pTierSettings()) == "nixl is not installed"


def test_a_process_that_used_it_ends_well() -> None:
    """Without UCX_MODULES=^ib the interpreter crashes at its end where there is no InfiniBand."""
    script = (
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "from vllm_tiered_offload.tiers.p2p.nixl_agent import Agent\n"
        "Agent('ends well', '127.0.0.1').close()\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
