"""The bytes that a KV slot must hold.

    h(p) = mix(token(p), h(p - 1), epoch)        one 64-bit value per position, chained over the whole prefix
    word(p, rank, layer, i) = h(p) * odd(rank, layer, i) + salt(rank, layer, i)      what is stored

`h` depends on every token up to p, so a slot that moved, that belongs to another prefix or that was written by older
weights differs. A slot of a draft model's layers holds the word of h(p + 1): it depends on the next token as well. The
multipliers are odd (a bijection), so two slots are equal only if their `h` are, and the salts keep ranks and layers
apart. `POISON` fills freshly allocated blocks: a slot that no forward pass has written.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

POISON = np.uint64(0xDEADDEADDEADDEAD)
WORDS_PER_SLOT = 2
FIRST_TOKEN = 3  # below are special tokens
VOCAB = 31_000

_MASK = (1 << 64) - 1
_A = 0x9E3779B97F4A7C15
_B = 0xBF58476D1CE4E5B9
_C = 0x94D049BB133111EB


def mix(token: int, previous: int, epoch: int) -> int:
    """The next value of the chain."""
    h = (previous ^ (token * _A) ^ (epoch * _C)) & _MASK
    h = ((h ^ (h >> 30)) * _B) & _MASK
    h = ((h ^ (h >> 27)) * _C) & _MASK
    return h ^ (h >> 31)


def extend(chain: list[int], tokens: Iterable[int], epoch: int) -> None:
    """Append the values of `tokens` to `chain`."""
    previous = chain[-1] if chain else _A
    for token in tokens:
        previous = mix(token, previous, epoch)
        chain.append(previous)


def sample(value: int) -> int:
    """The token that the model answers with after a slot of chain value `value`."""
    return FIRST_TOKEN + (value >> 11) % VOCAB


class SlotCode:
    """Turns chain values into the words of every rank and layer of a KV group; `replicated`: ranks have the same."""

    def __init__(
        self,
        ranks: int,
        layers: int,
        group: int = 0,
        words_per_slot: int = WORDS_PER_SLOT,
        replicated: bool = False,
    ) -> None:
        shape = (1 if replicated else ranks, layers, 1, words_per_slot)
        rng = np.random.default_rng(7 + group)
        top = np.iinfo(np.uint64).max
        odd = rng.integers(0, top, shape, dtype=np.uint64) | np.uint64(1)
        salt = rng.integers(0, top, shape, dtype=np.uint64)
        self._odd, self._salt = (np.repeat(one, ranks // shape[0], axis=0) for one in (odd, salt))

    def words(self, values: list[int]) -> Words:
        """[rank, layer, position, word] for the given chain values."""
        h = np.array(values, dtype=np.uint64).reshape(1, 1, -1, 1)
        return h * self._odd + self._salt
