"""Promotion planning and holds: pure decisions over plain data, and the leases that keep promoted rows.

V2: promotions leave headroom for the stores of running requests; a promoted row stays until the request that asked for
it was admitted, ended, or a hold time passed; a full pool means miss, not "later".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from vllm_tiered_offload.contract.jobs import LookupResult
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import Lease, PrimaryTier
from vllm_tiered_offload.tiers.guard import TierGuard


def plan_promotion(results: Sequence[LookupResult], found: Mapping[int, TierGuard], room: int) -> list[int]:
    """The indices of a looked-up prefix that are worth a promotion.

    `found[i]` is the tier that has key i. Only what continues the prefix without a gap is promoted, as far as `room`
    rows go: keys that are present or coming are passed over, an unknown or missing one ends it.
    """
    if len(found) == len(results):  # by far the most frequent case: the loop, spelt out
        return list(range(min(len(results), room)))
    promote: list[int] = []
    for index, result in enumerate(results):
        if index in found:
            if len(promote) == room:
                break
            promote.append(index)
        elif result not in (LookupResult.HIT, LookupResult.HIT_PENDING):
            break
    return promote


def runs_of(
    promote: Sequence[int], found: Mapping[int, TierGuard], limit: int
) -> Iterator[tuple[TierGuard, list[int]]]:
    """Neighbours that one tier has, at most `limit` together, in order."""
    for guard, neighbours in groupby(promote, found.__getitem__):
        while run := list(islice(neighbours, limit)):
            yield guard, run


@dataclass(slots=True)
class _Hold:
    req_id: str
    lease: Lease
    until: float


class Holds:
    """Leases on promoted rows for the requests that asked for them."""

    def __init__(self, primary: PrimaryTier, hold_seconds: float) -> None:
        self._primary = primary
        self._seconds = hold_seconds
        self._holds: dict[str, list[_Hold]] = {}  # by request id; no empty lists

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, req_id: str, keys: Sequence[OffloadKey], now: float) -> None:
        """Keep `keys`, which have just become readable."""
        lease = self._primary.lease(keys)
        if lease.keys:
            self._holds.setdefault(req_id, []).append(_Hold(req_id, lease, now + self._seconds))

    def release(self, req_id: str) -> None:
        """The request was admitted or ended."""
        for hold in self._holds.pop(req_id, ()):
            self._primary.release(hold.lease)

    def release_expired(self, now: float) -> None:
        """Let go of what nobody came for."""
        for req_id in [req_id for req_id, holds in self._holds.items() if any(hold.until <= now for hold in holds)]:
            kept = []
            for hold in self._holds.pop(req_id):
                if hold.until <= now:
                    self._primary.release(hold.lease)
                else:
                    kept.append(hold)
            if kept:
                self._holds[req_id] = kept

    def release_all(self) -> None:
        """After a reset: nobody wants them any more."""
        for req_id in list(self._holds):
            self.release(req_id)
