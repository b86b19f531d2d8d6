"""Two hosts and a cable: what a network does that loopback never does (case 60). Skipped where there can be none."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import network
import pytest
from network import Hosts
from p2p_kit import Engine, content, keys_of, wait_until

from vllm_tiered_offload import JobResult, LookupResult, ReqContext

HIT, MISS = LookupResult.HIT, LookupResult.MISS
ROW_BYTES, CHUNKS = 1 << 18, 48
KEYS = keys_of("process", CHUNKS)
BYTES = "tier_bytes_total|tier=p2p|direction=load"
UNTOUCHED = b"\xaa" * ROW_BYTES


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := network.why_not():
        pytest.skip(reason)
    with Hosts() as made:
        yield made


class Pair:
    """An owner's process on one host, and a puller on the other that has looked everything up."""

    def __init__(self, hosts: Hosts, **settings: float) -> None:
        self.hosts = hosts
        script = Path(__file__).with_name("p2p_owner_process.py")
        arguments = [str(2 * CHUNKS), str(ROW_BYTES), str(CHUNKS), "0", "sockets"]
        command = ["ip", "netns", "exec", hosts.owner, sys.executable, str(script), *arguments]
        environment = {**os.environ, "LISTEN": network.OWNER}
        self.owner = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert self.owner.stdout is not None
        peer = {"host": network.OWNER, "port": int(self.owner.stdout.readline())}
        block = {"peers_block": [peer], "rows": CHUNKS, "row_bytes": ROW_BYTES, "transport": "sockets"}
        block["insecure_trusted_network"] = True
        self.puller = hosts.on_puller(lambda: Engine(**{**block, **settings}))  # type: ignore[arg-type]

    def begin(self) -> int:
        """A load of everything that is in the middle."""
        self.puller.begin()
        assert self.puller.look(KEYS) == [HIT] * CHUNKS
        job = self.puller.submit(KEYS)
        wait_until(lambda: self.puller.stat(BYTES) > ROW_BYTES, "the first rows")
        return job

    def end(self, job: int) -> tuple[JobResult, float]:
        """Its result, whose bytes are right, and how long it took. Nothing gets into its rows afterwards (D4)."""
        started = time.monotonic()
        result = self.puller.result(job)
        seconds = time.monotonic() - started
        for row, key in enumerate(KEYS):
            if key in result.successful_keys:
                assert bytes(self.puller.memory.rows[row]) == content(key, ROW_BYTES), f"row {row}"
            self.puller.memory.rows[row][:] = UNTOUCHED
        time.sleep(0.2)
        assert all(bytes(row) == UNTOUCHED for row in self.puller.memory.rows)
        return result, seconds

    def close(self) -> None:
        for number in (signal.SIGKILL, signal.SIGCONT):
            self.owner.send_signal(number)
        self.owner.wait()
        self.puller.close()


def test_a_thin_cable_is_waited_for(hosts: Hosts) -> None:
    """Rows that come one by one are no silence, however long all of them take. Made to fail by a silence that counts
    from the beginning of the load."""
    hosts.limit("80mbit")
    pair = Pair(hosts, silence_timeout=0.3, pull_timeout=30.0)
    result, seconds = pair.end(pair.begin())
    assert result.success
    assert seconds > 0.5, "the limit limits nothing"
    pair.close()


def test_a_cable_that_is_too_thin(hosts: Hosts) -> None:
    """At its deadline the load ends with what has come."""
    hosts.limit("40mbit")
    pair = Pair(hosts, pull_timeout=1.0)
    result, seconds = pair.end(pair.begin())
    assert 0 < len(result.successful_keys) < CHUNKS
    assert seconds < 2.0
    pair.close()


def test_a_cable_so_thin_that_a_row_takes_longer_than_a_silence(hosts: Hosts) -> None:
    """It is no silence either: whoever was asked whether it lives shows by its next byte that it does. Made to fail by
    waking up for whole rows alone."""
    hosts.limit("4mbit")
    pair = Pair(hosts, silence_timeout=0.3, pull_timeout=4.0)
    result, seconds = pair.end(pair.begin())
    assert 0 < len(result.successful_keys) < CHUNKS
    assert seconds > 2.0, "it was given up before its time"
    assert pair.puller.stat("p2p_peer_failures_total") == 1
    assert [key for key in pair.puller.tier.get_stats() if "kind=late" in key and "peer_failures" in key]
    pair.close()


def test_the_cable_is_unplugged_and_plugged_in_again(hosts: Hosts) -> None:
    """Nobody is told: no reset, no end of the connection. The load ends after the silence, the next request does not
    wait, and when the cable is back so is the peer."""
    hosts.limit("80mbit")
    pair = Pair(hosts, silence_timeout=0.5, pull_timeout=30.0, lookup_cache=0.0)
    job = pair.begin()
    hosts.unplug()
    result, seconds = pair.end(job)
    assert 0 < len(result.successful_keys) < CHUNKS
    assert seconds < 2.0
    assert pair.puller.stat("p2p_peers_up") == 0
    started = time.monotonic()
    assert pair.puller.look(KEYS, pair.puller.begin(ReqContext("unplugged")))[0] is MISS
    assert time.monotonic() - started < 1.0
    hosts.plug()
    numbers = iter(range(100_000))

    def found() -> bool:
        return pair.puller.look(KEYS, pair.puller.begin(ReqContext(f"again {next(numbers)}"))) == [HIT] * CHUNKS

    wait_until(found, "finding the peer that is back")
    pair.close()


def test_the_other_host_hangs(hosts: Hosts) -> None:
    """Its kernel goes on acknowledging, so only the peer's own voice tells. Made to fail by leaving the check for
    silence out."""
    hosts.limit("80mbit")
    pair = Pair(hosts, silence_timeout=0.5, pull_timeout=30.0)
    job = pair.begin()
    pair.owner.send_signal(signal.SIGSTOP)
    result, seconds = pair.end(job)
    assert not result.success
    assert seconds < 3.0
    pair.close()
