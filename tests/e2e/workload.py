"""Prompts for the tiny model, as token ids, and the workload that most end-to-end tests share."""

import random
from dataclasses import dataclass

from http_client import Answer, Server

from .tiny_model import VOCABULARY

BLOCK = 32
DEVICE_BLOCKS = 192
MAX_MODEL_LEN = 4096
ANSWER_TOKENS = 12

SMALL_DEVICE_CACHE = [
    *("--block-size", str(BLOCK)),
    *("--num-gpu-blocks-override", str(DEVICE_BLOCKS)),
    *("--max-model-len", str(MAX_MODEL_LEN)),
    *("--max-num-batched-tokens", "1024"),
]

# Lengths are no multiples of a block, so that a tail is computed after every hit.
CONVERSATION_LENGTHS = [2005, 1501, 2750, 1777, 2300]


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that no other seed shares, from the first block on."""
    rng = random.Random(seed)
    return [rng.randrange(2, VOCABULARY) for _ in range(length)]


def conversations() -> list[list[int]]:
    return [prompt(seed, length) for seed, length in enumerate(CONVERSATION_LENGTHS)]


def push_out(server: Server, seed: int) -> None:
    """Fill the device cache with other prompts, so that nothing asked before is left in it."""
    for i in range(DEVICE_BLOCKS * BLOCK // 3000 + 2):
        server.complete(prompt(10_000 + seed * 100 + i, 3000), 1)


@dataclass
class Answers:
    """What the same prompts were answered cold, and at once again from the device cache."""

    cold: list[Answer]
    device: list[Answer]


def ask_twice(server: Server, prompts: list[list[int]]) -> Answers:
    answers = Answers([], [])
    for one in prompts:
        answers.cold.append(server.complete(one, ANSWER_TOKENS))
        answers.device.append(server.complete(one, ANSWER_TOKENS))
    return answers


def contents(answers: list[Answer]) -> list[tuple[str, list[int], list[float]]]:
    return [answer.content() for answer in answers]
