"""The namespace of whatever outlives or leaves the process (D5).

Two engines may share stored bytes only if everything that decides these bytes is equal. `FIELDS` names all of it, and
`Fingerprint.of` wants each of them said, so that none can be forgotten: a missing field would be a wrong byte one day.
What does not decide bytes (executor, ports, engine id, data parallel rank) has no field, so changing it still hits.

Values are kept as canonical JSON: 1, "1" and null stay apart, and equal values are equal text on every machine.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

FORMAT = "vllm-tiered-offload fingerprint 1"
SHORT_DIGITS = 12

# name -> what it says. Order is for readers; the canonical order is alphabetical.
FIELDS: dict[str, str] = {
    "model": "model name or path",
    "revision": "model revision",
    "weights": "identity of the weights that were loaded: commit, files, sizes, times, digests of their headers",
    "hf_config": "the Hugging Face config: RoPE scaling, quantization, sliding windows",
    "quantization": "quantization that was asked for outside the config",
    "model_dtype": "type that the model computes in",
    "kv_dtype": "effective type of the KV cache, never 'auto'",
    "block_tokens": "tokens a block, per KV group",
    "blocks_per_chunk": "blocks a chunk",
    "kv_groups": "the set of KV groups: kind, layers, window",
    "layout": "order and strides of a page, attention backend's packing included",
    "device": "device family; on CPUs the instruction set, which decides the packing",
    "tensor_parallel": "ranks that share the heads",
    "pipeline_parallel": "ranks that share the layers",
    "context_parallel": "ranks that share the tokens",
    "hash_algorithm": "algorithm of the block hashes",
    "hash_seed": "NONE_HASH, the seed of the block hashes",
    "hash_scheme": "version of what vLLM mixes into a block hash",
    "generation": "random id of a private generation after a cache reset (L6); null for the shared one",
}


class FieldDifference(NamedTuple):
    """One field that differs; None where a side does not have the field. Values are JSON text."""

    name: str
    mine: str | None
    theirs: str | None

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.mine)} here, {_shown(self.theirs)} there"


@dataclass(frozen=True)
class Fingerprint:
    """Everything that decides the bytes, as (name, JSON text) in alphabetical order of names."""

    fields: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.fields]
        if not names or names != sorted(set(names)):
            raise ValueError("fingerprint: names must be there, unique and in alphabetical order")

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "Fingerprint":
        """From one JSON-like value for each name of FIELDS.

        Raises ValueError when a name is missing or unknown, or when a value has no canonical JSON (bytes, sets, nan).
        """
        missing, unknown = FIELDS.keys() - values.keys(), values.keys() - FIELDS.keys()
        if missing or unknown:
            raise ValueError(f"fingerprint: missing {sorted(missing)}, unknown {sorted(unknown)}")
        return cls(tuple((name, _canonical(name, values[name])) for name in sorted(values)))

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits; equal exactly when all fields are."""
        text = f"{FORMAT}\n{self.to_json()}"
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()

    @property
    def short(self) -> str:
        """The digest's first digits, for logs and names. Compare digests, not these."""
        return self.digest[:SHORT_DIGITS]

    def diff(self, other: "Fingerprint") -> list[FieldDifference]:
        """The fields that differ, alphabetically; empty when the two share bytes."""
        mine, theirs = dict(self.fields), dict(other.fields)
        return [
            FieldDifference(name, mine.get(name), theirs.get(name))
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]

    def to_json(self) -> str:
        """One line of text that `from_json` reads."""
        return json.dumps(self.fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Fingerprint":
        """Read what `to_json` wrote, of this version or another. Raises ValueError for anything else."""
        try:
            pairs = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"fingerprint: not JSON: {error}") from error
        if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
            raise ValueError("fingerprint: expected a list of [name, value] pairs of text")
        return cls(tuple((name, value) for name, value in pairs))


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)


def _canonical(name: str, value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"fingerprint: {name}: {error}") from error


def _shown(value: str | None) -> str:
    return "nothing" if value is None else value
