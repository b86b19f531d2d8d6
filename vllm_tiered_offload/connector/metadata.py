"""`contract.messages` in the envelopes that vLLM carries between the scheduler process and the workers."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from vllm_tiered_offload.contract.messages import StepMessage, WorkerReport


@dataclass
class TieredOffloadMetadata(KVConnectorMetadata):
    """Scheduler half -> worker half."""

    message: StepMessage = field(default_factory=StepMessage)


@dataclass
class TieredOffloadWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker half -> scheduler half; vLLM folds the ranks of one step together through `aggregate`."""

    report: WorkerReport = field(default_factory=WorkerReport)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "TieredOffloadWorkerMetadata":
        assert isinstance(other, TieredOffloadWorkerMetadata)
        return TieredOffloadWorkerMetadata(self.report.merge(other.report))
