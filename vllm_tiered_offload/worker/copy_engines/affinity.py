"""Cores for copy threads.

vLLM's CPU backend binds OpenMP threads to cores, and the runtime binds the main thread with them, to one core. A thread
started from there inherits that one core, so a copy would take turns with the model's first compute thread while all
others wait for it at the next barrier. vLLM leaves a core free for everything else; a copy thread may go there.
"""

import os
from concurrent.futures import ThreadPoolExecutor

from vllm_tiered_offload.contract.seams import JobExecutor


def leave_inherited_core() -> None:
    """Let the calling thread run wherever the parent process may: its mask is the one the engine was started with.

    Widens the mask and never fails; where the system has no masks, or refuses, nothing changes.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    try:
        # 0 is the calling thread; a process id is that process's main thread, which the engine's process leaves alone.
        os.sched_setaffinity(0, os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid()))
    except OSError:
        return


def copy_executor(threads: int) -> JobExecutor:
    """`threads` threads for copies, not bound to the core of the thread that made them."""
    return ThreadPoolExecutor(threads, thread_name_prefix="kv-copy", initializer=leave_inherited_core)
