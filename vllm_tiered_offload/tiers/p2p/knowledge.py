"""What a request knows of where its keys are. Pure; the tier's lock covers it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.p2p.instructions import Source


@dataclass(slots=True, eq=False)
class RequestKnowledge:
    """One request. Each key is in at most one of the three maps; in none of them it is unknown."""

    number: int  # what it is called on the wire
    named: tuple[object, object] | None = None  # host and port of the peer that the client means; else all are asked
    is_handover: bool = False  # that peer computes the prompt for it: what it does not have yet is asked for again
    waits_until: float | None = None  # how long it does that (clock), from its first lookup
    asked: dict[OffloadKey, int] = field(default_factory=dict)  # -> the round that asks for it
    found: dict[OffloadKey, Source] = field(default_factory=dict)  # promised, perhaps not any more
    absent: dict[OffloadKey, float] = field(default_factory=dict)  # nobody has it; believed until then (clock)
    last_round: int = 0
    finished: bool = False

    def ask(self, keys: Sequence[OffloadKey]) -> int:
        """A new round for keys that are unknown."""
        self.last_round += 1
        for key in keys:
            self._forget(key)
            self.asked[key] = self.last_round
        return self.last_round

    def answer(self, round_: int, found: Mapping[OffloadKey, Source], absent_until: float) -> list[OffloadKey]:
        """What came of a round; the keys that nobody has. Those that were forgotten meanwhile stay unknown."""
        absent = []
        for key in [key for key, number in self.asked.items() if number == round_]:
            del self.asked[key]
            source = found.get(key)
            if source is None:
                self.absent[key] = absent_until
                absent.append(key)
            else:
                self.found[key] = source
        return absent

    def source(self, key: OffloadKey, now: float) -> Source | None:
        """Where the key is promised, if the promise still holds."""
        source = self.found.get(key)
        return source if source is not None and source.expires > now else None

    def is_absent(self, key: OffloadKey, now: float) -> bool:
        """Whether it is believed that nobody has it."""
        return self.absent.get(key, now) > now

    def is_waiting(self, now: float) -> bool:
        """Whether what nobody has may still come."""
        return self.is_handover and self.waits_until is not None and now < self.waits_until

    def use(self, key: OffloadKey) -> None:
        """Its one fetch is on its way."""
        self.found.pop(key, None)

    def is_asking(self, keys: Collection[OffloadKey]) -> bool:
        """Whether one of them waits for an answer."""
        return not self.asked.keys().isdisjoint(keys)

    def clear(self) -> None:
        """Everything is unknown."""
        for known in (self.asked, self.found, self.absent):
            known.clear()

    def _forget(self, key: OffloadKey) -> None:
        for known in (self.asked, self.found, self.absent):
            known.pop(key, None)


class Claims:
    """Who asks for a key: of a crowd that wants one prefix, one request asks, and the others wait for it.

    A claim ends with its request's load or end, when nobody has the key, or after `seconds`. It holds only among those
    that ask the same peers.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Key -> who asks, and until when (clock) others wait. Each key is in one of the maps of its request.
        self._claims: dict[OffloadKey, tuple[RequestKnowledge, float]] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, keys: Iterable[OffloadKey], request: RequestKnowledge, now: float) -> None:
        """The request asks for them."""
        self._claims.update(dict.fromkeys(keys, (request, now + self._seconds)))

    def is_anothers(self, key: OffloadKey, request: RequestKnowledge, now: float) -> bool:
        """Whether the request does better to wait."""
        other, until = self._claims.get(key, (request, now))
        return other is not request and other.named == request.named and now < until

    def release(self, keys: Iterable[OffloadKey], request: RequestKnowledge) -> None:
        """What the request asked for is on its way, or not wanted any more."""
        for key in keys:
            if key in self._claims and self._claims[key][0] is request:
                del self._claims[key]

    def clear(self) -> None:
        self._claims.clear()
