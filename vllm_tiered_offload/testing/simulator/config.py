"""What one simulated engine looks like, and the configurations that a run rotates over."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import gcd, lcm
from typing import Any

from vllm_tiered_offload.contract.geometry import ROW_ALIGNMENT, round_up
from vllm_tiered_offload.testing.simulator.chain import WORDS_PER_SLOT

ALL_PINS = {"max_pinned_device_share": 1.0}  # stores in flight may hold the whole device pool
TIER_TYPE = "simulated"  # settings name of the tiers that `tiers.TierControl` makes
TIER_TIMES = {
    "tier_job_timeout": 1.0,
    "breaker_failures": 5,
    "breaker_cooldown": 0.2,
    "promotion_hold": 3.0,
    "drain_timeout": 0.2,
}
# When vLLM calls wait_for_save, by the version that does: 0.30; 0.31 and 0.32; 0.33, where a draft model follows.
SAVES = ("in steps with tokens", "in each step", "after the results")
OURS = ("TieredOffloadConnector", "vllm_tiered_offload.connector.connector")


@dataclass(frozen=True, slots=True)
class SimGroup:
    """One KV group. At most one of `window` (sliding) and `local_span` (chunked local attention), in tokens, and
    `recurrent` (state instead of slots) is set.

    `draft`: layers of an EAGLE or MTP model, whose slots depend on the next token, too (not with `recurrent`).
    `block_factor`: its blocks are that many times as long as `SimConfig.block_size`, and its slots as much smaller, so
    that the blocks of all groups have one size in bytes. `replicated`: every rank holds the same (MLA).
    """

    window: int | None = None
    local_span: int | None = None
    block_factor: int = 1
    recurrent: bool = False
    replicated: bool = False
    draft: bool = False

    @property
    def words_per_slot(self) -> int:
        return WORDS_PER_SLOT // self.block_factor


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One engine. `connector` is (class name, module), None for vLLM without one."""

    depth: int = 1  # batches in flight: 2 = async scheduling
    block_size: int = 4
    num_blocks: int = 24  # device blocks, one of which vLLM keeps as its placeholder
    ranks: int = 1
    layers: int = 2  # of each KV group; the groups' layers share the same tensors
    groups: tuple[SimGroup, ...] = (SimGroup(),)
    speculative_tokens: int = 0  # guesses a step, with groups that have slots
    token_budget: int = 16
    max_num_seqs: int = 6
    max_model_len: int = 512
    blocks_per_chunk: int = 1
    cpu_chunks: int = 64  # rows of the host region
    tiers: int = 0  # in-memory tiers behind the CPU tier
    request_level: bool = False  # the last of them wants every block of a request
    lifecycle: str = "strict"
    log_stats: bool = True  # whether vLLM asks for numbers after each step
    policy: str = "lru"
    offload_prompt_only: bool = False
    kv_role: str = "kv_both"
    load_failure_policy: str = "recompute"  # vLLM's kv_load_failure_policy
    saves: str = "in each step"  # one of SAVES
    neighbour: str | None = None  # None, "async" or "sync": a second connector inside MultiConnector
    neighbour_first: bool = True
    connector: tuple[str, str] | None = OURS
    extra: Mapping[str, Any] = field(default_factory=dict)  # further settings of the connector
    seconds_per_step: float = 0.01

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token position in one layer on one rank, in a group whose block factor is 1."""
        return WORDS_PER_SLOT * 8

    def block_tokens(self, group: int) -> int:
        """Tokens in a device block of a KV group."""
        return self.block_size * self.groups[group].block_factor

    @property
    def has_one_full_group(self) -> bool:
        """Whether a hit is a prefix of one list of chunks, as with full attention alone."""
        [first, *others] = self.groups
        return not (others or first.window or first.local_span or first.recurrent or first.draft)

    @property
    def tokens_ahead(self) -> int:
        """How far behind a chunk's end its key reaches."""
        return self.hash_tokens if any(group.draft for group in self.groups) else 0

    @property
    def hash_tokens(self) -> int:
        """Tokens of one block hash."""
        return gcd(*(self.block_tokens(group) for group in range(len(self.groups))))

    @property
    def hit_tokens(self) -> int:
        """Prefix hits of the device cache are multiples of this."""
        return lcm(*(self.block_tokens(group) for group in range(len(self.groups))))

    @property
    def row_bytes(self) -> int:
        """Bytes of one region row, padding included."""
        chunk_tokens = self.blocks_per_chunk * self.block_size
        slots = 1 if all(group.replicated for group in self.groups) else self.ranks
        return round_up(slots * self.layers * chunk_tokens * self.slot_bytes, ROW_ALIGNMENT)

    @property
    def max_pinned_blocks(self) -> int:
        """Device blocks that stores may hold."""
        share = self.extra.get("max_pinned_device_share", 0.5 if self.connector == OURS else 1.0)
        return int((self.num_blocks - 1) * share)

    def connector_settings(self) -> dict[str, Any]:
        """`kv_connector_extra_config` of the connector under test."""
        return {
            "cpu": {"capacity": self.cpu_chunks * self.row_bytes, "eviction_policy": self.policy},
            "blocks_per_chunk": self.blocks_per_chunk,
            "offload_prompt_only": self.offload_prompt_only,
            "lifecycle": self.lifecycle,
            **(self._tier_settings() if self.tiers else {}),
            **self.extra,
        }

    def _tier_settings(self) -> dict[str, Any]:
        """Times are short: a simulated step is a few hundredths of a second, and now and then some seconds pass."""
        tiers: list[dict[str, Any]] = [{"type": TIER_TYPE} for _ in range(self.tiers)]
        if self.request_level:
            tiers[-1]["request_level"] = True
        return {"tiers": tiers, **TIER_TIMES}

    def setting(self, name: str, default: Any) -> Any:
        """A setting of the connector under test; `default` where this engine does not set it."""
        return self.connector_settings().get(name, default)

    def describe(self) -> str:
        """One line for reports."""
        neighbour = f"{self.neighbour}{'<' if self.neighbour_first else '>'}" if self.neighbour else "none"
        return (
            f"depth={self.depth} block={self.block_size} blocks={self.num_blocks} ranks={self.ranks} "
            f"groups={self._describe_groups()} guesses={self.speculative_tokens} "
            f"chunk={self.blocks_per_chunk} rows={self.cpu_chunks} tiers={self.tiers}{'+' * self.request_level} "
            f"policy={self.policy} prompt_only={self.offload_prompt_only} neighbour={neighbour} {self.lifecycle} "
            f"saves {self.saves}"
        )

    def _describe_groups(self) -> str:
        kinds = [
            f"w{one.window}" if one.window else f"l{one.local_span}" if one.local_span else "fr"[one.recurrent]
            for one in self.groups
        ]
        return "+".join(
            f"{kind}{'=' * one.replicated}{'+1' * one.draft}x{one.block_factor}"
            for kind, one in zip(kinds, self.groups, strict=True)
        )


ONE_GROUP = (SimGroup(),)
LATENT = (SimGroup(replicated=True),)
SEVERAL_GROUPS = (
    (SimGroup(), SimGroup(window=9)),
    (SimGroup(block_factor=2), SimGroup(window=7)),
    (SimGroup(), SimGroup(window=21), SimGroup(window=21)),
    (SimGroup(window=10),),
    (SimGroup(), SimGroup(local_span=16)),
    (SimGroup(), SimGroup(window=12, block_factor=2)),
    (SimGroup(), SimGroup(window=5), SimGroup(local_span=8)),
    (SimGroup(), SimGroup(recurrent=True)),
    (SimGroup(recurrent=True),),
    (SimGroup(recurrent=True), SimGroup(recurrent=True), SimGroup()),
    (SimGroup(), SimGroup(window=6), SimGroup(recurrent=True)),
    (SimGroup(), SimGroup(draft=True)),
    (SimGroup(draft=True),),
    (SimGroup(window=9), SimGroup(draft=True)),
    (SimGroup(), SimGroup(window=14, draft=True)),
    (SimGroup(block_factor=2), SimGroup(draft=True)),
    (SimGroup(), SimGroup(draft=True, block_factor=2)),
)
# The neighbour brings slots, not states.
BESIDE_A_NEIGHBOUR = tuple(groups for groups in SEVERAL_GROUPS if not any(group.recurrent for group in groups))


def rotation() -> Iterator[SimConfig]:
    """Endless: every combination that matters comes up, the rare ones (ranks, neighbour, KV groups) less often."""
    shapes = [(4, 26), (8, 14), (16, 9)]  # (block size, device blocks): about 100 tokens, so that the pool is full
    for step, (depth, chunk, (block_size, num_blocks)) in enumerate(_forever([1, 2], [1, 2, 4], shapes)):
        tiers = (1, 0, 2)[step // 3 % 3]
        # With tiers behind, few enough that chunks leave and come back.
        rows = max(5, (96, 48, 72)[step % 3] // (chunk * block_size)) if tiers else (40, 8, 96)[step % 3]
        # By itself, and beside either kind of neighbour.
        several = step % 10 == 2 or step % 20 in (6, 13)
        choice = SEVERAL_GROUPS if step % 10 == 2 else BESIDE_A_NEIGHBOUR
        groups = choice[step // 10 % len(choice)] if several else (ONE_GROUP, LATENT)[step % 8 == 3]
        has_slots = not any(group.recurrent for group in groups)
        yield SimConfig(
            depth=depth,
            block_size=block_size,
            num_blocks=num_blocks * len(groups),
            groups=groups,
            speculative_tokens=3 * (has_slots and step % 3 == 1),
            ranks=2 if step % 4 == 3 else 1,
            blocks_per_chunk=chunk,
            cpu_chunks=rows * len(groups),
            tiers=tiers,
            request_level=tiers > 0 and step // 6 % 2 == 1,
            lifecycle=("strict", "tolerant")[step // 2 % 2],
            log_stats=step % 3 == 0,
            policy=("lru", "arc")[step // 2 % 2],
            offload_prompt_only=step % 5 == 4,
            saves=SAVES[step % 7 % 3],
            neighbour=(None, "async", None, "sync", "async")[step % 5],
            neighbour_first=step % 2 == 0,
            extra=(ALL_PINS, {}, {"min_load_tokens": 12, "copy_threads": 3}, {"copy_threads": 2})[step // 3 % 4],
            seconds_per_step=(0.01, 0.05)[step // 4 % 2],
        )


def _forever(*axes: list[Any]) -> Iterator[tuple[Any, ...]]:
    combinations = list(product(*axes))
    # A stride coprime to the count visits all of them and changes every axis from one episode to the next.
    stride = next(s for s in (7, 11, 13, 5) if len(combinations) % s)
    index = 0
    while True:
        yield combinations[index % len(combinations)]
        index += stride
