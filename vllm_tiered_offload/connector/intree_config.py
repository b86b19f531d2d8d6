"""The in-tree OffloadingConnector's `kv_connector_extra_config`, in our words.

Switching from it means changing the connector's name: what it takes is understood here, key by key (the table for
users is docs/migrating.md), and what is treated differently or cannot be honoured becomes one note each. Keys of both
dialects may stand side by side unless they say the same thing twice. A configuration in our own dialect is handed
back as it is.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from vllm_tiered_offload.settings import ROOT_PATH, Settings, SettingsError, parse_size, show

OWN_KEYS = frozenset(Settings.model_fields)

# What only the in-tree connector calls so. `blocks_per_chunk` and `offload_prompt_only` are named alike in both.
IN_TREE_KEYS = frozenset(
    {
        "backpressure",
        "block_size",
        "cache_policy_module_path",
        "canonical_layout",
        "cpu_bytes_to_use",
        "eviction_policy",
        "max_tracker_size",
        "secondary_tiers",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
        "store_threshold",
    }
)

CPU_SPEC, TIERING_SPEC = "CPUOffloadingSpec", "TieringOffloadingSpec"

# Tiers that vLLM ships and that have no counterpart here.
IN_TREE_TIERS = frozenset({"example", "kvcr", "obj", "p2p"})

# Keys of an in-tree fs tier, by our name.
FS_KEYS = {"root_dir": "root", "n_read_threads": "read_threads", "n_write_threads": "write_threads"}
# Keys of any in-tree tier that mean nothing here, and what is so instead. An empty text is not worth a line.
TIER_KEYS_DROPPED = {
    "enable_kv_events": "",
    "locality": "it only labels events there",
    "backpressure": "deadlines, a circuit breaker and cascade_share take its place",
}


def translate(
    extra_config: Mapping[str, Any] | None, device_block_tokens: int | None
) -> tuple[Mapping[str, Any] | None, list[str]]:
    """Our configuration and the notes to say once at start, one line each.

    `device_block_tokens` is the device block size, None where it is not known. Raises SettingsError, one line for
    each mistake, in the words that the user typed. What is not the in-tree dialect's is left to `Settings`.
    """
    if not isinstance(extra_config, Mapping) or extra_config.keys() <= OWN_KEYS:
        return extra_config, []
    _refuse_misspelled(extra_config)
    if IN_TREE_KEYS.isdisjoint(extra_config):
        return extra_config, []
    return _Translation(extra_config).run(device_block_tokens)


def _refuse_misspelled(raw: Mapping[str, Any]) -> None:
    """An unknown key that is nearest to an in-tree one; `Settings` would suggest its own keys alone."""
    problems = []
    for key in raw.keys() - OWN_KEYS - IN_TREE_KEYS:
        near = difflib.get_close_matches(str(key), sorted(OWN_KEYS | IN_TREE_KEYS), n=1, cutoff=0.75)
        if near and near[0] in IN_TREE_KEYS:
            problems.append(f'{ROOT_PATH}[{show(key)}]: unknown key; did you mean "{near[0]}"?')
    if problems:
        raise SettingsError(sorted(problems))


class _Translation:
    """One configuration on its way from the in-tree dialect into ours."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self._config = {key: value for key, value in raw.items() if key not in IN_TREE_KEYS}
        self._notes: list[str] = []
        self._problems: list[str] = []

    def run(self, device_block_tokens: int | None) -> tuple[dict[str, Any], list[str]]:
        self._host_memory()
        self._chunk_size(device_block_tokens)
        self._what_is_stored()
        self._secondary_tiers()
        self._spec()
        self._without_counterpart()
        if self._problems:
            raise SettingsError(self._problems)
        return self._config, self._notes

    def _problem(self, key: str, text: str) -> None:
        self._problems.append(f"{ROOT_PATH}.{key}: {text}")

    def _twice(self, key: str, ours: str) -> None:
        self._problem(key, f"{ours} says the same thing: give one of the two")

    # ---- host memory -------------------------------------------------------------------------------------------

    def _host_memory(self) -> None:
        """`cpu_bytes_to_use` and `eviction_policy`: the block `cpu`. Both count all ranks of the engine together."""
        raw, cpu = self._raw, self._raw.get("cpu", {})
        if not isinstance(cpu, Mapping):
            return  # `Settings` says what is wrong with it
        block = dict(cpu)
        if "cpu_bytes_to_use" in raw:
            if "capacity" in block:
                self._twice("cpu_bytes_to_use", "cpu.capacity")
            block["capacity"] = self._capacity(raw["cpu_bytes_to_use"])
        elif "capacity" not in block:
            self._problem("cpu_bytes_to_use", 'missing; expected a size in bytes, or text such as "8GiB"')
        if "eviction_policy" in raw and "eviction_policy" in block:
            self._twice("eviction_policy", "cpu.eviction_policy")
        elif "cache_policy_module_path" in raw:
            self._notes.append(
                "cache_policy_module_path is not honoured: eviction policies come from the entry point group "
                'vllm_tiered_offload.eviction_policies, and "lru" is used unless cpu.eviction_policy names one'
            )
        elif "eviction_policy" in raw:
            block["eviction_policy"] = raw["eviction_policy"]
        self._config["cpu"] = block

    def _capacity(self, value: object) -> object:
        """Bytes. vLLM's own --kv-offloading-size gives them as a float."""
        try:
            size = parse_size(_whole(value))
        except ValueError as error:
            self._problem("cpu_bytes_to_use", f"got {show(value)}, {error}")
            return value
        if not size:
            self._problem("cpu_bytes_to_use", f"got {show(value)}, expected more than 0")
        return size

    # ---- chunks ------------------------------------------------------------------------------------------------

    def _chunk_size(self, device_block_tokens: int | None) -> None:
        """`block_size`, the tokens of a chunk, becomes blocks of the device."""
        if "blocks_per_chunk" in self._raw:
            self._config["blocks_per_chunk"] = _whole(self._raw["blocks_per_chunk"])
            if "block_size" in self._raw:
                self._twice("block_size", "blocks_per_chunk")
        elif "block_size" in self._raw:
            self._from_tokens(self._raw["block_size"], device_block_tokens)

    def _from_tokens(self, value: object, device_block_tokens: int | None) -> None:
        tokens = _whole(value)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            self._problem("block_size", f"got {show(value)}, expected tokens of a chunk: a whole number, at least 1")
        elif not device_block_tokens:
            self._problem("block_size", "the device block size is not known here; give blocks_per_chunk instead")
        elif tokens % device_block_tokens:
            fitting = -(-tokens // device_block_tokens) * device_block_tokens
            self._problem(
                "block_size",
                f"got {tokens}, expected a multiple of the device block size ({device_block_tokens} tokens), "
                f"such as {fitting}; or give blocks_per_chunk instead",
            )
        else:
            self._config["blocks_per_chunk"] = tokens // device_block_tokens

    # ---- what is stored ----------------------------------------------------------------------------------------

    def _what_is_stored(self) -> None:
        prompt_only = self._raw.get("offload_prompt_only")
        if "offload_prompt_only" not in self._raw:
            self._notes.append(
                "offload_prompt_only is not given: in-tree that means true, here generated tokens are kept too; "
                "set it to true to keep prompts only"
            )
        elif type(prompt_only) is int and prompt_only in (0, 1):
            self._config["offload_prompt_only"] = bool(prompt_only)
        threshold = _whole(self._raw.get("store_threshold", 0))
        if not isinstance(threshold, int) or isinstance(threshold, bool) or threshold < 0:
            self._problem("store_threshold", f"got {show(threshold)}, expected a whole number not below 0")
        elif threshold >= 2:  # less means no threshold
            self._notes.append(
                f"store_threshold {threshold} is not honoured (nor is max_tracker_size): "
                "a chunk is stored the first time it is computed"
            )

    # ---- tiers -------------------------------------------------------------------------------------------------

    def _secondary_tiers(self) -> None:
        if "secondary_tiers" not in self._raw:
            return
        blocks = self._raw["secondary_tiers"]
        if "tiers" in self._raw:
            self._twice("secondary_tiers", "tiers")
        elif not isinstance(blocks, list | tuple):
            self._problem("secondary_tiers", f"got {show(blocks)}, expected a list")
        else:
            tiers = [self._tier(block, f"secondary_tiers[{index}]") for index, block in enumerate(blocks)]
            self._config["tiers"] = [tier for tier in tiers if tier is not None]

    def _tier(self, block: object, path: str) -> object | None:
        """Our block of one tier; None where it has no counterpart."""
        if not isinstance(block, Mapping):
            return block  # `Settings` says what is wrong with it
        name = block.get("type")
        if "module_path" in block or (isinstance(name, str) and name in IN_TREE_TIERS):
            self._notes.append(
                f"{path} of type {show(name)} is left out: it is a class of the in-tree connector; tiers come from the "
                "entry point group vllm_tiered_offload.tiers"
            )
            return None
        tier = {key: value for key, value in block.items() if key not in TIER_KEYS_DROPPED}
        for key in block:
            if reason := TIER_KEYS_DROPPED.get(key):
                self._notes.append(f"{path}.{key} is not honoured: {reason}")
        if block.get("enable_kv_events") is False:
            self._notes.append(f"{path}.enable_kv_events is not honoured: with KV events on, every tier sends its own")
        return self._fs_tier(tier, path) if name == "fs" else tier

    def _fs_tier(self, tier: dict[str, Any], path: str) -> dict[str, Any]:
        for theirs, ours in FS_KEYS.items():
            if theirs in tier and ours in tier:
                self._twice(f"{path}.{theirs}", ours)
        if "root_dir" not in tier and "root" not in tier:
            self._problem(f"{path}.root_dir", "missing; expected a directory for the chunks")
        return {FS_KEYS.get(key, key): value for key, value in tier.items()}

    # ---- the rest ----------------------------------------------------------------------------------------------

    def _spec(self) -> None:
        name = self._raw.get("spec_name", CPU_SPEC)
        if "spec_module_path" in self._raw or name not in (CPU_SPEC, TIERING_SPEC):
            self._notes.append(
                f"spec_name {show(name)} is not loaded: it is a class of the in-tree connector; "
                "host memory and the tiers named here are used"
            )
        elif name == CPU_SPEC and self._config.get("tiers"):
            self._notes.append(
                f"secondary tiers are used although spec_name is {'' if 'spec_name' in self._raw else 'by default '}"
                f"{CPU_SPEC}, with which the in-tree connector ignores them"
            )

    def _without_counterpart(self) -> None:
        if self._raw.get("canonical_layout"):
            self._notes.append(
                "canonical_layout is not honoured: stored chunks are read by engines of the same parallel sizes only"
            )
        if self._raw.get("backpressure"):
            self._notes.append(f"backpressure is not honoured: {TIER_KEYS_DROPPED['backpressure']}")
        if self._raw.get("self_describing_kv_events") is False:
            self._notes.append("self_describing_kv_events is not honoured: KV events always carry their full payload")


def _whole(value: object) -> object:
    """What the in-tree connector's int() would make of a number that JSON wrote otherwise: 1e9, "32"."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    return value
