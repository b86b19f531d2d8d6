"""Talk to a served vLLM: streamed completions with their time to first token, and the counters of /metrics."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Prompt = str | list[int]


@dataclass
class Answer:
    """What one completion said, and how long it took to say it. Equal answers have equal `content()`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)  # log-probability before the next best token; with logprobs=2
    prompt_tokens: int = 0
    ttft_ms: float = 0.0

    def content(self) -> tuple[str, list[int], list[float]]:
        return self.text, self.token_ids, self.logprobs


class Server:
    """One served model. Requests go out one at a time; nothing is retried."""

    def __init__(self, url: str, model: str, timeout: float = 300.0) -> None:
        self.model = model
        # Plain HTTP on the loopback: loading the certificates would take longer than most requests.
        self.http = httpx.Client(base_url=url, timeout=timeout, verify=False)

    def complete(self, prompt: Prompt, max_tokens: int, **params: Any) -> Answer:
        """Stream a greedy completion. The clock runs from sending to the first content."""
        body = completion_body(self.model, prompt, max_tokens, **params)
        answer = Answer()
        started = time.perf_counter()
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise RuntimeError(f"the server answered {response.status_code}: {response.text[:500]}")
            for chunk in server_sent_events(response):
                if not answer.token_ids and chunk["choices"]:
                    answer.ttft_ms = (time.perf_counter() - started) * 1000
                add_chunk(answer, chunk)
        return answer

    def tokenize(self, text: str) -> list[int]:
        response = self.http.post("/tokenize", json={"model": self.model, "prompt": text})
        response.raise_for_status()
        return list(response.json()["tokens"])

    def metrics(self) -> "Metrics":
        return Metrics.parse(self.http.get("/metrics").raise_for_status().text)

    def settled_metrics(self, quiet_s: float = 0.3, timeout_s: float = 10.0) -> "Metrics":
        """The counters once they stand still: a step's numbers reach /metrics a little after its tokens."""
        deadline = time.monotonic() + timeout_s
        seen = self.metrics()
        while time.monotonic() < deadline:
            time.sleep(quiet_s)
            now = self.metrics()
            if now.counters() == seen.counters():
                break
            seen = now
        return seen


def completion_body(model: str, prompt: Prompt, max_tokens: int, **params: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **params,
    }


def server_sent_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in event_lines(response):
        if line.startswith("data: ") and line != "data: [DONE]":
            yield parse_event(line)


def event_lines(response: httpx.Response) -> Iterator[str]:
    """Lines as event streams have them: httpx's iter_lines also ends one at U+2028 and its like, inside an answer."""
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode().rstrip("\r") for line in lines)
    yield rest.decode()


def parse_event(line: str) -> dict[str, Any]:
    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        raise RuntimeError(f"the server broke off: {chunk['error']}")
    return chunk


def add_chunk(answer: Answer, chunk: dict[str, Any]) -> None:
    for choice in chunk["choices"]:
        answer.text += choice["text"]
        answer.token_ids += choice.get("token_ids") or []
        if choice["logprobs"]:
            answer.logprobs += choice["logprobs"]["token_logprobs"]
            answer.leads += leads(choice["logprobs"]["top_logprobs"])
    if chunk.get("usage"):
        answer.prompt_tokens = chunk["usage"]["prompt_tokens"]


def leads(top_logprobs: list[dict[str, float]]) -> list[float]:
    """How far ahead each greedy token was, where the answer tells of another one."""
    best = [sorted(top.values(), reverse=True) for top in top_logprobs]
    return [first - second for first, second, *_ in (one for one in best if len(one) > 1)]


@dataclass(frozen=True)
class Metrics:
    """One reading of /metrics."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        samples = {}
        for line in text.splitlines():
            if match := SAMPLE.match(line):
                labels = frozenset(LABEL.findall(match["labels"] or ""))
                samples[match["name"], labels] = float(match["value"])
        return cls(samples)

    def total(self, name: str, **labels: str) -> float:
        """Sum of every sample of that name that carries these labels; 0 when there is none."""
        wanted = set(labels.items())
        return sum(value for (n, have), value in self.samples.items() if n == name and wanted <= have)

    def has(self, name: str) -> bool:
        return any(n == name for n, _ in self.samples)

    def counters(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """What only work of the engine moves: reading /metrics counts HTTP requests and processor time itself."""
        return {key: value for key, value in self.samples.items() if key[0].startswith("vllm:")}

    # The counters that every measurement here needs, by what they mean.

    def cached_tokens(self, source: str) -> float:
        """Of prompts. Before 0.32 vLLM knows two sources: its device, and whatever a connector loads from."""
        if self.has("vllm:prompt_tokens_cached_by_source_total"):
            return self.total("vllm:prompt_tokens_cached_by_source_total", source=source)
        older = "local_cache_hit" if source == "device" else "external_kv_transfer"
        return self.total("vllm:prompt_tokens_by_source_total", source=older)

    def moved_bytes(self, direction: str) -> float:
        return self.total("vllm:tiered_offload_bytes_total", direction=direction)

    def failures(self) -> float:
        return self.total("vllm:tiered_offload_failures_total")
