"""What one simulated engine looks like, and the configurations that a run rotates over."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
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
OURS = ("TieredOffloadConnector", "vllm_tiered_offload.connector.connector")


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One engine. `connector` is (class name, module), None for vLLM without one."""

    depth: int = 1  # batches in flight: 2 = async scheduling
    block_size: int = 4
    num_blocks: int = 24  # device blocks, one of which vLLM keeps as its placeholder
    ranks: int = 1
    layers: int = 2
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
    neighbour: str | None = None  # None, "async" or "sync": a second connector inside MultiConnector
    neighbour_first: bool = True
    connector: tuple[str, str] | None = OURS
    extra: Mapping[str, Any] = field(default_factory=dict)  # further settings of the connector
    seconds_per_step: float = 0.01

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token position in one layer on one rank."""
        return WORDS_PER_SLOT * 8

    @property
    def row_bytes(self) -> int:
        """Bytes of one region row, padding included."""
        chunk_tokens = self.blocks_per_chunk * self.block_size
        return round_up(self.ranks * self.layers * chunk_tokens * self.slot_bytes, ROW_ALIGNMENT)

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
            f"chunk={self.blocks_per_chunk} rows={self.cpu_chunks} tiers={self.tiers}{'+' * self.request_level} "
            f"policy={self.policy} prompt_only={self.offload_prompt_only} neighbour={neighbour} {self.lifecycle}"
        )


def rotation() -> Iterator[SimConfig]:
    """Endless: every combination that matters comes up, the rare ones (ranks, neighbour) less often."""
    shapes = [(4, 26), (8, 14), (16, 9)]  # (block size, device blocks): about 100 tokens, so that the pool is full
    for step, (depth, chunk, (block_size, num_blocks)) in enumerate(_forever([1, 2], [1, 2, 4], shapes)):
        tiers = (1, 0, 2)[step // 3 % 3]
        yield SimConfig(
            depth=depth,
            block_size=block_size,
            num_blocks=num_blocks,
            ranks=2 if step % 4 == 3 else 1,
            blocks_per_chunk=chunk,
            # With tiers behind, few enough that chunks leave and come back.
            cpu_chunks=max(5, (96, 48, 72)[step % 3] // (chunk * block_size)) if tiers else (40, 8, 96)[step % 3],
            tiers=tiers,
            request_level=tiers > 0 and step // 6 % 2 == 1,
            lifecycle=("strict", "tolerant")[step // 2 % 2],
            log_stats=step % 3 == 0,
            policy=("lru", "arc")[step // 2 % 2],
            offload_prompt_only=step % 5 == 4,
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
