"""The worker side: one connector half per rank, called as vLLM's model runner calls it."""

import pickle
import threading
from collections.abc import Callable
from typing import Any

from vllm_tiered_offload.testing.simulator.model_runner import SimModelRunner


class BarrierGroup:
    """A rank group inside one process: every rank makes its collective calls on a thread of its own."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = size
        self._board = board
        self._barrier = barrier

    @classmethod
    def make(cls, size: int, timeout: float = 30.0) -> "list[BarrierGroup]":
        """One group, seen from each of its ranks."""
        board: list[Any] = [None] * size
        barrier = threading.Barrier(size, timeout=timeout)
        return [cls(rank, size, board, barrier) for rank in range(size)]

    def all_gather(self, obj: Any) -> list[Any]:
        """Every rank's object, by rank (pickled on the way, as between processes)."""
        self._board[self.rank] = pickle.dumps(obj)
        self._barrier.wait()
        gathered = [pickle.loads(item) for item in self._board]
        self._barrier.wait()
        return gathered

    def broadcast(self, obj: Any) -> Any:
        """Rank 0's object."""
        return self.all_gather(obj)[0]


def in_threads(jobs: list[Callable[[], None]]) -> None:
    """Run one job per rank at the same time; the first error is raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class RankWorker:
    """One rank's connector half inside vLLM's model runner."""

    def __init__(self, connector: Any, rank: int, runner: SimModelRunner) -> None:
        self.connector = connector
        self.rank = rank
        self._layers = [name for names in runner.layer_names() for name in names]
        self.tensors = runner.tensors(rank)
        self._load_after_forward = True
        self._saves = runner.config.saves
        self._has_tokens = False

    def register(self) -> None:
        """Hand over the KV cache. Ranks agree on the host region in here, so all of them must do it at once."""
        self.connector.register_kv_caches(self.tensors)

    def release(self) -> None:
        """Before the KV cache loses its memory. Only newer versions of vLLM tell the connector."""
        tell = getattr(self.connector, "unregister_kv_caches", None)
        if tell is not None:
            tell()

    def restore(self) -> None:
        """The KV cache has memory again."""
        tell = getattr(self.connector, "restore_kv_caches", None)
        if tell is not None:
            tell()

    def before_forward(self, metadata: bytes, sync_loads: bool) -> None:
        """Everything up to the forward pass."""
        message = pickle.loads(metadata)
        self.connector.handle_preemptions(message)
        self.connector.bind_connector_metadata(message)
        self._load_after_forward = not sync_loads
        self._has_tokens = False
        if sync_loads:
            self.connector.start_load_kv(None)

    def during_forward(self) -> None:
        """What each attention layer calls, in a step with tokens."""
        self._has_tokens = True
        for name in self._layers:
            self.connector.wait_for_layer_load(name)
            self.connector.save_kv_layer(name, self.tensors[name], None)

    def after_forward(self, finished_req_ids: set[str]) -> Any:
        """Everything after the forward pass; the KVConnectorOutput."""
        from vllm.v1.outputs import KVConnectorOutput

        connector = self.connector
        output = KVConnectorOutput()
        if self._load_after_forward:
            connector.start_load_kv(None)
        if self._saves == "in each step" or (self._saves == "in steps with tokens" and self._has_tokens):
            connector.wait_for_save()
        results = connector.get_transfer_results(finished_req_ids)
        output.finished_sending = results.finished_sending
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        if self._saves == "after the results":
            connector.wait_for_save()
        connector.clear_connector_metadata()
        return pickle.loads(pickle.dumps(output))
