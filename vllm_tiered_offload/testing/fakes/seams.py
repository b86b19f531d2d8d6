"""Time and threads that a test moves by hand."""

from collections import deque
from collections.abc import Callable


class ManualClock:
    """A `contract.seams.Clock` that stands still until told to move."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds


class ManualExecutor:
    """A `contract.seams.JobExecutor` whose jobs run when the test says so, in any order it likes."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()  # submitted, not yet run

    def submit(self, job: Callable[[], None], /) -> None:
        self.jobs.append(job)

    def run_next(self, index: int = 0) -> None:
        """Run the job at `index` of those waiting (0 = oldest)."""
        job = self.jobs[index]
        del self.jobs[index]
        job()

    def run_all(self) -> int:
        """Run what waits now, oldest first; how many ran."""
        count = len(self.jobs)
        for _ in range(count):
            self.run_next()
        return count

    def shutdown(self, wait: bool = True) -> None:
        if wait:
            self.run_all()
