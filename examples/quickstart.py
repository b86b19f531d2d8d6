"""Client of quickstart.sh: hold conversations, let them leave the device, restart the engine, and ask them again.

    quickstart.py reference --url URL --answers FILE                          a server without the connector
    quickstart.py first     --url URL --answers FILE --state FILE --root DIR  a server with it: cold, device, cpu
    quickstart.py restarted --url URL --answers FILE --state FILE --json FILE a new one over the same directory: fs

All three send the same prompts in the same order, one at a time, so that "equal" may mean equal to the last bit of
every log-probability.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from host_memory import (
    CONVERSATIONS,
    ask,
    ask_twice,
    conversation,
    differences,
    push_out,
    ttft,
)
from http_client import Answer, Metrics, Server

BLOCK_TOKENS = 32


def main() -> int:
    args = parse_args()
    server = Server(args.url, args.model)
    prompts = [conversation(server, i, 2000 + 150 * i) for i in range(CONVERSATIONS)]
    if args.run == "reference":
        args.answers.write_text(json.dumps([asdict(a) for pair in ask_twice(server, prompts) for a in pair]))
        return 0
    reference = [Answer(**a) for a in json.loads(args.answers.read_text())]
    if args.run == "first":
        return first(server, prompts, reference, args)
    return restarted(server, prompts, reference, args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=["reference", "first", "restarted"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, help="the name that the server gives its model")
    parser.add_argument("--answers", type=Path, required=True, help="the reference run's answers")
    parser.add_argument("--state", type=Path, help="what the first run hands to the restarted one")
    parser.add_argument("--root", type=Path, help="the directory of the fs tier")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--device-tokens", type=int, default=6400, help="how many tokens the device cache holds")
    return parser.parse_args()


def first(server: Server, prompts: list[list[int]], reference: list[Answer], args: argparse.Namespace) -> int:
    """Cold, from the device, from host memory; leaves when every conversation is on disk."""
    cold, device = zip(*ask_twice(server, prompts), strict=True)
    push_out(server, args.device_tokens)
    before = server.settled_metrics()
    from_cpu = ask(server, prompts, "cpu")
    after = server.settled_metrics()
    state = {
        "ttft_ms": {"cold": ttft(cold), "device": ttft(device), "cpu": ttft(from_cpu)},
        "tokens_loaded": {"cpu": loaded(before, after, "host")},
        # A prompt that comes back computes what a device hit computes: that is the batch shape to compare with.
        "differences": [
            *differences("cold", cold, reference[0::2]),
            *differences("device", device, reference[1::2]),
            *differences("cpu", from_cpu, reference[1::2]),
        ],
    }
    wait_until_on_disk(args.root, sum(len(prompt) // BLOCK_TOKENS for prompt in prompts))
    args.state.write_text(json.dumps(state))
    return 0


def restarted(server: Server, prompts: list[list[int]], reference: list[Answer], args: argparse.Namespace) -> int:
    """A new engine process: nothing is in its device or host memory, everything comes from disk."""
    state = json.loads(args.state.read_text())
    before = server.settled_metrics()
    from_fs = ask(server, prompts, "fs")
    after = server.settled_metrics()
    unequal = [*state["differences"], *differences("fs", from_fs, reference[1::2])]
    tokens = {**state["tokens_loaded"], "fs": loaded(before, after, "disk")}
    problems = unequal + [f"no token was loaded from {tier}" for tier, count in tokens.items() if not count]
    if failures := after.total("vllm:tiered_offload_tier_failures_total"):
        problems.append(f"{failures:.0f} chunks failed on their way to or from disk")
    result = {
        "model": args.model,
        "outputs_equal": not unequal,
        "ttft_ms": {**state["ttft_ms"], "fs": ttft(from_fs)},
        "tokens_loaded": tokens,
        "engine_restarts": 1,
    }
    show(result)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    for problem in problems:
        print(f"  FAILED  {problem}")
    return 1 if problems else 0


def loaded(before: Metrics, after: Metrics, source: str) -> int:
    return int(after.cached_tokens(source) - before.cached_tokens(source))


def wait_until_on_disk(root: Path, chunks: int, seconds: float = 60.0) -> None:
    """Chunks are written behind the answers; the engine may go when all of them are there."""
    deadline = time.monotonic() + seconds
    while (there := sum(file.is_file() for file in root.glob("v1/*/[0-9a-f][0-9a-f]/[0-9a-f]*"))) < chunks:
        if time.monotonic() > deadline:
            raise SystemExit(f"only {there} of {chunks} chunks reached {root} within {seconds:.0f} s")
        time.sleep(0.2)
    print(f"  {there} chunks are on disk")


def show(result: dict[str, Any]) -> None:
    cold = result["ttft_ms"]["cold"]
    names = {
        "cold": "computed",
        "device": "device cache",
        "cpu": "host memory",
        "fs": "disk, after a restart",
    }
    print("\n  where the prompt came from    time to first token    against cold    tokens loaded    same text")
    for source, value in result["ttft_ms"].items():
        tokens = f"{result['tokens_loaded'][source]:,}" if source in result["tokens_loaded"] else "-"
        same = "yes" if result["outputs_equal"] else "NO"
        print(f"  {names[source]:<28} {value:>14,.1f} ms {cold / value:>14.1f}x {tokens:>16} {same:>12}")


if __name__ == "__main__":
    sys.exit(main())
