"""Two engines in one process: one has chunks, the other pulls them (cases 55, 57, 58, 60)."""

import logging
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from p2p_kit import PATIENCE, ROW, A, Engine, Serving, content, cpu_seconds, keys_of, wait_until

from vllm_tiered_offload import JobResult, LookupResult, ReqContext
from vllm_tiered_offload.testing.conformance.material import make_fingerprint
from vllm_tiered_offload.tiers.block_frame import PayloadChecksum
from vllm_tiered_offload.tiers.p2p.keys import new_keys, write_key_file
from vllm_tiered_offload.tiers.p2p.leases import PromisedRow
from vllm_tiered_offload.tiers.p2p.messages import MAX_MESSAGE_BYTES, Reason
from vllm_tiered_offload.tiers.p2p.serving import SendRows

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


NewEngine = Callable[..., Engine]


@pytest.fixture
def new_engine(caplog: pytest.LogCaptureFixture) -> Iterator[NewEngine]:
    engines: list[Engine] = []

    def make(*args: Any, **options: Any) -> Engine:
        engines.append(Engine(*args, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors


def unused_port() -> int:
    """Where nobody listens."""
    serving = Serving()
    port = serving.port
    serving.close()
    return port


KEYS = keys_of("pulled", 8)


def test_what_one_has_the_other_pulls(new_engine: NewEngine) -> None:
    """As the hierarchy asks: the first key alone, then all, then loads. Everything is released at the end."""
    owner = new_engine()
    owner.put(KEYS)
    puller = new_engine([owner.port])
    req = puller.begin()
    absent = keys_of("absent", 2)
    assert puller.look(KEYS[:1]) == [HIT]
    assert puller.look([*KEYS, *absent]) == [HIT] * 8 + [MISS] * 2
    assert owner.memory.pinned == 8
    jobs = [puller.submit(KEYS[:5]), puller.submit(KEYS[5:], (10, 11, 12))]
    assert [puller.result(job).successful_keys for job in jobs] == [tuple(KEYS[:5]), tuple(KEYS[5:])]
    assert [bytes(puller.memory.rows[row]) for row in (0, 4, 10)] == [content(KEYS[i], ROW) for i in (0, 4, 5)]
    wait_until(lambda: owner.memory.pinned == 0, "unpinning what was fetched")
    puller.tier.on_request_finished(req)
    wait_until(lambda: set(puller.tier.leftovers().values()) == {0}, "forgetting the request")


def test_the_tail_is_asked_for_before_the_head_is_a_hit(new_engine: NewEngine) -> None:
    """Otherwise the head would be promoted alone. Made to fail by answers key by key."""
    owner = new_engine()
    owner.put(KEYS)
    puller = new_engine([owner.port])
    puller.begin()
    puller.look(KEYS[:1])
    assert puller.tier.lookup(KEYS, A) == [RETRY] * 8


def test_a_peer_without_the_prefix_costs_one_round_trip(new_engine: NewEngine) -> None:
    """For a request, however often it asks; and none for others that ask for the same soon after.

    Made to fail by believing it for each request alone.
    """
    owner = new_engine()
    puller = new_engine([owner.port])
    rounds: list[object] = []
    client = puller.tier._client
    assert client is not None
    submit = client.submit
    client.submit = lambda command: (rounds.append(command), submit(command))[1]  # type: ignore[method-assign]
    absent = keys_of("absent", 20)
    puller.begin()
    for _ in range(5):
        assert puller.look(absent[:1]) == [MISS]
    assert puller.look(absent[:1], puller.begin(ReqContext("b"))) == [MISS]
    assert len(rounds) == 1


def test_all_peers_are_asked_and_the_longest_prefix_counts(new_engine: NewEngine) -> None:
    """What the others promised is released at once."""
    short, long, dead = new_engine(), new_engine(), unused_port()
    short.put(KEYS[:2])
    long.put(KEYS[:6])
    puller = new_engine([short.port, dead, long.port])
    puller.begin()
    assert puller.look(KEYS) == [HIT] * 6 + [MISS] * 2
    wait_until(lambda: short.memory.pinned == 0, "releasing what the loser promised")
    assert long.memory.pinned == 6
    assert puller.load(KEYS[:6]) == tuple(KEYS[:6])


def test_a_request_that_ends_releases_what_was_promised_for_it(new_engine: NewEngine) -> None:
    owner = new_engine()
    owner.put(KEYS)
    puller = new_engine([owner.port])
    req = puller.begin()
    puller.look(KEYS)
    assert owner.memory.pinned == 8
    puller.tier.on_request_finished(req)
    wait_until(lambda: owner.memory.pinned == 0, "releasing an aborted request's promises")


def test_what_was_not_offered_is_not_served(new_engine: NewEngine) -> None:
    """Case 46's other side: chunks that may not leave the process are in memory, and no peer is told of them."""
    owner = new_engine()
    owner.memory.put(KEYS)
    puller = new_engine([owner.port])
    puller.begin()
    assert puller.look(KEYS) == [MISS] * 8


def test_case_57_a_pull_after_the_lease_is_a_failed_job(new_engine: NewEngine) -> None:
    """Case 57, from the puller's side: nothing is pinned beyond the deadline, and nothing waits for it."""
    owner = new_engine(lease_seconds=0.3)
    owner.put(KEYS)
    puller = new_engine([owner.port])
    puller.begin()
    assert puller.look(KEYS) == [HIT] * 8
    wait_until(lambda: owner.memory.pinned == 0, "the deadline")
    client = puller.tier._client
    assert client is not None
    started = time.monotonic()
    job = puller.submit(KEYS)  # it asks anew: what it knew has expired
    assert puller.result(job).success
    assert time.monotonic() - started < 2.0


def test_case_58_two_rounds_of_one_request(new_engine: NewEngine) -> None:
    """Case 58: overlapping loads of one request, the same keys in both: each ends once, with right bytes."""
    owner = new_engine()
    owner.put(KEYS)
    puller = new_engine([owner.port])
    req = puller.begin()
    assert puller.look(KEYS) == [HIT] * 8
    first = puller.submit(KEYS, range(8))
    second = puller.submit(KEYS[2:], range(10, 16))
    puller.tier.on_request_finished(req)
    again = puller.begin(ReqContext("a"))
    third = puller.submit(KEYS[:3], range(20, 23), again)
    assert puller.result(third).successful_keys == tuple(KEYS[:3])
    assert puller.result(second).successful_keys == tuple(KEYS[2:])
    assert puller.result(first).successful_keys == tuple(KEYS)
    for start, keys in ((0, KEYS), (10, KEYS[2:]), (20, KEYS[:3])):
        for row, key in enumerate(keys, start):
            assert bytes(puller.memory.rows[row]) == content(key, ROW)
    puller.tier.on_request_finished(again)
    wait_until(lambda: owner.memory.pinned == 0, "releasing everything")


def test_case_60_a_mismatched_peer_is_not_asked(new_engine: NewEngine) -> None:
    """Case 60: refused at the greeting, and then left alone. The request goes on without it."""
    owner = new_engine(fingerprint=make_fingerprint(model="other"))
    owner.put(KEYS)
    puller = new_engine([owner.port])
    puller.begin()
    started = time.monotonic()
    assert puller.look(KEYS) == [MISS] * 8
    assert puller.load(KEYS[4:], puller.begin(ReqContext("b"))) == ()
    assert time.monotonic() - started < 2.0
    peer = f"127.0.0.1:{owner.port}"
    assert puller.stat(f"p2p_peer_failures_total|peer={peer}|kind=fingerprint") == 1
    assert owner.stat(f"p2p_refused_total|reason={Reason.FINGERPRINT.value}") == 1


def test_case_60_a_peer_that_is_not_there_costs_little(new_engine: NewEngine) -> None:
    """Case 60: dead before the handshake. Made to fail by waiting for the lookup's deadline."""
    puller = new_engine([unused_port()], lookup_timeout=5.0)
    puller.begin()
    started = time.monotonic()
    assert puller.look(KEYS) == [MISS] * 8
    assert puller.look(keys_of("more", 3), puller.begin(ReqContext("b"))) == [MISS] * 3
    assert time.monotonic() - started < 2.0


def test_case_60_one_row_that_does_not_come_fails_alone(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 60: one of four transfers is not posted. The job ends at its deadline, with the other three."""
    owner = new_engine()
    owner.put(KEYS[:4])
    puller = new_engine([owner.port], pull_timeout=0.5)
    server = owner.tier._server
    handle = server._serving.owner._answer

    def forgetful(peer: bytes, question: Any) -> Any:
        reply = handle(peer, question)
        if isinstance(reply, SendRows):
            reply.rows[:] = [row for row in reply.rows if row.key != KEYS[2]]
        return reply

    monkeypatch.setattr(server._serving.owner, "_answer", forgetful)
    puller.begin()
    assert puller.load(KEYS[:4]) == (KEYS[0], KEYS[1], KEYS[3])


def test_a_damaged_row_is_not_let_in(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails alone, and nobody loops on it."""
    owner = new_engine()
    owner.put(KEYS)
    puller = new_engine([owner.port])
    server = owner.tier._server
    header = server._header

    def damaging(serving: Any, row: PromisedRow, read: PayloadChecksum) -> bytes:
        if row.key == KEYS[3]:
            owner.memory.rows[row.row][0] ^= 1
        return header(serving, row, read)

    monkeypatch.setattr(server, "_header", damaging)
    puller.begin()
    assert puller.load(KEYS) == tuple(key for key in KEYS if key != KEYS[3])
    assert puller.look([KEYS[3]]) == [MISS]


def test_a_reset_ends_the_sharing(new_engine: NewEngine) -> None:
    """L6: what follows a reset of either engine reaches nobody, because the weights may be new."""
    owner = new_engine()
    owner.put(KEYS)
    puller = new_engine([owner.port])
    puller.begin()
    assert puller.look(KEYS) == [HIT] * 8
    owner.memory.primary.reset_cache()
    owner.tier.reset()
    wait_until(lambda: owner.memory.pinned == 0, "unpinning at the reset")
    owner.memory.primary.on_request_finished(owner.memory.req)
    owner.memory.primary.on_new_request(owner.memory.req)
    owner.put(KEYS, salt="new weights")
    assert puller.load(KEYS) == ()
    assert puller.look(KEYS, puller.begin(ReqContext("b"))) == [MISS] * 8


def test_a_puller_that_was_reset_pulls_nothing(new_engine: NewEngine) -> None:
    owner = new_engine()
    owner.put(KEYS)
    puller = new_engine([owner.port])
    puller.begin()
    job = puller.submit(KEYS)
    puller.tier.reset()
    assert puller.result(job) == JobResult(job, False, ())
    assert puller.look(KEYS, puller.begin(ReqContext("b"))) == [MISS] * 8
    wait_until(lambda: owner.memory.pinned == 0, "releasing everything")


def test_a_reset_in_the_middle_of_a_transfer(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that had come are of the old weights: the job is a failure as a whole. Made to fail by keeping them."""
    owner = new_engine()
    owner.put(KEYS)
    puller = new_engine([owner.port])
    server = owner.tier._server
    header = server._header

    def slowly(serving: Any, row: PromisedRow, read: PayloadChecksum) -> bytes:
        time.sleep(0.05)
        return header(serving, row, read)

    monkeypatch.setattr(server, "_header", slowly)
    puller.begin()
    assert puller.look(KEYS) == [HIT] * 8
    job = puller.submit(KEYS)
    wait_until(lambda: puller.stat("tier_bytes_total|tier=p2p|direction=load") > 0, "the first row")
    puller.tier.reset()
    assert puller.result(job) == JobResult(job, False, ())


def test_loads_that_share_a_chunk_each_get_it(new_engine: NewEngine) -> None:
    """The promise for the shared chunk is used by the first one, so the second one asks again, having asked before.

    Made to fail by one question for each load.
    """
    owner = new_engine()
    owner.put(KEYS)
    puller = new_engine([owner.port])
    puller.begin()
    first, second = puller.submit(KEYS[:5], range(5)), puller.submit(KEYS[3:], range(10, 15))
    assert puller.result(first).successful_keys == tuple(KEYS[:5])
    assert puller.result(second).successful_keys == tuple(KEYS[3:])


def test_a_crowd_asks_once(new_engine: NewEngine) -> None:
    """CASES 29: its promises would add up, and nobody would get the whole prefix. Made to fail by each asking for
    itself."""
    owner = new_engine()
    owner.put(KEYS)
    puller = new_engine([owner.port])
    crowd = [puller.begin(ReqContext(f"r{number}")) for number in range(10)]
    wait_until(lambda: not any(RETRY in puller.tier.lookup(KEYS, req) for req in crowd[:1]), "the first one's answer")
    for _ in range(10):
        assert {tuple(puller.tier.lookup(KEYS, req)) for req in crowd[1:]} == {(RETRY,) * 8}
        puller.end_pass()
        time.sleep(0.01)
    assert puller.tier.lookup(KEYS, crowd[0]) == [HIT] * 8
    assert owner.stat("p2p_promised_rows") == 8
    puller.tier.on_request_finished(crowd[0])
    assert puller.look(KEYS, crowd[1]) == [HIT] * 8, "who waited asks when the one that asked has ended"
    assert puller.load(KEYS, crowd[1]) == tuple(KEYS)
    for req in crowd[1:]:
        puller.tier.on_request_finished(req)
    wait_until(lambda: not any(puller.tier.leftovers().values()), "the end of everything")


def test_a_crowd_waits_for_a_bounded_time(new_engine: NewEngine) -> None:
    """The one that has asked does not come back for its answer. Made to fail by a claim without an end."""
    owner = new_engine()
    owner.put(KEYS)
    puller = new_engine([owner.port], lookup_timeout=0.1)
    puller.look(KEYS, puller.begin(ReqContext("absent-minded")))
    started = time.monotonic()
    assert puller.look(KEYS, puller.begin(ReqContext("next"))) == [HIT] * 8
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("row_bytes", [1 << 20, MAX_MESSAGE_BYTES // 4096 * 4096 + 4096, 4 << 20])
def test_rows_of_any_size(new_engine: NewEngine, tmp_path: Path, row_bytes: int, encrypted: bool) -> None:
    """Rows are no messages, and may be larger. Encrypted ones of more than a message's size ended the connection when
    the limit left no room for what the encryption adds."""
    owner, puller, peer = ({}, {}, {"host": "127.0.0.1"}) if not encrypted else keyed_pair(tmp_path)
    engine = new_engine(rows=16, row_bytes=row_bytes, lease_share=1.0, **owner)
    engine.put(KEYS)
    pulling = new_engine(peers_block=[{**peer, "port": engine.port}], rows=8, row_bytes=row_bytes, **puller)
    assert pulling.look(KEYS, pulling.begin()) == [HIT] * 8
    assert pulling.load(KEYS) == tuple(KEYS)


def keyed_pair(directory: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Settings of an owner and of a puller with keys, and how the puller knows the owner."""
    keys, files = [new_keys(), new_keys()], [str(directory / name) for name in ("owner", "puller")]
    for file, pair in zip(files, keys, strict=True):
        write_key_file(file, pair)
    theirs, mine = (pair.public.decode("ascii") for pair in keys)
    owner = {"key_file": files[0], "allowed_keys": [mine]}
    return owner, {"key_file": files[1]}, {"host": "127.0.0.1", "public_key": theirs}


def test_a_puller_that_cannot_start_holds_up_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its key file is not there: said once, and from then on there are misses and failed loads, not waits.

    Made to fail by asking a thread that has ended.
    """
    peer = {"host": "127.0.0.1", "port": 1, "public_key": "k" * 40}
    engine = Engine(key_file=str(tmp_path / "none"), peers_block=[peer])
    wait_until(lambda: engine.tier._client is not None and engine.tier._client.has_ended, "the puller's end")
    assert f"key_file {tmp_path / 'none'}" in caplog.text
    engine.begin()
    assert engine.tier.lookup(KEYS, A) == [MISS] * 8
    assert engine.load(KEYS) == ()
    assert engine.tier.drain(0.0)
    engine.close()


def test_a_puller_that_dies_ends_its_loads(new_engine: NewEngine) -> None:
    """Made to fail by waiting for a thread that has ended: such a load keeps its rows for ever."""
    hung = Serving()
    hung.server._turn = lambda ready: time.sleep(0.01)  # type: ignore[method-assign]
    puller = new_engine([hung.port], lookup_timeout=60.0, silence_timeout=60.0)
    puller.begin()
    job = puller.submit(KEYS)
    puller.end_pass()
    assert job not in puller.results
    client = puller.tier._client
    assert client is not None
    assert client.stop(PATIENCE)
    assert puller.result(job) == JobResult(job, False, ())
    assert puller.tier.lookup(KEYS, A) == [MISS] * 8
    hung.close()


def test_keep_on_reset_goes_on(new_engine: NewEngine) -> None:
    owner = new_engine(keep_on_reset=True)
    owner.put(KEYS)
    puller = new_engine([owner.port], keep_on_reset=True)
    puller.begin()
    assert puller.look(KEYS) == [HIT] * 8
    owner.tier.reset()
    puller.tier.reset()
    assert puller.load(KEYS) == tuple(KEYS)


def test_a_request_may_name_its_peer(new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    """One of those that are configured; any other name is not believed."""
    one, other = new_engine(), new_engine()
    one.put(KEYS[:4])
    other.put(KEYS[4:])
    stranger = new_engine()
    stranger.put(keys_of("stranger", 2))
    puller = new_engine([one.port, other.port])

    def naming(name: str, port: int) -> ReqContext:
        return puller.begin(ReqContext(name, {"remote_kv_source": {"host": "127.0.0.1", "port": port}}))

    assert puller.look(KEYS, naming("r1", other.port)) == [MISS] * 4 + [HIT] * 4
    assert not caplog.records
    assert puller.look(keys_of("stranger", 2), naming("r2", stranger.port)) == [MISS] * 2
    assert "none of the `peers`" in caplog.text


def test_case_55_other_ports_of_a_dead_engine_are_suspect_too(new_engine: NewEngine) -> None:
    """Case 55: two addresses of one engine, of which one dies: neither is asked for a while, and nothing waits."""
    owner = new_engine()
    owner.put(KEYS)
    twin = new_engine()
    twin.put(KEYS)
    own = owner.tier._server._serving.owner.own
    twin.tier._server._serving.owner.own = own  # it calls itself as the first one does
    puller = new_engine([owner.port, twin.port], lookup_timeout=5.0)
    puller.begin()
    assert puller.look(KEYS) == [HIT] * 8
    wait_until(lambda: puller.stat("p2p_peers_up") == 2, "both peers")
    owner.tier.shutdown()
    wait_until(lambda: puller.stat("p2p_peers_up") == 0, "both are suspect")
    started = time.monotonic()
    assert puller.load(KEYS) == ()
    assert time.monotonic() - started < 1.0


def test_a_peer_that_comes_back_is_asked_again(new_engine: NewEngine) -> None:
    """After its backoff. Made to fail by a failed peer that stays out."""
    first = new_engine()
    first.put(KEYS)
    port = first.port
    puller = new_engine([port])
    puller.begin()
    assert puller.load(KEYS) == tuple(KEYS)
    first.tier.shutdown()
    wait_until(lambda: puller.stat("p2p_peers_up") == 0, "noticing the end")
    second = new_engine(port=port)
    second.put(KEYS)
    numbers = count()

    def found() -> bool:
        keys = keys_of("pulled", 8)
        puller.tier._absent.clear()
        return puller.look(keys, puller.begin(ReqContext(f"later {next(numbers)}"))) == [HIT] * 8

    wait_until(found, "finding the peer that is back")


def test_idle_threads_sleep(new_engine: NewEngine) -> None:
    """With a connection and promises open. Made to fail by a timer that is always due."""
    owner = new_engine()
    owner.put(KEYS)
    puller = new_engine([owner.port])
    puller.begin()
    puller.look(KEYS)
    time.sleep(0.1)
    before = cpu_seconds("p2p-tier-client")
    time.sleep(1.0)
    assert cpu_seconds("p2p-tier-client") - before < 0.01
