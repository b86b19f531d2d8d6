"""Peers that are names: looked up on a thread of their own, again and again; one name may stand for several engines."""

import functools
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from p2p_kit import A, Engine, keys_of, wait_until

from vllm_tiered_offload import LookupResult, ReqContext
from vllm_tiered_offload.tiers.p2p import directory as directory_module
from vllm_tiered_offload.tiers.p2p import tier as tier_module
from vllm_tiered_offload.tiers.p2p.directory import MAX_ADDRESSES, PeerDirectory, Resolved, Resolver
from vllm_tiered_offload.tiers.p2p.instructions import Address
from vllm_tiered_offload.tiers.p2p.keys import new_keys, write_key_file
from vllm_tiered_offload.tiers.p2p.settings import P2pTierSettings, PeerAddress
from vllm_tiered_offload.tiers.p2p.tier import P2pTier

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
NAME, LITERAL = Address("engines.test", 7000), Address("10.0.0.9", 7001)
ONE, TWO = Address("10.0.0.1", 7000), Address("10.0.0.2", 7000)


# ---- the directory -------------------------------------------------------------------------------------------------


def test_a_name_stands_for_what_dns_says() -> None:
    directory = PeerDirectory([NAME, LITERAL])
    assert directory.names == (NAME,)
    assert (directory.is_complete, directory.all()) == (False, (LITERAL,))
    directory.learn(Resolved(NAME, (ONE, TWO)))
    assert directory.is_complete
    assert set(directory.all()) == {ONE, TWO, LITERAL}
    assert directory.entry_of == {LITERAL: LITERAL, ONE: NAME, TWO: NAME}
    directory.learn(Resolved(NAME, (TWO,)))
    assert set(directory.all()) == {TWO, LITERAL}
    assert directory.entry_of[ONE] == NAME, "what was counted for it stays where it was"


def test_a_client_names_an_entry_or_an_address_behind_it() -> None:
    """And nobody else: a stranger's address is never asked. Made to fail by taking any address."""
    directory = PeerDirectory([NAME, LITERAL])
    directory.learn(Resolved(NAME, (ONE, TWO)))
    assert directory.named("engines.test", 7000) == (ONE, TWO)
    assert directory.named("10.0.0.2", 7000) == (TWO,)
    assert directory.named("10.0.0.9", 7001) == (LITERAL,)
    for stranger in [("10.0.0.2", 7001), ("10.0.0.3", 7000), ("10.0.0.2", "7000"), (None, None), ([], {})]:
        assert directory.named(*stranger) == ()


def test_names_that_never_come_to_rest_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "MAX_EVER", 3)
    directory = PeerDirectory([NAME])
    for number in range(10):
        directory.learn(Resolved(NAME, (Address(f"10.0.1.{number}", 7000),)))
    assert len(directory.entry_of) == 3
    assert directory.all() == ()


# ---- the resolver --------------------------------------------------------------------------------------------------


class Dns:
    """Answers by name; an OSError among them is raised."""

    def __init__(self, *hosts: str) -> None:
        self.answer: list[str] | OSError = list(hosts)
        self.asked = 0
        self.threads: set[str] = set()

    def __call__(self, host: str, port: int) -> list[str]:
        self.threads.add(threading.current_thread().name)
        self.asked += 1
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer

    def again(self) -> None:
        """Wait until what it says now was heard."""
        asked = self.asked
        wait_until(lambda: self.asked > asked + 1, "another look")


@pytest.fixture
def resolve() -> Iterator[Callable[[Dns], list[Resolved]]]:
    started: list[Resolver] = []

    def start(dns: Dns) -> list[Resolved]:
        told: list[Resolved] = []
        started.append(Resolver([NAME], 0.01, told.append, dns))
        started[-1].start()
        dns.again()
        return told

    yield start
    for resolver in started:
        resolver.stop()


def test_only_changes_are_told(resolve: Callable[[Dns], list[Resolved]], caplog: pytest.LogCaptureFixture) -> None:
    """In whatever order DNS says them. What is known stays while DNS fails, which is said once.

    Made to fail by telling an empty answer when DNS fails: a hiccup would cost every peer.
    """
    dns = Dns("10.0.0.2", "10.0.0.1")
    told = resolve(dns)
    dns.answer = ["10.0.0.1", "10.0.0.2"]
    dns.again()
    dns.answer = socket.gaierror(-3, "Temporary failure in name resolution")
    dns.again()
    assert told == [Resolved(NAME, (ONE, TWO))]
    assert caplog.text.count("Temporary failure") == 1
    dns.answer = ["10.0.0.1"]
    dns.again()
    assert told[1:] == [Resolved(NAME, (ONE,))]


def test_a_name_that_is_not_known_yet(resolve: Callable[[Dns], list[Resolved]]) -> None:
    dns = Dns()
    dns.answer = socket.gaierror(-2, "Name or service not known")
    assert resolve(dns) == [Resolved(NAME, ())]


def test_a_name_with_too_many_addresses(resolve: Callable[[Dns], list[Resolved]]) -> None:
    [told] = resolve(Dns(*(f"10.0.{high}.{low}" for high in range(2) for low in range(100))))
    assert len(told.addresses) == MAX_ADDRESSES


def test_the_system_s_resolver() -> None:
    assert "127.0.0.1" in directory_module.ask_dns("localhost", 1)


# ---- the tier ------------------------------------------------------------------------------------------------------

KEYS = keys_of("named", 4)


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Dns:
    made = Dns()
    monkeypatch.setattr(tier_module, "Resolver", functools.partial(Resolver, lookup=made))
    return made


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.close()


def serving_on(engines: list[Engine], host: str, port: int = 0) -> Engine:
    engines.append(Engine(listen=host, port=port))
    return engines[-1]


def pulling_from(engines: list[Engine], name: str, its_port: int, **settings: object) -> Engine:
    peers = [{"host": name, "port": its_port}]
    block = {"peers_block": peers, "insecure_trusted_network": True, "resolve_period": 0.02, "lookup_cache": 0.0}
    engines.append(Engine(**{**block, **settings}))  # type: ignore[arg-type]
    return engines[-1]


def test_engines_behind_one_name(engines: list[Engine], dns: Dns) -> None:
    """Each is asked; one that joins is found, one that left is not asked; DNS never runs on the scheduler's thread.

    Made to fail by looking up once, and by looking up in `lookup`.
    """
    one = serving_on(engines, "127.0.0.1")
    two = serving_on(engines, "127.0.0.2", one.port)
    one.put(KEYS[:2])
    two.put(KEYS[2:])
    dns.answer = ["127.0.0.1"]
    puller = pulling_from(engines, "engines.test", one.port)
    assert puller.look(KEYS, puller.begin()) == [HIT, HIT, MISS, MISS]
    dns.answer = ["127.0.0.2", "127.0.0.1"]
    dns.again()
    assert puller.look(KEYS[2:], puller.begin(ReqContext("b"))) == [HIT, HIT]
    assert puller.stat(f"p2p_peers_up|peer=engines.test:{one.port}") == 2
    dns.answer = ["127.0.0.2"]
    dns.again()
    assert puller.look(KEYS, puller.begin(ReqContext("c"))) == [MISS, MISS, HIT, HIT]
    req = puller.begin(ReqContext("d"))
    assert puller.load(KEYS[2:], req) == tuple(KEYS[2:])
    assert puller.stat(f"p2p_pulled_bytes_total|peer=engines.test:{one.port}") > 0
    assert dns.threads == {"p2p-tier-resolver"}
    for name in ("a", "b", "c"):
        puller.tier.on_request_finished(ReqContext(name))


def test_a_client_names_one_engine_behind_the_name(engines: list[Engine], dns: Dns) -> None:
    one = serving_on(engines, "127.0.0.1")
    two = serving_on(engines, "127.0.0.2", one.port)
    one.put(KEYS[:2])
    two.put(KEYS[2:])
    dns.answer = ["127.0.0.1", "127.0.0.2"]
    puller = pulling_from(engines, "engines.test", one.port)
    for host, wanted in [("127.0.0.1", [HIT, HIT, MISS, MISS]), ("127.0.0.2", [MISS, MISS, HIT, HIT])]:
        req = ReqContext(host, {"remote_kv_source": {"remote_host": host, "remote_port": one.port}})
        assert puller.look(KEYS, puller.begin(req)) == wanted
        puller.tier.on_request_finished(req)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["127.0.0.1", 1]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["remote_host", "remote_port", "host", "port", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["remote_kv_source", "remote_prefiller", "remote_decoder"]), anything))
def test_whatever_a_client_says_only_peers_are_asked(params: dict[str, object]) -> None:
    """Clients may write anything there; nothing raises on it, and nobody else is ever connected to."""
    tier = P2pTier(P2pTierSettings(peers=(PeerAddress(host="127.0.0.1", port=1),)), engine_id="x")
    tier.on_new_request(ReqContext("a", params))
    assert tier._peers_of(tier._requests["a"]) == (Address("127.0.0.1", 1),)
    tier.shutdown()


def test_the_name_stands_for_this_engine_too(engines: list[Engine], dns: Dns) -> None:
    """As with a headless service: it is not asked what it has itself, and that is no failure.

    Made to fail by leaving the comparison of epochs out: it then promises its own rows to itself.
    """
    one = serving_on(engines, "127.0.0.1")
    one.put(KEYS)
    dns.answer = ["127.0.0.1", "127.0.0.2"]
    puller = pulling_from(engines, "engines.test", one.port, listen="127.0.0.2", port=one.port)
    puller.put(keys_of("own", 2))
    assert puller.look(KEYS, puller.begin()) == [HIT] * 4
    assert puller.look(keys_of("own", 2), puller.begin(ReqContext("b"))) == [MISS] * 2
    assert puller.stat("p2p_peer_failures_total") == 0
    assert puller.stat("p2p_peers_up") == 1
    for name in ("a", "b"):
        puller.tier.on_request_finished(ReqContext(name))


def test_engines_behind_one_name_have_its_key(engines: list[Engine], dns: Dns, tmp_path: Path) -> None:
    """Made to fail by looking keys up under the entry alone."""
    files = {name: str(tmp_path / name) for name in ("owners", "puller")}
    keys = {name: new_keys() for name in files}
    for name, file in files.items():
        write_key_file(file, keys[name])
    public = {name: pair.public.decode("ascii") for name, pair in keys.items()}
    block = {"key_file": files["owners"], "allowed_keys": [public["puller"]]}
    engines.append(Engine(listen="127.0.0.1", **block))
    engines.append(Engine(listen="127.0.0.2", port=engines[0].port, **block))
    engines[1].put(KEYS)
    dns.answer = ["127.0.0.1", "127.0.0.2"]
    peer = {"host": "engines.test", "port": engines[0].port, "public_key": public["owners"]}
    engines.append(Engine(peers_block=[peer], key_file=files["puller"]))
    puller = engines[-1]
    assert puller.look(KEYS, puller.begin()) == [HIT] * 4
    assert puller.load(KEYS) == tuple(KEYS)


def test_a_resolver_that_hangs_costs_a_bounded_wait(engines: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Made to fail by waiting for the first answer without a bound."""
    go_on = threading.Event()
    hanging = functools.partial(Resolver, lookup=lambda host, port: go_on.wait() and [])
    monkeypatch.setattr(tier_module, "Resolver", hanging)
    puller = pulling_from(engines, "engines.test", 1, lookup_timeout=0.1)
    puller.begin()
    assert puller.tier.lookup(KEYS, A) == [RETRY] * 4
    assert puller.look(KEYS) == [MISS] * 4
    go_on.set()
