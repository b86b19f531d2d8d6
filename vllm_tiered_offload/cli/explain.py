"""Why two namespaces do not share: the fields that differ, in words."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from vllm_tiered_offload.contract.fingerprint import FIELDS, FieldDifference
from vllm_tiered_offload.tiers.fs.manifest import Manifest

# Field -> what a person would call it, and what makes the two equal.
WORDS: dict[str, tuple[str, str]] = {
    "model": ("the model's name or path", "give every engine the same one, a link elsewhere counts as another path"),
    "revision": ("the model's revision", "name the same --revision"),
    "weights": (
        "the weight files",
        "their names, sizes or times differ: the weights were exchanged or copied; `cp -p` keeps times",
    ),
    "hf_config": (
        "the model's config.json",
        "RoPE scaling, quantization, windows and --hf-overrides are in it: compare the files and the options",
    ),
    "quantization": ("the quantization asked for", "name the same --quantization"),
    "model_dtype": ("the type that the model computes in", "name the same --dtype"),
    "kv_dtype": ("the type of the KV cache", "name the same --kv-cache-dtype"),
    "block_tokens": ("the tokens a block", "name the same --block-size"),
    "blocks_per_chunk": ("the blocks a chunk", "name the same blocks_per_chunk in kv_connector_extra_config"),
    "kv_groups": (
        "the groups of layers that share a KV cache",
        "another model, or another version of vLLM groups them",
    ),
    "layout": (
        "the order of bytes in a block",
        "another attention backend, or VLLM_KV_CACHE_LAYOUT: let both be the same",
    ),
    "device": ("the kind of device", "bytes are exchanged only between devices, or CPUs, of the same kind"),
    "tensor_parallel": ("the number of tensor parallel ranks", "name the same --tensor-parallel-size"),
    "pipeline_parallel": ("the number of pipeline parallel ranks", "name the same --pipeline-parallel-size"),
    "context_parallel": ("the number of context parallel ranks", "name the same --decode-context-parallel-size"),
    "hash_algorithm": ("the algorithm of the block hashes", "name the same --prefix-caching-hash-algo"),
    "hash_seed": ("the seed of the block hashes", "set PYTHONHASHSEED to one value for all engines"),
    "hash_scheme": ("what goes into a block hash", "it may change with every version of vLLM: run the same one"),
    "generation": (
        "the generation",
        "a cache reset (sleep, new weights) moves an engine to a private one, until it ends",
    ),
}
_UNKNOWN = ("a field that this version does not know", "another version of vllm-tiered-offload wrote it")
_MAX_DETAILS = 5
_MAX_TEXT = 120


@dataclass(frozen=True, slots=True)
class Explanation:
    """One field that differs. `a` and `b` are its JSON values, `details` the places inside them that differ."""

    field: str
    words: str
    hint: str
    a: Any
    b: Any
    details: tuple[str, ...]

    def lines(self) -> list[str]:
        return [f"{self.field} ({self.words}):", *(f"    {line}" for line in self.details), f"  → {self.hint}"]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "about": FIELDS.get(self.field)}


def explain(a: Manifest, b: Manifest) -> list[Explanation]:
    """Everything that keeps the two apart; empty when they share."""
    return [_explain(difference) for difference in a.fingerprint.diff(b.fingerprint)]


def _explain(difference: FieldDifference) -> Explanation:
    words, hint = WORDS.get(difference.name, _UNKNOWN)
    a, b = _value(difference.mine), _value(difference.theirs)
    places = list(_places(a, b, ""))
    details = [f"{place + ': ' if place else ''}{_shown(one)} | {_shown(other)}" for place, one, other in places]
    if len(details) > _MAX_DETAILS:
        details[_MAX_DETAILS:] = [f"and {len(details) - _MAX_DETAILS} more"]
    return Explanation(difference.name, words, hint, _plain(a), _plain(b), tuple(details))


class _Nothing:
    """Where one side has no value at all, not even null."""


_NOTHING = _Nothing()


def _value(text: str | None) -> Any:
    return _NOTHING if text is None else json.loads(text)


def _plain(value: Any) -> Any:
    return None if value is _NOTHING else value


def _places(a: Any, b: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """(place, value in a, value in b) of what differs, as deep inside as it can be said."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted(a.keys() | b.keys()):
            yield from _places(a.get(name, _NOTHING), b.get(name, _NOTHING), f"{place}.{name}" if place else name)
    elif isinstance(a, list) and isinstance(b, list):
        for index in range(max(len(a), len(b))):
            one, other = (side[index] if index < len(side) else _NOTHING for side in (a, b))
            yield from _places(one, other, f"{place}[{index}]")
    elif json_text(a) != json_text(b):
        yield place, a, b


def json_text(value: Any) -> str:
    """1, true and "1" stay apart, as they do in the fingerprint."""
    return "nothing" if value is _NOTHING else json.dumps(value, ensure_ascii=False)


def _shown(value: Any) -> str:
    text = json_text(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
