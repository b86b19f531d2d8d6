"""How `p2p status` shows what the engines told."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_tiered_offload.cli.output import count, size
from vllm_tiered_offload.cli.scraping import Sample

PEER_COLUMNS = ["engine", "peer", ">up", ">pulled", ">seconds", ">MB/s", "failures"]


@dataclass
class PeerView:
    """One of the `peers`; a name may stand for several engines."""

    up: int = 0
    pulled_bytes: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)  # by kind


@dataclass
class EngineView:
    """One engine: whom it pulls from, and what it serves."""

    peers: dict[str, PeerView] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    serving: dict[str, float] = field(default_factory=dict)  # the other numbers of the peer tier, by short name


def peer_status(samples: Iterable[Sample]) -> dict[str, EngineView]:
    """By the label that vLLM gives to an engine."""
    engines: dict[str, EngineView] = {}
    for name, labels, value in samples:
        if not name.startswith("p2p_") or name.endswith("_created"):
            continue
        engine = engines.setdefault(labels.get("engine", "0"), EngineView())
        if "peer" in labels:
            _add_to_peer(engine.peers.setdefault(labels["peer"], PeerView()), name, labels.get("kind", ""), value)
        elif name == "p2p_refused_total":
            engine.refused[labels.get("reason", "")] += int(value)
        else:
            engine.serving[name] = value
    return engines


def _add_to_peer(peer: PeerView, name: str, kind: str, value: float) -> None:
    match name:
        case "p2p_peers_up":
            peer.up = int(value)
        case "p2p_pulled_bytes_total":
            peer.pulled_bytes = int(value)
        case "p2p_pull_seconds_total":
            peer.seconds = value
        case "p2p_peer_failures_total":
            peer.failures[kind] = int(value)


def status_json(engines: dict[str, EngineView]) -> dict[str, Any]:
    return {
        name: {
            "peers": {address: vars(peer) for address, peer in engine.peers.items()},
            "refused": engine.refused,
            **engine.serving,
        }
        for name, engine in engines.items()
    }


def peer_rows(engines: dict[str, EngineView]) -> Iterator[list[str]]:
    for name, engine in engines.items():
        for address, peer in sorted(engine.peers.items()):
            speed = f"{peer.pulled_bytes / peer.seconds / 1e6:,.0f}" if peer.seconds else "-"
            failures = _told(peer.failures) or "none"
            yield [name, address, str(peer.up), size(peer.pulled_bytes), f"{peer.seconds:.3g}", speed, failures]


def serving_lines(engines: dict[str, EngineView]) -> Iterator[str]:
    for name, engine in engines.items():
        numbers = Counter(engine.serving)
        told = [
            f"serves {count(int(numbers['p2p_sessions']), 'session')}",
            f"{count(int(numbers['p2p_promised_rows']), 'leased row')}",
            f"{count(int(numbers['p2p_promises_expired_total']), 'expired lease')}",
            f"{size(int(numbers['p2p_served_bytes_total']))} sent",
            f"refused: {_told(engine.refused) or 'none'}",
        ]
        yield f"engine {name}: {', '.join(told)}"


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()) if number)
