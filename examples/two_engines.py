"""Client of two_engines.sh: engine A computes prompts, engine B pulls them from A; then A is killed under a pull.

    two_engines.py reference --url URL --answers FILE                            a server without the connector
    two_engines.py seed      --url URL --answers FILE                            engine A
    two_engines.py pull      --url URL --answers FILE --owner PID --owner-port PORT --gate PORT --json FILE
                                                                                 engine B; --owner is A's process group

Each prompt is sent alone and in the same state of the cache in every run, so "equal" may mean equal to the last bit of
every log-probability: what B pulls is compared with the reference's device hit, which computes the same tail. A prompt
that did not come whole fails the run. It is compared only where the reference has an answer with the same split, all of
it computed; with another one even a plain engine's answers differ from its own, because bfloat16 rounds by the shape of
a batch.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gate import Gate
from host_memory import ANSWER_TOKENS, ask, ask_twice, conversation, difference, differences, progress, ttft
from http_client import Answer, Metrics, Server

TOKENS, SHORT_TOKENS = 2900, 600
BLOCK_TOKENS, KV_BYTES_PER_TOKEN = 32, 23040
PULLED = range(6)
"""Conversations that A has. As in each of these lists, the first one is the warm-up where times are taken."""
COLD = range(100, 106)  # that nobody has
UNDER_FIRE = range(200, 202)  # that A has, and that end in a count; A is killed while B pulls one of them
COUNT = ", ".join(map(str, range(1, 30))) + ","
SURE = 1.0
"""How far ahead of the next best each token of an answer has to be (natural log) to stay the same when a part of its
prompt is computed in a batch of another shape. That moves the log-probabilities of this model by 0.3 at most."""
AFTERWARDS = range(300, 305)  # short ones that only A had

PULLED_BYTES = "vllm:tiered_offload_tier_bytes_total"


def main() -> int:
    args = parse_args()
    server = Server(args.url, args.model)
    if args.run == "reference":
        args.answers.write_text(json.dumps(reference(server)))
        return 0
    if args.run == "seed":
        ask(server, [*prompts(server, PULLED), *under_fire(server), *afterwards(server)], "A computes")
        return 0
    return pull(server, args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=["reference", "seed", "pull"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, help="the name that the server gives its model")
    parser.add_argument("--answers", type=Path, required=True, help="the reference run's answers")
    parser.add_argument("--owner", type=int, help="the process group of engine A")
    parser.add_argument("--owner-port", type=int, help="where A serves peers")
    parser.add_argument("--gate", type=int, help="another port on which B finds A")
    parser.add_argument("--json", type=Path, help="where the result goes")
    return parser.parse_args()


def prompts(server: Server, numbers: range) -> list[list[int]]:
    return [conversation(server, number, TOKENS) for number in numbers]


def under_fire(server: Server) -> list[list[int]]:
    """They end in a way that leaves no doubt how to go on."""
    count = server.tokenize(f"\nAssistant: {COUNT}")
    return [[*conversation(server, number, TOKENS - len(count)), *count] for number in UNDER_FIRE]


def afterwards(server: Server) -> list[list[int]]:
    return [conversation(server, number, SHORT_TOKENS) for number in AFTERWARDS]


def whole(prompt: list[int]) -> int:
    """Tokens of it that can be pulled: its full blocks, without the last token."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


# ---- the reference -------------------------------------------------------------------------------------------------


def reference(server: Server) -> dict[str, list[dict[str, Any]]]:
    """Answers by what they are for. The first two are all computed, and a device hit's."""
    computed, hits = zip(*ask_twice(server, prompts(server, PULLED)), strict=True)
    cold = ask(server, prompts(server, COLD), "cold")
    fire = [server.complete(prompt, ANSWER_TOKENS, logprobs=2) for prompt in under_fire(server)]
    after = ask(server, afterwards(server), "cold")
    named = {"computed": computed, "hits": hits, "cold": cold, "fire": fire, "after": after}
    return {name: [asdict(answer) for answer in answers] for name, answers in named.items()}


# ---- engine B ------------------------------------------------------------------------------------------------------


def pull(server: Server, args: argparse.Namespace) -> int:
    wanted = {name: [Answer(**one) for one in all_] for name, all_ in json.loads(args.answers.read_text()).items()}
    gate = Gate(args.gate, args.owner_port)

    cold = ask(server, prompts(server, COLD), "computed")
    before = server.settled_metrics()
    pulled, tokens = ask_one_by_one(server, prompts(server, PULLED), args.owner_port)
    after = server.settled_metrics()
    problems = transfer_problems(before, after, sum(whole(prompt) for prompt in prompts(server, PULLED)))
    unequal = differences("computed", cold, wanted["cold"])
    for number, (prompt, answer) in enumerate(zip(prompts(server, PULLED), pulled, strict=True)):
        same_split = {whole(prompt): wanted["hits"], 0: wanted["computed"]}.get(tokens[number])
        if same_split is None:
            unequal.append(f"pulled, conversation {number}: not compared, only {tokens[number]:,} tokens came")
        elif answer.content() != same_split[number].content():
            unequal.append(f"pulled, conversation {number}: {difference(answer, same_split[number])}")
    lived_on = survive(server, args, gate, wanted)
    times = {"cold": ttft(cold), "pulled": ttft(pulled)}
    result = {
        "outputs_equal": not unequal,
        "ttft_ms": times,
        "ratio": round(times["cold"] / times["pulled"], 1),
        "tokens_pulled": pulled_tokens(before, after),
        "survived_peer_kill": not lived_on,
    }
    problems += unequal + lived_on
    show(result)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    for problem in problems:
        print(f"  FAILED  {problem}")
    print(json.dumps(result))
    return 1 if problems else 0


def source(port: int) -> dict[str, Any]:
    """What a request says that is to be pulled from this peer. A has two ports, its own one and the gate's."""
    return {"kv_transfer_params": {"remote_kv_source": {"host": "127.0.0.1", "port": port}}}


def ask_one_by_one(server: Server, prompts: list[list[int]], port: int) -> tuple[list[Answer], list[int]]:
    """Answers, and how many tokens of each prompt were pulled."""
    answers, tokens = [], []
    for number, prompt in enumerate(prompts):
        before = server.settled_metrics()
        answers.append(server.complete(prompt, ANSWER_TOKENS, **source(port)))
        tokens.append(pulled_tokens(before, server.settled_metrics()))
        progress(number, prompt, f"pulled {answers[-1].ttft_ms:6,.0f} ms")
    return answers, tokens


def pulled_tokens(before: Metrics, after: Metrics) -> int:
    return int(after.cached_tokens("p2p") - before.cached_tokens("p2p"))


def pulled_bytes(metrics: Metrics) -> float:
    return metrics.total(PULLED_BYTES, tier="p2p", direction="load")


def transfer_problems(before: Metrics, after: Metrics, wanted: int) -> list[str]:
    """What the counters of /metrics do not agree on. The tier's bytes are the rows', and a frame of each."""
    problems = []
    tokens = pulled_tokens(before, after)
    if tokens != wanted:
        problems.append(f"{tokens:,} tokens were pulled, {wanted:,} should have been")
    moved, rows = pulled_bytes(after) - pulled_bytes(before), tokens * KV_BYTES_PER_TOKEN
    if not rows <= moved <= 1.01 * rows:
        problems.append(f"{moved:,.0f} bytes were pulled for {tokens:,} tokens of {KV_BYTES_PER_TOKEN:,} bytes")
    return problems


# ---- the kill ------------------------------------------------------------------------------------------------------


def survive(server: Server, args: argparse.Namespace, gate: Gate, wanted: dict[str, list[Answer]]) -> list[str]:
    """Kill A in the middle of a pull; what was wrong with that request and five more.

    A part of it is pulled and the rest computed, as nothing in the reference was. So only a prompt will do of whose
    answer the reference is sure.
    """
    sure = [pair for pair in zip(under_fire(server), wanted["fire"], strict=True) if min(pair[1].leads) >= SURE]
    if not sure:
        return ["the reference is not sure of any of the answers under which A is to be killed"]
    prompt, want = sure[0]
    before, all_of_it = server.settled_metrics(), whole(prompt) * KV_BYTES_PER_TOKEN
    gate.shut_after(whole(prompt) // BLOCK_TOKENS // 3)
    answer = killing(server, args, prompt, pulled_bytes(before))
    moved = pulled_bytes(server.settled_metrics()) - pulled_bytes(before)
    print(f"  A was killed in the middle of a pull: {moved / 2**20:,.1f} of {all_of_it / 2**20:,.1f} MiB had come")
    problems = [] if 0 < moved < all_of_it else [f"{moved:,.0f} bytes had come, 1 to {all_of_it - 1:,} are a middle"]
    if answer.text != want.text:
        problems.append(f"the request whose peer died said {answer.text!r}, the reference {want.text!r}")
    return problems + differences("after the kill", ask(server, afterwards(server), "A is gone"), wanted["after"])


def killing(server: Server, args: argparse.Namespace, prompt: list[int], before: float) -> Answer:
    """The answer to a prompt that A has; A is killed when a part of it has come through the gate."""
    answers: list[Answer] = []

    def pull_it() -> None:
        answers.append(server.complete(prompt, ANSWER_TOKENS, **source(args.gate)))

    asking = threading.Thread(target=pull_it)
    watcher = Server(str(server.http.base_url), server.model)
    asking.start()
    while asking.is_alive() and pulled_bytes(watcher.metrics()) == before:
        time.sleep(0.002)
    os.killpg(args.owner, signal.SIGKILL)
    asking.join()
    progress(1, prompt, "A was killed")
    return answers[0]


def show(result: dict[str, Any]) -> None:
    names = {"cold": "nowhere: computed by B", "pulled": "A's memory"}
    cold = result["ttft_ms"]["cold"]
    print("\n  where the prompt came from    time to first token    against cold    tokens pulled    same text")
    for source, value in result["ttft_ms"].items():
        tokens = f"{result['tokens_pulled']:,}" if source == "pulled" else "-"
        same = "yes" if result["outputs_equal"] else "NO"
        print(f"  {names[source]:<28} {value:>14,.1f} ms {cold / value:>14.1f}x {tokens:>16} {same:>12}")
    print(f"  B answered as before when A was killed in the middle of a pull: {result['survived_peer_kill']}\n")


if __name__ == "__main__":
    sys.exit(main())
