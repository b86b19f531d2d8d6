"""Client of host_memory.sh: hold a few conversations, push their KV out of the device cache, and ask them again.

    host_memory.py reference --url URL --answers FILE                  a server without the connector
    host_memory.py offload   --url URL --answers FILE --json FILE      a server with it; compares and measures

Both runs send the same prompts in the same order, one at a time, so every request meets batches of the same shape and
"equal" may mean equal to the last bit of every log-probability.
"""

import argparse
import json
import random
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from http_client import Answer, Server

CONVERSATIONS = 7
"""The first one is the warm-up: it is compared like the others, but not timed."""

ANSWER_TOKENS = 16
FILLER_TOKENS = 2900

TOPICS = ["harbour", "bridge", "garden", "engine", "window", "market", "station", "library", "mountain", "kitchen"]
VERBS = ["repairs", "paints", "counts", "follows", "measures", "carries", "opens", "describes", "watches", "visits"]
ADJECTIVES = ["quiet", "narrow", "bright", "heavy", "ancient", "distant", "careful", "hollow", "purple", "familiar"]


def main() -> int:
    args = parse_args()
    server = Server(args.url, args.model)
    prompts = [conversation(server, i, 2000 + 150 * i) for i in range(CONVERSATIONS)]
    if args.run == "reference":
        args.answers.write_text(json.dumps([asdict(a) for pair in ask_twice(server, prompts) for a in pair]))
        return 0
    return offload(server, prompts, args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=["reference", "offload"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, help="the name that the server gives its model")
    parser.add_argument("--answers", type=Path, required=True, help="the reference run's answers")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--device-tokens", type=int, default=6400, help="how many tokens the device cache holds")
    parser.add_argument("--kv-bytes-per-token", type=int, help="checks the byte counter against vLLM's token counter")
    return parser.parse_args()


def offload(server: Server, prompts: list[list[int]], args: argparse.Namespace) -> int:
    reference = [Answer(**a) for a in json.loads(args.answers.read_text())]
    cold, device = zip(*ask_twice(server, prompts), strict=True)
    push_out(server, args.device_tokens)

    before = server.settled_metrics()
    from_cpu = ask(server, prompts, "cpu")
    after = server.settled_metrics()

    # A prompt that comes back computes what a device hit computes, so that is the batch shape to compare with.
    wanted_cold, wanted_hit = reference[0::2], reference[1::2]
    problems = [
        *differences("cold", cold, wanted_cold),
        *differences("device", device, wanted_hit),
        *differences("cpu", from_cpu, wanted_hit),
    ]
    result = {
        "model": args.model,
        "outputs_equal": not problems,
        "ttft_ms": {"cold": ttft(cold), "device": ttft(device), "cpu": ttft(from_cpu)},
        "tokens_loaded": {"cpu": int(after.cached_tokens("host") - before.cached_tokens("host"))},
    }
    problems += transfer_problems(before, after, result["tokens_loaded"]["cpu"], args.kv_bytes_per_token)
    show(result, after)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for problem in problems:
        print(f"  FAILED  {problem}")
    return 1 if problems else 0


def conversation(server: Server, number: int, tokens: int) -> list[int]:
    """A chat of made-up sentences, cut to `tokens`. No two share a first block, so none helps another."""
    rng = random.Random(number)
    lines = [f"Conversation {number}. Summarise what happened."]
    lines += [sentence(rng, turn) for turn in range(tokens // 8)]
    ids = server.tokenize("\n".join(lines))
    assert len(ids) >= tokens, f"only {len(ids)} tokens were made, {tokens} are wanted"
    return ids[:tokens]


def sentence(rng: random.Random, turn: int) -> str:
    first, second = rng.sample(TOPICS, 2)
    who = "User" if turn % 2 == 0 else "Assistant"
    return f"{who}: The {rng.choice(ADJECTIVES)} {first} {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {second}."


def ask_twice(server: Server, prompts: list[list[int]]) -> list[tuple[Answer, Answer]]:
    """Each prompt cold, and again at once while the device still has it."""
    answers = []
    for number, prompt in enumerate(prompts):
        cold, device = server.complete(prompt, ANSWER_TOKENS), server.complete(prompt, ANSWER_TOKENS)
        progress(number, prompt, f"cold {cold.ttft_ms:6,.0f} ms   device {device.ttft_ms:6,.0f} ms")
        answers.append((cold, device))
    return answers


def ask(server: Server, prompts: list[list[int]], source: str) -> list[Answer]:
    answers = []
    for number, prompt in enumerate(prompts):
        answers.append(server.complete(prompt, ANSWER_TOKENS))
        progress(number, prompt, f"{source} {answers[-1].ttft_ms:6,.0f} ms")
    return answers


def push_out(server: Server, device_tokens: int) -> None:
    """Send other prompts until every block of the device cache has been taken over by one of them."""
    count = -(-device_tokens // FILLER_TOKENS) + 1
    for i in range(count):
        print(f"  pushing the conversations out of the device cache: {i + 1}/{count}", flush=True)
        server.complete(conversation(server, 1000 + i, FILLER_TOKENS), 1)


def progress(number: int, prompt: list[int], what: str) -> None:
    name = f"conversation {number}" if number else "warm-up       "
    print(f"  {name} ({len(prompt):,} tokens)  {what}", flush=True)


def differences(source: str, answers: Any, wanted: list[Answer]) -> list[str]:
    """One line for each answer that is not, bit for bit, the reference engine's."""
    return [
        f"{source}, conversation {i}: {difference(answer, want)}"
        for i, (answer, want) in enumerate(zip(answers, wanted, strict=True))
        if answer.content() != want.content()
    ]


def difference(answer: Answer, want: Answer) -> str:
    if answer.token_ids != want.token_ids:
        return f"said {answer.text!r}, the reference {want.text!r}"
    worst = max(abs(a - w) for a, w in zip(answer.logprobs, want.logprobs, strict=True))
    return f"same text, log-probabilities are up to {worst:.2g} apart"


def ttft(answers: Any) -> float:
    return round(statistics.median(a.ttft_ms for a in answers[1:]), 1)


def transfer_problems(before: Any, after: Any, tokens_loaded: int, bytes_per_token: int | None) -> list[str]:
    """What the counters of /metrics do not agree on."""
    problems = []
    if not tokens_loaded:
        problems.append("no token was loaded from host memory")
    if from_device := after.cached_tokens("device") - before.cached_tokens("device"):
        problems.append(f"{from_device:.0f} tokens were still in the device cache")
    if failures := after.failures():
        problems.append(f"{failures:.0f} transfers failed")
    loaded = after.moved_bytes("load") - before.moved_bytes("load")
    if bytes_per_token and loaded != tokens_loaded * bytes_per_token:
        problems.append(f"{loaded:,.0f} bytes were loaded for {tokens_loaded:,} tokens of {bytes_per_token:,} bytes")
    return problems


def show(result: dict[str, Any], metrics: Any) -> None:
    cold = result["ttft_ms"]["cold"]
    print("\n  prompt comes from    time to first token (median)    against cold")
    for source, value in result["ttft_ms"].items():
        print(f"  {source:<20} {value:>12,.1f} ms {cold / value:>27.1f}x")
    stored, loaded = (metrics.moved_bytes(direction) / 2**20 for direction in ("store", "load"))
    print(
        f"\n  text and log-probabilities equal to the run without the connector: {result['outputs_equal']}"
        f"\n  tokens loaded from host memory: {result['tokens_loaded']['cpu']:,}"
        f"\n  stored {stored:,.0f} MiB, loaded {loaded:,.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
