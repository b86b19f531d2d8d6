"""Guesses in place of a draft model's, some of them wrong: what was written for these has to be written again."""

from vllm_tiered_offload.testing.simulator import chain


def guesses(value: int, token: int, count: int, epoch: int) -> list[int]:
    """`count` tokens that may follow `token`, whose predecessor has the chain value `value`. One of four is wrong."""
    found = []
    for _ in range(count):
        value = chain.mix(token, value, epoch)
        token = chain.sample(value)
        if value % 4 == 0:
            token = chain.FIRST_TOKEN + (token + 1 - chain.FIRST_TOKEN) % chain.VOCAB
        found.append(token)
    return found
