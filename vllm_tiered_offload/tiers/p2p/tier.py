"""The peer tier.

Theory of operation
- Two threads do all I/O: one serves rows to peers, one pulls rows from them. The scheduler thread answers from memory;
  what it wants goes to the puller as a command, what came of it comes back through a queue that is emptied at the
  beginning of each call. One lock covers this state, because drain, reset and shutdown come from another thread; it is
  never held over I/O.
- Nothing is stored: a chunk that is offered stays in host memory, and from then on peers may be told of it. Only what
  was offered may leave the process (D5), so a lease is taken on nothing else.
- A request's unknown keys are one question, put to all its peers at once. While a part of a lookup is being asked for,
  all of it is RETRY: the whole prefix then comes in one go. The first key is asked for alone, because the hierarchy
  looks it up alone; so a prompt that nobody has costs one round trip.
- A crowd that wants one prefix asks for it once: what another request asks for, or was promised, is RETRY, until that
  one loads it and it is on its way to host memory for all.
- Where one engine computes a prompt for another one (`remote_decoder` in its request, `remote_prefiller` in the other
  one's), the first shares every chunk of it, and the second asks again for what is not there yet, for a while.
- What a peer has is promised to us for a while. A load uses up its promises; keys without one are asked for first.
- After a reset the weights may be new, which no fingerprint tells: nothing is shared and nothing pulled any more,
  unless `keep_on_reset`. Jobs under way end as failed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.contract.geometry import RegionGeometry
from vllm_tiered_offload.contract.jobs import (
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
)
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.managers import RowLeases, SecondaryTierManager
from vllm_tiered_offload.contract.seams import Clock, monotonic
from vllm_tiered_offload.settings import show, validate_block
from vllm_tiered_offload.tiers.expiring_keys import ExpiringKeys
from vllm_tiered_offload.tiers.p2p.bounded_log import BoundedLog
from vllm_tiered_offload.tiers.p2p.client import Ask, Finish, Forget, Know, Outcome, PeerClient, Pull
from vllm_tiered_offload.tiers.p2p.directory import PeerDirectory, Resolved, Resolver
from vllm_tiered_offload.tiers.p2p.instructions import Address, Answered, JobEnded, Source, Wanted
from vllm_tiered_offload.tiers.p2p.knowledge import Claims, RequestKnowledge
from vllm_tiered_offload.tiers.p2p.leases import PromiseLimits, Promises
from vllm_tiered_offload.tiers.p2p.messages import MAX_KEY_BYTES, MAX_KEYS, Hello
from vllm_tiered_offload.tiers.p2p.server import PeerServer
from vllm_tiered_offload.tiers.p2p.serving import Owner, greeting
from vllm_tiered_offload.tiers.p2p.settings import P2pTierSettings

logger = logging.getLogger(__name__)

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY

_BLOCK_LEVEL = RequestOffloadingContext()
_REQUEST_LEVEL = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)

ABSENT_SECONDS = 5.0  # how long a request believes that nobody has a chunk: longer than any scheduling step
HANDOVER_PAUSE = 0.01  # between two questions for a chunk that is being computed elsewhere
SHUN_SECONDS = 10.0  # how long a chunk whose bytes were wrong is not asked for again
SHUTDOWN_SECONDS = 2.0  # for each of the two threads
ROUNDS_A_LOAD = 32  # how often a load asks; each time some load of these chunks gets its promises
OFFERED_KEYS_A_ROW = 4  # keys that are remembered as offered, for each row of the region

# Of `kv_transfer_params`. The first two name a peer by `remote_host` and `remote_port` (or `host` and `port`).
REMOTE_SOURCE = "remote_kv_source"
REMOTE_PREFILLER = "remote_prefiller"
REMOTE_DECODER = "remote_decoder"


@dataclass(slots=True, eq=False)
class _Load:
    """A load without a result. `number` is its own: a job id may come twice."""

    number: int
    job: JobMetadata
    request: RequestKnowledge
    epoch: int
    rounds: int = 0  # that were begun for it
    pulled: bool = False  # handed to the puller; before that, some of its keys are still asked for


class P2pTier(SecondaryTierManager):
    """Secondary tier over the memory of other engines. Never raises because of a peer."""

    medium = "p2p"

    def __init__(self, settings: P2pTierSettings, *, engine_id: str, clock: Clock = monotonic) -> None:
        self.settings = settings
        self._engine_id = engine_id
        self._clock = clock
        self._log = BoundedLog(logger, clock)
        self._lock = threading.RLock()
        self._outcomes: deque[Outcome | Resolved] = deque()  # told by the puller and the resolver, not taken in
        self._news = threading.Event()  # set with each of them
        self._client: PeerClient | None = None
        self._server = PeerServer(settings, engine_id, clock=clock)
        self._promises: Promises | None = None  # of the server
        self._directory = PeerDirectory(Address(peer.host, peer.port) for peer in settings.peers)
        self._resolver: Resolver | None = None
        self._names_until = 0.0  # until then requests wait for the first look at the names (clock)
        self._rows: Sequence[memoryview] = ()
        self._geometry: RegionGeometry | None = None
        self._own: Hello | None = None
        # What may be promised to peers, oldest offer first: at most OFFERED_KEYS_A_ROW for each row. The server's
        # thread reads it; a key that is not in it any more is not promised, that is all.
        self._offered: dict[OffloadKey, None] = {}
        self._numbers = count(1)  # for requests on the wire, and for loads
        # Announced requests.
        self._requests: dict[str, RequestKnowledge] = {}
        # Those that have asked, by their number on the wire, until they have finished and their last load has ended.
        self._by_number: dict[int, RequestKnowledge] = {}
        self._loads: dict[int, _Load] = {}  # without a result, by number
        self._results: list[JobResult] = []  # not taken
        self._shunned = ExpiringKeys(SHUN_SECONDS, clock)
        self._absent = ExpiringKeys(settings.lookup_cache, clock)  # what none of all peers has
        self._claims = Claims(settings.lookup_timeout)
        self._epoch = 0  # counts resets
        self._off = False  # after a reset or shutdown: nothing is shared or pulled
        self._stale = False  # commands were submitted since the last wake

    @classmethod
    def from_settings(
        cls,
        raw: Mapping[str, Any],
        path: str = "tiers[0]",
        *,
        engine_id: str,
        events: bool = False,  # noqa: ARG003
        clock: Clock = monotonic,
    ) -> Self:
        """From the tier's own settings block (without `type`). It listens at once, and serves when there is something.

        There are no residency events: what a peer has is the peer's to tell. Raises SettingsError, one line for each
        mistake, each beginning with `path`.
        """
        tier = cls(validate_block(P2pTierSettings, raw, path), engine_id=engine_id, clock=clock)
        tier._server.start()
        return tier

    @property
    def port(self) -> int | None:
        """Where peers reach this engine, once it listens."""
        return self._server.port

    def bind_region(self, rows: Sequence[memoryview], geometry: RegionGeometry, fingerprint: Fingerprint) -> None:
        self._rows, self._geometry = rows, geometry
        self._own = greeting(fingerprint, geometry, self._engine_id)
        if self.settings.peers and not self._off:
            self._client = PeerClient(
                self.settings, self._own, rows, self._tell, is_myself=self._is_myself, clock=self._clock
            )
            self._client.submit(Know(dict(self._directory.entry_of)))
            self._client.start()
            if self._directory.names:
                self._resolver = Resolver(self._directory.names, self.settings.resolve_period, self._tell)
                self._resolver.start()
                self._names_until = self._clock() + self.settings.lookup_timeout

    def _is_myself(self, epoch: bytes) -> bool:
        """A name that stands for several engines may stand for this one, too. On the puller's thread."""
        return self._promises is not None and self._promises.epoch == epoch

    def bind_leases(self, leases: RowLeases) -> None:
        """Now there is something to serve."""
        if self._own is None or self._geometry is None or self._off:
            return
        rows = max(1, int(self._geometry.num_rows * self.settings.lease_share))
        limits = PromiseLimits(self.settings.lease_seconds, rows, max(1, rows // 2))
        promises = Promises(leases, self._offered, limits, clock=self._clock)
        self._promises = promises
        owner = Owner(self._own, promises, clock=self._clock)
        self._server.serve(owner, self._rows)

    # ---- requests ----------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Who computes for another engine shares every chunk of the prompt, also those that are resident already."""
        params = req_context.kv_transfer_params or {}
        prefiller = _peer_in(params, REMOTE_PREFILLER)
        named = prefiller or _peer_in(params, REMOTE_SOURCE)
        with self._lock:
            request = RequestKnowledge(next(self._numbers), named, is_handover=prefiller is not None)
            self._requests[req_context.req_id] = request
        return _REQUEST_LEVEL if params.get(REMOTE_DECODER) is not None else _BLOCK_LEVEL

    def _peers_of(self, request: RequestKnowledge) -> tuple[Address, ...]:
        """All peers, or the one that the client names, if it is one of them."""
        if request.named is None:
            return self._directory.all()
        named = self._directory.named(*request.named)
        if not named:
            self._log.warning(
                "source",
                f"{show(request.named)}, which a request names, is none of the `peers`: all of them are asked",
            )
        return named or self._directory.all()

    def on_request_finished(self, req_context: ReqContext) -> None:
        with self._lock:
            request = self._requests.pop(req_context.req_id, None)
            if request is not None:
                request.finished = True
                self._claims.release([*request.asked, *request.found], request)
                self._finish_if_over(request)
                self._wake()

    def _finish_if_over(self, request: RequestKnowledge) -> None:
        """Loads outlive their request; what was promised for it is released after the last of them."""
        if not request.finished or any(load.request is request for load in self._loads.values()):
            return
        if self._by_number.pop(request.number, None) is not None and self._client is not None:
            self._client.submit(Finish(request.number))
            self._stale = True

    @property
    def _may_pull(self) -> bool:
        return not self._off and self._client is not None and not self._client.has_ended

    # ---- lookup ------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[LookupResult]:
        with self._lock:
            self._absorb()
            request = self._requests.get(req_context.req_id)
            if not self._may_pull or request is None:
                return [MISS] * len(keys)
            now = self._clock()
            if not self._directory.is_complete and now < self._names_until:
                return [RETRY] * len(keys)
            if request.waits_until is None:
                request.waits_until = now + self.settings.handover_timeout
            results: list[LookupResult] = []
            unknown: dict[OffloadKey, None] = {}
            for key in keys:
                if key in request.asked:
                    results.append(RETRY)
                elif request.source(key, now) is not None:
                    results.append(HIT)
                elif request.is_absent(key, now) and request.is_waiting(now):
                    results.append(RETRY)
                elif self._is_hopeless(request, key, now):
                    results.append(MISS)
                elif self._claims.is_anothers(key, request, now):
                    results.append(RETRY)
                elif len(unknown) < MAX_KEYS:
                    unknown[key] = None
                    results.append(RETRY)
                else:
                    results.append(MISS)
            if unknown:
                self._ask(request, list(unknown))
            if RETRY in results:
                return [RETRY if result is HIT else result for result in results]
            return results

    def _is_hopeless(self, request: RequestKnowledge, key: OffloadKey, now: float) -> bool:
        """Whether it makes no sense to ask for the key."""
        shunned = key in self._shunned
        absent = key in self._absent and not request.is_waiting(now)
        return shunned or absent or request.is_absent(key, now) or len(key) > MAX_KEY_BYTES

    def _ask(self, request: RequestKnowledge, keys: Sequence[OffloadKey]) -> None:
        assert self._client is not None
        self._by_number[request.number] = request
        self._claims.claim(keys, request, self._clock())
        self._client.submit(Ask(request.number, request.ask(keys), tuple(keys), self._peers_of(request)))
        self._stale = True

    def on_schedule_end(self) -> None:
        """The pass's questions go out together."""
        with self._lock:
            self._wake()
            self._absorb()

    def _wake(self) -> None:
        if self._stale and self._client is not None:
            self._stale = False
            self._client.wake()

    # ---- jobs --------------------------------------------------------------------------------------------------

    def submit_store(self, job: JobMetadata) -> None:
        """The chunks are in host memory, and may be pulled from now on."""
        with self._lock:
            if not self._off:
                self._offer(job.keys)
            self._results.append(JobResult(job.job_id, True, job.keys))

    def note_promoted(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002
        """They may be pulled from us as those that were computed here."""
        with self._lock:
            if not self._off:
                self._offer(keys)

    def _offer(self, keys: Sequence[OffloadKey]) -> None:
        self._offered.update(dict.fromkeys(keys))
        rows = self._geometry.num_rows if self._geometry is not None else 0
        while len(self._offered) > OFFERED_KEYS_A_ROW * rows:
            del self._offered[next(iter(self._offered))]

    def submit_load(self, job: JobMetadata) -> None:
        with self._lock:
            self._absorb()
            request = self._requests.get(job.req_context.req_id)
            load = _Load(next(self._numbers), job, request or RequestKnowledge(0), self._epoch)
            self._loads[load.number] = load
            if not self._may_pull or request is None or not self._has_rows(job):
                self._end_load(load, ())
                return
            self._advance(load)
            self._wake()

    def _has_rows(self, job: JobMetadata) -> bool:
        return len(job.block_ids) == len(job.keys) and all(0 <= row < len(self._rows) for row in job.block_ids)

    def _advance(self, load: _Load) -> None:
        """Fetch what is promised, once nothing of the job is asked for any more.

        A promise may have been used by another load of the same chunk meanwhile: then it is asked for again.
        """
        if load.pulled:
            return
        request = load.request
        unknown = self._unknown(request, load.job.keys) if load.rounds < ROUNDS_A_LOAD else []
        if unknown:
            load.rounds += 1
            self._ask(request, unknown[:MAX_KEYS])
        if not request.is_asking(load.job.keys):
            self._pull(load)

    def _unknown(self, request: RequestKnowledge, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those that are worth a question, each once."""
        now = self._clock()
        return [
            key
            for key in dict.fromkeys(keys)
            if key not in request.asked
            and request.source(key, now) is None
            and not self._is_hopeless(request, key, now)
        ]

    def _pull(self, load: _Load) -> None:
        request = load.request
        load.pulled = True
        now = self._clock()
        rows: list[Wanted] = []
        for key, row in zip(load.job.keys, load.job.block_ids, strict=True):
            source = request.source(key, now)
            if source is not None:
                rows.append(Wanted(key, row, source))
                request.use(key)
        self._claims.release(load.job.keys, request)
        if not rows or self._client is None:
            self._end_load(load, ())
            return
        self._by_number[request.number] = request
        self._client.submit(Pull(load.number, tuple(rows)))
        self._stale = True

    def _end_load(self, load: _Load, good: Sequence[OffloadKey]) -> None:
        del self._loads[load.number]
        kept = set(good) if load.epoch == self._epoch else set()
        keys = tuple(key for key in load.job.keys if key in kept)
        if not self._off:
            self._offer(keys)
        self._results.append(JobResult(load.job.job_id, len(keys) == len(load.job.keys), keys))
        self._finish_if_over(load.request)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._lock:
            self._absorb()
            results, self._results = self._results, []
            return results

    def has_pending_work(self) -> bool:
        """Whether a job has no result, or its result was not taken."""
        return bool(self._loads or self._results)

    def drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while True:
            self._news.clear()
            with self._lock:
                self._absorb()
                self._wake()
                if not self._loads:
                    return True
            left = deadline - time.monotonic()
            if left <= 0 or not self._news.wait(left):
                with self._lock:
                    self._absorb()
                    return not self._loads

    # ---- what the puller tells ---------------------------------------------------------------------------------

    def _tell(self, outcome: Outcome | Resolved) -> None:
        """On the puller's thread, or the resolver's."""
        self._outcomes.append(outcome)
        self._news.set()

    def _absorb(self) -> None:
        self._shunned.purge()
        self._absent.purge()
        while self._outcomes:
            match self._outcomes.popleft():
                case Answered(number, round_, found):
                    request = self._by_number.get(number)
                    if request is not None:
                        self._on_answered(request, round_, found)
                case JobEnded(number, good, corrupt):
                    load = self._loads.get(number)
                    self._shunned.add(corrupt)
                    if load is not None:
                        self._end_load(load, good)
                case Resolved() as resolved:
                    self._on_resolved(resolved)
        if self._client is not None and self._client.has_ended:
            self._end_all()
        self._wake()

    def _on_resolved(self, resolved: Resolved) -> None:
        self._directory.learn(resolved)
        if self._client is not None:
            self._client.submit(Know(dict(self._directory.entry_of)))
            self._stale = True
        logger.info("p2p tier: %s is %s", resolved.entry, ", ".join(map(str, resolved.addresses)) or "nobody")

    def _end_all(self) -> None:
        """The puller has ended: it could not open what it needs, or was stopped. Nothing more comes from it."""
        for load in list(self._loads.values()):
            self._end_load(load, ())
        for request in self._requests.values():
            request.clear()

    def _on_answered(self, request: RequestKnowledge, round_: int, found: Mapping[OffloadKey, Source]) -> None:
        now = self._clock()
        absent = request.answer(round_, found, now + (HANDOVER_PAUSE if request.is_waiting(now) else ABSENT_SECONDS))
        self._claims.release(absent, request)
        if request.named is None:
            self._absent.add(absent)
        for load in [load for load in self._loads.values() if load.request is request]:
            self._advance(load)

    # ---- reset and end -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every key; unless `keep_on_reset`, share and pull nothing any more. Jobs end as failed."""
        with self._lock:
            self._absorb()
            self._epoch += 1
            self._shunned.clear()
            self._absent.clear()
            self._claims.clear()
            if not self.settings.keep_on_reset:
                self._switch_off()
            self._server.forget()
            if self._client is not None:
                self._client.submit(Forget())
                self._client.wake()
            for request in self._requests.values():
                request.clear()
            for load in [load for load in self._loads.values() if not load.pulled]:
                self._end_load(load, ())

    def _switch_off(self) -> None:
        if not self._off:
            self._off = True
            logger.warning(
                "p2p tier: off after a cache reset, because the weights may be new; a restart turns it on again, and "
                "`keep_on_reset` keeps it on"
            )
        self._offered.clear()

    def shutdown(self) -> None:
        """End within about twice SHUTDOWN_SECONDS. Nobody touches a row afterwards, or its job has no result."""
        with self._lock:
            self._off = True
            self._offered.clear()
        if self._resolver is not None:
            self._resolver.stop()
        ended = [thread.stop(SHUTDOWN_SECONDS) for thread in (self._server, self._client) if thread is not None]
        with self._lock:
            self._absorb()
            if all(ended):
                self._rows = ()

    # ---- telling -----------------------------------------------------------------------------------------------

    def get_stats(self) -> Mapping[str, int | float]:
        """Counters since the start; gauges."""
        stats: dict[str, int | float] = {"p2p_offered_chunks": len(self._offered)}
        for thread in (self._server, self._client):
            if thread is not None:
                stats.update(thread.stats())
        return stats

    def leftovers(self) -> dict[str, int]:
        """What is still going on, by name; all zero when every request has finished and every result was taken."""
        with self._lock:
            self._absorb()
            return {
                "requests": len(self._requests),
                "asking": len(self._by_number),
                "loads": len(self._loads),
                "claims": len(self._claims),
                "results": len(self._results),
            }


def _peer_in(params: Mapping[str, Any], name: str) -> tuple[object, object] | None:
    """Host and port of the peer that the client gives under this name."""
    peer = params.get(name)
    if not isinstance(peer, Mapping):
        return None
    return peer.get("remote_host", peer.get("host")), peer.get("remote_port", peer.get("port"))
