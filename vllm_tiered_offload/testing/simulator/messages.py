"""Finds our messages inside vLLM's metadata objects, whoever wraps them."""

from typing import Any

from vllm_tiered_offload.contract.messages import StepMessage, WorkerReport


def step_message(metadata: Any) -> StepMessage | None:
    """The StepMessage inside connector metadata (directly, as an attribute, or in a MultiConnector's child)."""
    return _find(metadata, StepMessage)


def worker_report(metadata: Any) -> WorkerReport | None:
    """The WorkerReport inside worker metadata."""
    return _find(metadata, WorkerReport)


def _find(obj: Any, kind: type) -> Any:
    if obj is None or isinstance(obj, kind):
        return obj
    children = getattr(obj, "metadata", None)
    if isinstance(children, tuple):
        return next((found for child in children if (found := _find(child, kind)) is not None), None)
    names = getattr(type(obj), "__slots__", ()) or vars(obj)
    return next((value for name in names if isinstance(value := getattr(obj, name, None), kind)), None)
