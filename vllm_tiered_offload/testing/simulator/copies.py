"""Copies that run when the simulation says so, and fail when it says so."""

import random
from collections.abc import Callable
from typing import Any

from vllm_tiered_offload.contract.seams import JobExecutor

Task = Callable[[], None]


class CopyFault(RuntimeError):
    """The failure that the simulation injects into a copy."""


class CopyControl:
    """The copy threads of one engine, of every rank, in one place.

    `held` keeps their tasks waiting until `run`; otherwise `end_of_step` runs all of them, after the forward pass.
    `faults` and `submit_faults` are budgets: that many of the next copies fail half way, or are not even accepted.
    """

    running: "CopyControl | None" = None  # the control whose task runs right now, in the whole process

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: list[Task] = []  # submitted, not yet run, oldest first
        self.held = False
        self.faults = 0
        self.submit_faults = 0
        install_faults()

    def __len__(self) -> int:
        return len(self._waiting)

    def executor(self) -> JobExecutor:
        """A new executor whose tasks wait here."""
        return _Executor(self)

    def put(self, task: Task) -> None:
        """A task arrives."""
        if self.submit_faults:
            self.submit_faults -= 1
            raise CopyFault("simulated: the copy is not accepted")
        self._waiting.append(task)

    def run(self, count: int | None = None, shuffle: bool = False, newest_first: bool = False) -> int:
        """Run `count` of the waiting tasks (None: until none waits), oldest first unless told otherwise; how many ran.

        A task may put the next one in line when it ends.
        """
        ran = 0
        while self._waiting and (count is None or ran < count):
            task = self._waiting.pop(self._rng.randrange(len(self._waiting)) if shuffle else -newest_first)
            CopyControl.running = self
            try:
                task()
            finally:
                CopyControl.running = None
            ran += 1
        return ran

    def end_of_step(self) -> None:
        """Called by the engine after each worker step."""
        if not self.held:
            self.run()

    def no_more_faults(self) -> None:
        """From now on every copy succeeds."""
        self.faults = self.submit_faults = 0

    def take_fault(self) -> bool:
        """Whether the copy that runs now must fail."""
        if not self.faults:
            return False
        self.faults -= 1
        return True


class _Executor:
    def __init__(self, control: CopyControl) -> None:
        self._control = control

    def submit(self, task: Task, /) -> None:
        self._control.put(task)

    def shutdown(self, wait: bool = True) -> None:
        if wait:
            self._control.run()


def install_faults() -> None:
    """Let the host engine's copies fail half way when the running `CopyControl` says so. Once per process."""
    from vllm_tiered_offload.worker.copy_engines.host_copy import HostGroupCopier

    copy: Callable[..., int] = HostGroupCopier.copy
    if getattr(copy, "may_fail", False):
        return

    def copy_or_fail(self: Any, direction: Any, plan: Any, start: int, stop: int) -> int:
        control = CopyControl.running
        if control is None or not control.take_fault():
            return copy(self, direction, plan, start, stop)
        copy(self, direction, plan, start, start + (stop - start) // 2)
        raise CopyFault("simulated: the copy broke off")

    copy_or_fail.may_fail = True  # type: ignore[attr-defined]
    HostGroupCopier.copy = copy_or_fail  # type: ignore[method-assign]
