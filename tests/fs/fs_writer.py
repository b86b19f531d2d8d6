"""A process that stores chunks: `python fs_writer.py ROOT NAME COUNT MODE`; run by the tests of several processes.

MODE "busy" stores other keys again and again, as fast as it can, "stop" stands still between write and rename after
printing "ready", "reset" does so in a private generation, "loop" stores, loads and removes the same keys as everybody
else, and stores them all once more when told to.
"""

import sys
import threading

from fs_kit import ROW, Bench, content, keys_of

from vllm_tiered_offload.tiers.fs.files import Files


class StopsBeforeRename(Files):
    def rename(self, source: str, target: str) -> None:
        if "manifest" in target:
            super().rename(source, target)
            return
        sys.stdout.write("ready\n")  # in one piece: several threads may come here
        sys.stdout.flush()
        threading.Event().wait(60)


def main(root: str, name: str, count: int, mode: str) -> None:
    files = StopsBeforeRename() if mode == "stop" else Files()
    bench = Bench(root, real_lanes=True, files=files, num_rows=count, engine_id=name if mode == "loop" else "engine")
    keys = keys_of("shared" if mode == "loop" else name, count)
    bench.fill(keys)
    if mode == "stop":
        bench.submit(keys, load=False)
        threading.Event().wait(60)
    while mode == "busy":
        bench.submit(keys, load=False)
        print("ready", flush=True)
        assert bench.tier.drain(60)
        name += "x"
        keys = keys_of(name, count)
        bench.fill(keys)
    if mode == "reset":
        bench.tier.reset()
    assert bench.store(keys).success
    if mode == "reset":
        print("ready", flush=True)
        threading.Event().wait(60)
    if mode == "loop":
        for _ in range(20):
            bench.wipe()
            loaded = set(bench.load(keys).successful_keys)  # the other one removes some all the time
            assert len(loaded) > count // 4
            for row, key in zip(bench.rows, keys, strict=True):
                assert key not in loaded or bytes(row) == content(key, ROW)
            for key in keys[::3]:
                bench.path(key).unlink(missing_ok=True)
            bench.fill(keys)
            assert bench.store(keys).success
        print("done", flush=True)
        sys.stdin.readline()  # until nobody removes anything any more
        for _ in range(2):  # the first time, the index learns what is gone
            bench.load(keys)
            bench.fill(keys)
            assert bench.store(keys).success
    bench.tier.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
