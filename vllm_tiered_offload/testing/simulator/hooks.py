"""Watches the scheduler side's hooks: who was called with what, and whether it touched a file or a socket."""

from collections.abc import Callable
from typing import Any

from vllm_tiered_offload.testing.simulator import guard

# Everything vLLM's scheduler calls while the engine runs (shutdown and the constructor may do I/O).
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "get_loaded_kv_cache_group_ids",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "has_pending_block_frees",
    "take_events",
    "get_kv_connector_stats",
    "reset_cache",
)

OnHook = Callable[[str, tuple[Any, ...], Any], None]
OnRaise = Callable[[str, Exception], None]
OnIo = Callable[[str, str], None]


def watch_hooks(connector: Any, on_hook: OnHook, on_raise: OnRaise, on_io: OnIo) -> None:
    """Wrap the hooks of this one instance."""
    for name in HOOKS:
        hook = getattr(connector, name, None)
        if hook is not None:
            setattr(connector, name, _watched(name, hook, on_hook, on_raise, on_io))


def _watched(
    name: str, hook: Callable[..., Any], on_hook: OnHook, on_raise: OnRaise, on_io: OnIo
) -> Callable[..., Any]:
    def watched(*args: Any) -> Any:
        guard.arm()
        try:
            result = hook(*args)
            if name == "take_events":  # a generator: its body runs while it is read
                result = list(result)
        except Exception as error:
            on_raise(name, error)
            raise
        finally:
            call = guard.disarm()
            if call is not None:
                on_io(name, call)
        on_hook(name, args, result)
        return result

    return watched
