"""What is answered about a key, and what has to be found out first.

    key:  unknown --lookup--> to be asked --end of the pass--> asked --answer--> in the index | absent
          absent --share_refresh--> unknown                (another engine may have stored it)
          in the index --a read finds it gone--> absent;   --a read fails--> shunned --SHUN_SECONDS--> as before

One thread owns it; no locks. It is asked of thousands of keys in a pass, so a prompt whose keys are all alike is
answered as one.
"""

from collections.abc import Iterable, Sequence

from vllm_tiered_offload.contract.jobs import LookupResult
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.contract.seams import Clock
from vllm_tiered_offload.tiers.expiring_keys import ExpiringKeys
from vllm_tiered_offload.tiers.fs.index import KeyIndex

SHUN_SECONDS = 10.0  # how long a chunk that could not be read, and is still there, is not tried again
MAX_QUESTIONS = 100_000  # unanswered ones; beyond them a key is a miss


class Lookups:
    """Answers from the index, and questions about what is not in it."""

    def __init__(self, share_refresh: float, clock: Clock) -> None:
        # Keys that were looked for and not found, and keys whose file is there but could not be read.
        self._absent = ExpiringKeys(share_refresh, clock)
        self._shunned = ExpiringKeys(SHUN_SECONDS, clock)
        # To be asked at the end of this pass (in order), and asked without an answer yet. Disjoint.
        self._questions: dict[OffloadKey, None] = {}
        self._asked: set[OffloadKey] = set()

    def look_up(self, keys: Sequence[OffloadKey], index: KeyIndex, is_complete: bool) -> list[LookupResult]:
        """One result per key; with an index that `is_complete` nothing has to be asked."""
        self._absent.purge()
        self._shunned.purge()
        alike = self._look_up_alike(keys, index, is_complete)
        if alike is not None:
            return [alike] * len(keys)
        return [self._look_up_one(key, index, is_complete) for key in keys]

    def take_questions(self) -> list[OffloadKey]:
        """What is to be asked now; from now on it is asked."""
        self._absent.purge()
        keys, self._questions = list(self._questions), {}
        self._asked.update(keys)
        return keys

    def answered(self, asked: Iterable[OffloadKey], absent: Iterable[OffloadKey]) -> None:
        """These were asked, and those of them are nowhere."""
        self._asked.difference_update(asked)
        self._absent.add(absent)

    def stored(self, keys: Iterable[OffloadKey]) -> None:
        """These are there, whatever was known of them."""
        self._absent.discard(keys)
        self._shunned.discard(keys)

    def lost(self, keys: Iterable[OffloadKey]) -> None:
        """These are gone."""
        self._absent.add(keys)

    def shun(self, keys: Iterable[OffloadKey]) -> None:
        """These are there, and could not be read."""
        self._shunned.add(keys)

    def look_again(self) -> None:
        """Take nobody's word for what is not there."""
        self._absent.clear()
        self._shunned.clear()

    def forget(self) -> None:
        """Everything, questions included; their answers will not come."""
        self.look_again()
        self._questions.clear()
        self._asked.clear()

    def leftovers(self) -> dict[str, int]:
        """Questions without an answer."""
        return {"asked": len(self._asked), "questions": len(self._questions)}

    def check(self) -> None:
        """Assert the invariants beside the declarations. For tests."""
        assert self._asked.isdisjoint(self._questions)

    def _look_up_alike(self, keys: Sequence[OffloadKey], index: KeyIndex, is_complete: bool) -> LookupResult | None:
        """The answer where it is the same for all: prompts that are known, new, or asked again."""
        if self._shunned or index.leaving or not index.writing.keys().isdisjoint(keys):
            return None
        if index.has_all(keys):
            return LookupResult.HIT
        if self._asked.issuperset(keys):
            return LookupResult.RETRY
        if self._absent.has_all(keys):
            return LookupResult.MISS
        if not (index.has_none(keys) and self._asked.isdisjoint(keys) and self._absent.has_none(keys)):
            return None
        if is_complete:
            return LookupResult.MISS
        if self._num_open + len(keys) > MAX_QUESTIONS:
            return None
        self._questions.update(dict.fromkeys(keys))
        return LookupResult.RETRY

    def _look_up_one(self, key: OffloadKey, index: KeyIndex, is_complete: bool) -> LookupResult:
        if key in self._shunned or key in index.leaving:
            return LookupResult.MISS
        if key in index.present:
            return LookupResult.HIT
        if key in index.writing:
            return LookupResult.HIT_PENDING
        if is_complete or key in self._absent:
            return LookupResult.MISS
        if key not in self._asked and key not in self._questions:
            if self._num_open >= MAX_QUESTIONS:
                return LookupResult.MISS
            self._questions[key] = None
        return LookupResult.RETRY

    @property
    def _num_open(self) -> int:
        return len(self._asked) + len(self._questions)
