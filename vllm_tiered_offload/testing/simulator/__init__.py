"""vLLM's real Scheduler and KVCacheManager with a connector, both halves in one process, no accelerator and no model.

Theory of operation
-------------------
One `Simulation` is one engine: vLLM's scheduler (sync, or async with two batches in flight), one `RankWorker` per
rank that calls the connector's worker half exactly as vLLM's model runner does, and a `SimModelRunner` in place of the
model. The runner keeps KV in real CPU tensors. Each slot holds bytes derived from its token, from the slot before it
and from the weight epoch; a step reads every slot that it would attend to and compares all bytes. So a block with
another position's, another request's, another rank's or an older weight version's bytes cannot go unnoticed.

Copies run when the simulation says so (`CopyControl`), in any order, and can be made to fail. So do the jobs of the
tiers behind the CPU tier (`TierControl`): in-memory tiers over the engine's real region rows, made by the connector
from its settings. Time is a `ManualClock`.

`Checker`s watch the messages between the halves, vLLM's block pool, the connector's hooks and the border between each
guard and its tier (`TierWatch`) from outside, one per invariant of DESIGN. A broken invariant raises `Violation` with
the story of the request.

A run is chaos first (`Workload`), then the faults stop and everything must converge to an empty state.

Importing this package imports no vLLM; `engine` does.
"""
