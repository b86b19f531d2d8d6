"""A process that makes, or joins, a host region and stops at a chosen moment. Run by test_processes.py.

    engine_process.py create STAGE ROWS    STAGE: before_map, after_map, populating, in_service
    engine_process.py join ANNOUNCEMENT    as JSON; opens the region and stays

Prints one JSON line when it has arrived there, then waits for a line on stdin: "check" answers whether the region
still holds this process's bytes.
"""

import dataclasses
import json
import sys
from typing import Any, NoReturn

from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.messages import RegionAnnouncement
from vllm_tiered_offload.region import HostRegion, host_region
from vllm_tiered_offload.region.mapping import SharedMapping
from vllm_tiered_offload.region.populate import populate

PATTERN = 0x5A


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def stop_here(**message: Any) -> NoReturn:
    say(**message)
    sys.stdin.read()
    raise SystemExit("nobody killed this process")


def stop_before_map(fd: int, size: int) -> NoReturn:
    stop_here(stage="before_map")


def stop_after_map(mapping: SharedMapping, **_: object) -> NoReturn:
    stop_here(stage="after_map")


def stop_while_populating(mapping: SharedMapping, **_: object) -> NoReturn:
    """Two pieces are in, the third is on its way."""
    done = []

    def advise(start: int, length: int) -> None:
        if len(done) == 2:
            stop_here(stage="populating")
        mapping.madvise(23, start, length)
        done.append(length)

    populate(mapping, advise=advise, piece_bytes=1 << 20)
    raise SystemExit("the region is too small for this stage")


def serve(region: HostRegion) -> None:
    """Answer questions until stdin ends."""
    for line in sys.stdin:
        if line.strip() == "check":
            say(intact=bool((region.array == PATTERN).all()))


def main() -> None:
    if sys.argv[1] == "join":
        raw = json.loads(sys.argv[2])
        geometry = RegionGeometry(raw["geometry"]["num_rows"], tuple(raw["geometry"]["slot_bytes"]), 1)
        region = HostRegion.open(RegionAnnouncement(raw["pid"], raw["fd"], raw["inode"], geometry))
        say(joined=True)
        serve(region)
        return
    stage, rows = sys.argv[2], int(sys.argv[3])
    if stage == "before_map":
        host_region._map = stop_before_map
    elif stage == "after_map":
        host_region.populate_pages = stop_after_map
    elif stage == "populating":
        host_region.populate_pages = stop_while_populating
    region = HostRegion.create(RegionGeometry(rows, (4096,), 1))
    region.array[:] = PATTERN
    say(announcement=dataclasses.asdict(region.announcement()))
    serve(region)


if __name__ == "__main__":
    main()
