"""A fake device that knows what happens before what, and a copy engine on it.

Theory of operation. An operation is launched on a stream, with the places it reads and writes. It happens after the
operation launched before it on the same stream, after those that it was told to wait for, and after everything the host
knew to be complete when it launched it (`observe`). Two operations that touch one place, one of them writing, must be
ordered by these arrows; if they are not, a real device may run them in either order, so the driver notes a violation at
the launch of the second, whatever order the test then runs them in. `check` raises if there is any.

Operations run when the test says so (`run`, `run_all`), in any order that the arrows allow. Nothing runs by itself.

    places:   ("block", device block id)    ("row", row index, sub block)

What it does not check: that a place is worth reading, and accesses that are not announced to it.
"""

import random
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_tiered_offload.worker.copy_engines.base import ComputeEvent, CopyEngine, CopyResult, Direction
from vllm_tiered_offload.worker.copy_engines.device import DeviceEvent
from vllm_tiered_offload.worker.copy_engines.host_copy import HostGroupCopier
from vllm_tiered_offload.worker.copy_plan import CopyPlan
from vllm_tiered_offload.worker.layout import GroupLayout

Place = Hashable
COMPUTE = "compute"


def block(block_id: int) -> Place:
    """The place of a device block (all groups and layers of it)."""
    return ("block", block_id)


def row(row_id: int, sub_block: int) -> Place:
    """The place of one block's bytes inside a region row."""
    return ("row", row_id, sub_block)


class UnorderedAccess(AssertionError):
    """Two operations touch one place, one writes, and nothing orders them."""


@dataclass(slots=True, eq=False)
class Operation:
    """One kernel or copy. `ancestors` are the operations it happens after, without those the host has observed."""

    name: str
    reads: frozenset[Place]
    writes: frozenset[Place]
    action: Callable[[], None] | None
    ancestors: frozenset["Operation"]
    done: bool = False
    observed: bool = False  # the host knows that it is done

    def __repr__(self) -> str:
        return self.name


@dataclass(slots=True)
class _Accesses:
    """Operations that touched a place and are not observed: the last writer and the readers since."""

    writer: Operation | None = None
    readers: list[Operation] = field(default_factory=list)


class FakeDriver:
    """Streams, operations and the order between them. One thread."""

    def __init__(self) -> None:
        self.pending: list[Operation] = []  # launched, not run, in launch order
        self.violations: list[str] = []
        self._last: dict[Hashable, Operation] = {}  # the youngest operation of each stream
        self._accesses: dict[Place, _Accesses] = {}

    def launch(
        self,
        stream: Hashable | None,
        name: str,
        reads: Iterable[Place] = (),
        writes: Iterable[Place] = (),
        action: Callable[[], None] | None = None,
        waits: Iterable[Operation] = (),
    ) -> Operation:
        """Put an operation on a stream; it runs later. Notes a violation if it is not ordered against an older one.

        stream None: one that nothing else is on, so only `waits` and what the host has observed come before it.
        """
        before = None if stream is None else self._last.get(stream)
        direct = [op for op in (before, *waits) if op is not None and not op.observed]
        ancestors = frozenset(direct).union(*(op.ancestors for op in direct))
        op = Operation(
            name, frozenset(reads), frozenset(writes), action, frozenset(a for a in ancestors if not a.observed)
        )
        self._note_accesses(op)
        if stream is not None:
            self._last[stream] = op
        self.pending.append(op)
        return op

    def compute(
        self,
        name: str,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        action: Callable[[], None] | None = None,
    ) -> Operation:
        """A kernel on the compute stream that reads and writes device blocks, given by id."""
        return self.launch(COMPUTE, name, map(block, reads), map(block, writes), action)

    def last(self, stream: Hashable) -> Operation | None:
        """The youngest operation of a stream, None before the first."""
        return self._last.get(stream)

    def last_compute(self) -> Operation | None:
        """The youngest kernel, None before the first."""
        return self.last(COMPUTE)

    def runnable(self) -> list[Operation]:
        """Pending operations whose ancestors have run, in launch order."""
        return [op for op in self.pending if all(ancestor.done for ancestor in op.ancestors)]

    def run(self, op: Operation) -> None:
        """Run a pending operation now. Raises RuntimeError when an ancestor has not run."""
        missing = [ancestor.name for ancestor in op.ancestors if not ancestor.done]
        if missing:
            raise RuntimeError(f"{op} has to wait for {', '.join(sorted(missing))}")
        self.pending.remove(op)
        if op.action is not None:
            op.action()
            op.action = None
        op.done = True

    def run_all(self, order: random.Random | None = None) -> None:
        """Run everything pending: launch order, or any permitted order that `order` picks."""
        while self.pending:
            ready = self.runnable()
            self.run(order.choice(ready) if order else ready[0])

    def synchronize(self, op: Operation) -> None:
        """The host waits for `op`: its ancestors and it run, and the host knows."""
        for waiting in [other for other in self.pending if other in op.ancestors]:
            self.run(waiting)
        if not op.done:
            self.run(op)
        self.observe(op)

    def observe(self, op: Operation) -> None:
        """The host has learnt that a done operation is done: everything launched from now on happens after it.

        Tell it of kernels too (once a step's output is known), or the list of ancestors grows without end.
        """
        if not op.done:
            raise RuntimeError(f"{op} has not run, so nobody can know that it is done")
        for known in (op, *op.ancestors):
            known.observed = True
            for place in known.reads | known.writes:
                self._forget(place, known)
            known.ancestors = frozenset()

    def check(self) -> None:
        """Raise UnorderedAccess if any launch was not ordered."""
        if self.violations:
            raise UnorderedAccess("\n".join(self.violations))

    def _note_accesses(self, op: Operation) -> None:
        for place in op.reads | op.writes:
            seen = self._accesses.setdefault(place, _Accesses())
            rivals = [seen.writer] if seen.writer else []
            if place in op.writes:
                rivals += seen.readers
            for rival in rivals:
                if rival not in op.ancestors:
                    self.violations.append(f"{op} and {rival} both touch {place}, and nothing orders them")
            if place in op.writes:
                self._accesses[place] = _Accesses(writer=op)
            else:
                seen.readers.append(op)

    def _forget(self, place: Place, op: Operation) -> None:
        seen = self._accesses.get(place)
        if seen is None:
            return
        seen.writer = None if seen.writer is op else seen.writer
        seen.readers = [reader for reader in seen.readers if reader is not op]
        if seen.writer is None and not seen.readers:
            del self._accesses[place]


class FakeEvent(DeviceEvent):
    """A point in one of the driver's streams."""

    def __init__(self, driver: FakeDriver, op: Operation | None) -> None:
        self._driver = driver
        self.op = op

    def is_complete(self) -> bool:
        """The host learns it, if it is."""
        if self.op is not None and self.op.done:
            self._driver.observe(self.op)
        return self.op is None or self.op.done

    def synchronize(self) -> None:
        if self.op is not None:
            self._driver.synchronize(self.op)

    def seconds_since(self, earlier: DeviceEvent) -> float:
        return 1.0 if earlier.is_complete() else 0.0


class FakeCopyEngine(CopyEngine):
    """A copy engine whose copies are operations of a FakeDriver, each on a stream of its own.

    layouts and slots: as for a real engine; left out, copies move no bytes and only their order is checked.
    ignore_events: directions whose event is forgotten, to show that a test notices (never set it otherwise).

    Faults, set by the test at any time: `submit_errors` and `poll_errors` are raised by the next calls, `job_errors`
    (job id -> text) makes that job end as failed without moving bytes.
    """

    def __init__(
        self,
        driver: FakeDriver,
        layouts: Sequence[GroupLayout] = (),
        slots: np.ndarray | None = None,
        blocks_per_chunk: int = 1,
        ignore_events: Collection[Direction] = (),
    ) -> None:
        self.driver = driver
        self.submit_errors: list[Exception] = []
        self.poll_errors: list[Exception] = []
        self.job_errors: dict[int, str] = {}
        self.copies: dict[int, Operation] = {}  # job id -> its copy, until polled
        self._ignore_events = ignore_events
        self._unpolled: dict[int, tuple[Direction, int]] = {}  # job id -> direction, bytes
        self._copiers: dict[int, HostGroupCopier] = {}
        self._closed = False
        if slots is not None:
            self._copiers = {layout.group_idx: HostGroupCopier(layout, slots, blocks_per_chunk) for layout in layouts}

    def describe(self) -> str:
        return "fake"

    def record_compute_event(self) -> FakeEvent:
        return FakeEvent(self.driver, self.driver.last_compute())

    def submit(
        self, job_id: int, direction: Direction, plans: Sequence[CopyPlan], after: ComputeEvent | None = None
    ) -> None:
        if self.submit_errors:
            raise self.submit_errors.pop(0)
        if self._closed:
            raise RuntimeError("the copy engine is shut down")
        waits = [after.op] if isinstance(after, FakeEvent) and direction not in self._ignore_events else []
        blocks = {block(int(b)) for plan in plans for b in plan.device_blocks}
        rows = {row(int(r), int(s)) for plan in plans for r, s in zip(plan.rows, plan.sub_blocks, strict=True)}
        reads, writes = (blocks, rows) if direction is Direction.STORE else (rows, blocks)
        self.copies[job_id] = self.driver.launch(
            None,
            f"{direction.value} {job_id}",
            reads,
            writes,
            lambda: self._move(job_id, direction, plans),
            [op for op in waits if op is not None],
        )
        self._unpolled[job_id] = (direction, 0)

    def poll(self) -> list[CopyResult]:
        if self.poll_errors:
            raise self.poll_errors.pop(0)
        results = []
        for job_id in [job_id for job_id, op in self.copies.items() if op.done]:
            direction, num_bytes = self._unpolled.pop(job_id)
            self.driver.observe(self.copies.pop(job_id))
            results.append(CopyResult(job_id, direction, self.job_errors.pop(job_id, None), num_bytes, 0.0))
        return results

    def wait(self, timeout: float) -> bool:
        """Runs what it waits for, unless it only asks (`timeout` 0)."""
        if timeout > 0:
            for op in list(self.copies.values()):
                self.driver.synchronize(op)
        return all(op.done for op in self.copies.values())

    def shutdown(self, timeout: float) -> bool:
        self._closed = True
        return self.wait(timeout)

    def _move(self, job_id: int, direction: Direction, plans: Sequence[CopyPlan]) -> None:
        if job_id in self.job_errors:
            return
        moved = sum(
            self._copiers[plan.group_idx].copy(direction, plan, 0, plan.num_blocks)
            for plan in plans
            if plan.num_blocks and plan.group_idx in self._copiers
        )
        self._unpolled[job_id] = (direction, moved)
