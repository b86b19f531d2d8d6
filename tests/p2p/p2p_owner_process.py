"""Another engine in its own process: `p2p_owner_process.py ROWS ROW_BYTES CHUNKS SECONDS_A_ROW TRANSPORT [restless]`.

It listens on LISTEN of its environment, or on loopback. It fills its memory, prints its port, and from then on its main
thread, which would be the scheduler's, sleeps.
"""

import os
import signal
import sys
import time

from p2p_kit import FINGERPRINT, PATIENCE, Memory, keys_of

from vllm_tiered_offload import JobMetadata
from vllm_tiered_offload.tiers.p2p.server import PeerServer
from vllm_tiered_offload.tiers.p2p.tier import P2pTier


def help_for_ever(server: PeerServer) -> None:
    """Whoever reads from it is helped, also when it has hung up: what was cancelled goes on as far as NIXL lets it."""
    turn = server._turn

    def and_help(ready):
        turn(ready)
        server._agent.progress()

    server._turn = and_help  # type: ignore[method-assign]
    server._next_timer = server._clock  # type: ignore[method-assign]
    server.wake()


def main() -> None:
    rows, row_bytes, chunks, seconds = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    memory = Memory(rows, row_bytes)
    settings = {"lease_share": 1.0, "transport": sys.argv[5], "insecure_trusted_network": True}
    listen = os.environ.get("LISTEN", "127.0.0.1")
    tier = P2pTier.from_settings({**settings, "listen": listen}, engine_id=f"owner {os.getpid()}")
    tier.bind_region(memory.rows, memory.geometry, FINGERPRINT)
    tier.bind_leases(memory.primary)
    keys = keys_of("process", chunks)
    memory.put(keys)
    tier.submit_store(JobMetadata(1, tuple(keys), tuple(range(chunks)), False, memory.req))
    server = tier._server
    assert server.is_open.wait(PATIENCE)
    count_served = server._count_served

    def slowly(num_rows, row_bytes):
        time.sleep(seconds * num_rows)
        count_served(num_rows, row_bytes)

    server._count_served = slowly  # type: ignore[method-assign]
    if "restless" in sys.argv:
        help_for_ever(server)
    print(tier.port, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
