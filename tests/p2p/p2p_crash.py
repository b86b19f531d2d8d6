"""SIGKILL of an owner at N random moments while it is pulled from: `p2p_crash.py [N]`, run by ci/crash_p2p.sh.

Kills alternate between rows over sockets and rows that are read with NIXL (over TCP, so that the owner has a part in
it; left out, with a word, where nixl is missing). A kill counts only if some bytes had been pulled by then and not all
of them. After each one
    wrong    a row that counts as pulled has a wrong byte in it, or a row is written after its job's end
    leaked   a job, promise, row, question or request is left in the puller, or a row of its memory is still pinned
and what comes next must be as if nothing had been: the dead owner is a miss, another one serves.
"""

import importlib.util
import os
import random
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from p2p_kit import Engine, content, wait_until
from test_p2p_processes import BYTES, CHUNKS, KEYS, ROW_BYTES, OwnerProcess

from vllm_tiered_offload import LookupResult, ReqContext

TOTAL = CHUNKS * ROW_BYTES


@dataclass
class Tally:
    kills: int = 0
    wrong: int = 0
    leaked: int = 0


def transports() -> list[str]:
    if importlib.util.find_spec("nixl") is None:
        print("nixl is not installed: over sockets only", flush=True)
        return ["sockets"]
    return ["nixl", "sockets"]


def count_wrong(puller: Engine, good: set[bytes], base: int = 0) -> int:
    rows = puller.memory.rows
    return sum(key in good and bytes(rows[base + i]) != content(key, ROW_BYTES) for i, key in enumerate(KEYS))


def count_leaked(puller: Engine) -> int:
    client = puller.tier._client
    assert client is not None
    pulling = client._pulling

    def left() -> int:
        return sum(puller.tier.leftovers().values()) + sum(pulling.leftovers().values()) + puller.memory.pinned

    with suppress(AssertionError):
        wait_until(lambda: not left(), "the end of everything")
    return left()


def pull(puller: Engine, name: str, base: int) -> tuple[int, ReqContext]:
    """The job of a request for everything, into the rows from `base` on."""
    request = puller.begin(ReqContext(name))
    wait_until(lambda: puller.look(KEYS, request) == [LookupResult.HIT] * CHUNKS, "the owner's promise")
    return puller.submit(KEYS, range(base, base + CHUNKS), request), request


def kill_once(transport: str, healthy: OwnerProcess, dice: random.Random, tally: Tally) -> None:
    owner = OwnerProcess(dice.choice([0.001, 0.004]), transport)
    puller = Engine([owner.port], rows=2 * CHUNKS, row_bytes=ROW_BYTES, transport=transport, lookup_cache=0.0)
    after = Engine([healthy.port], rows=CHUNKS, row_bytes=ROW_BYTES)
    try:
        if transport == "nixl":
            attach(puller)
        before = puller.stat(BYTES)
        job, request = pull(puller, "killed", 0)
        threshold = before + dice.random() * 0.9 * TOTAL
        wait_until(lambda: puller.stat(BYTES) > threshold, "the moment")
        owner.end()
        result = puller.result(job)
        if 0 < len(result.successful_keys) < CHUNKS:
            tally.kills += 1
        tally.wrong += count_wrong(puller, set(result.successful_keys))
        held = [bytes(row) for row in puller.memory.rows]
        puller.tier.on_request_finished(request)
        late = puller.begin(ReqContext("next"))
        assert puller.look(KEYS[:1], late) == [LookupResult.MISS], "the dead owner is believed"
        puller.tier.on_request_finished(late)
        tally.leaked += count_leaked(puller)
        tally.wrong += sum(bytes(row) != was for row, was in zip(puller.memory.rows, held, strict=True))
        following, last = pull(after, "after", 0)
        served = after.result(following)
        after.tier.on_request_finished(last)
        assert served.success, "the next request is affected"
        tally.wrong += count_wrong(after, set(served.successful_keys))
        tally.leaked += count_leaked(after)
    finally:
        owner.end()
        puller.close()
        after.close()


def attach(puller: Engine) -> None:
    """Until rows are read and do not come over sockets any more."""
    for number in range(100):
        job, request = pull(puller, f"attach {number}", CHUNKS)
        assert puller.result(job).success
        puller.tier.on_request_finished(request)
        if puller.stat("p2p_rows_read_total"):
            return
        time.sleep(0.1)
    raise AssertionError("NIXL is not used")


def main() -> None:
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    seed = int(os.environ.get("SEED", "1"))
    os.environ.setdefault("UCX_TLS", "tcp")
    dice, tally, tried = random.Random(seed), Tally(), 0
    kinds = transports()
    healthy = OwnerProcess()
    try:
        while tally.kills < wanted:
            assert tried < 3 * wanted + 10, "the moments are not in the middle of a pull"
            kill_once(kinds[tried % len(kinds)], healthy, dice, tally)
            tried += 1
            if tried % 10 == 0:
                print(f"{tally.kills} of {wanted}", flush=True)
    finally:
        healthy.end()
    print(f"{tally.kills} kills, {tally.wrong} wrong, {tally.leaked} leaked")
    sys.exit(1 if tally.wrong or tally.leaked else 0)


if __name__ == "__main__":
    main()
