"""Seams that tests take in hand: time and threads."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float: ...


monotonic: Clock = time.monotonic


class JobExecutor(Protocol):
    """Runs a job somewhere else, soon. A test's executor runs it when the test says so."""

    def submit(self, job: Callable[[], None], /) -> object: ...

    def shutdown(self, wait: bool = True) -> None: ...


def thread_executor(threads: int, name: str) -> JobExecutor:
    """The executor of production: `threads` daemon-like threads named after `name`."""
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
