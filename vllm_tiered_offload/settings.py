"""The connector's settings: `kv_connector_extra_config`, parsed once at start; and the few a request may carry.

    cpu                        the primary tier's block; `capacity` (size, required) and `eviction_policy` are read
                               here, whatever else it holds goes to the tier's own model
    tiers                      list of secondary tiers, nearest first; each has a `type`, the rest is the tier's own
    blocks_per_chunk           device blocks that are stored and loaded together
    offload_prompt_only        keep only what the prompt computed, not what was generated
    lora                       where chunks that were computed with a LoRA adapter may go
    min_load_tokens            a shorter hit is recomputed instead of loaded
    max_pinned_device_share    share of the device block pool that stores in flight may hold back
    retry_timeout              seconds a request waits for a tier that does not know yet
    pending_timeout            seconds a request waits for blocks on their way without a new one arriving
    job_timeout                seconds until a device job without an answer stops counting as pending work
    region_timeout             seconds the scheduler half waits for the first worker's report of the host region
    max_store_offers           how often a declined range is offered again
    tier_job_timeout           seconds until a job of a secondary tier counts as failed
    breaker_failures           failures in a row after which a secondary tier is switched off
    breaker_cooldown           seconds until it is tried again
    promotion_headroom         share of the host region that promotions leave to new stores
    promotion_hold             seconds that promoted chunks are kept for the request that asked for them
    cascade_share              share of the host region that chunks on their way to a secondary tier may hold
    drain_timeout              seconds that a reset or a shutdown waits for each secondary tier
    lifecycle                  "tolerant" or "strict": what a broken lifecycle rule does
    copy_threads               threads that move bytes in each worker of the CPU backend
    populate                   give the host region its memory at start

`settings_table()` gives the same as data, with defaults. Sizes are bytes as an integer, or text such as "8GiB" or
"8GB". Unknown keys are refused. A mistake is one line: the key's path, what was given, what is expected.
"""

import difflib
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from vllm_tiered_offload.contract.config import WorkerConfig

ROOT_PATH = "kv_connector_extra_config"
SHOWN_CHARACTERS = 60

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)}
_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_LARGEST_SIZE = 1 << 60
_SIZE_EXPECTED = 'a size: bytes as a whole number, or text such as "8GiB" or "8GB"'


class SettingsError(ValueError):
    """The settings cannot be used. The text has one line for each mistake; `problems` has the lines."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def parse_size(value: object) -> int:
    """Bytes from an integer or from text with a unit (KiB, MiB … are powers of 1024, kB, MB … of 1000).

    Raises ValueError for anything else: booleans, floats, negative numbers, unknown units.
    """
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is not None and match[2].lower() in _UNITS:
            number = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    if number is None or not 0 <= number <= _LARGEST_SIZE:
        raise ValueError(f"expected {_SIZE_EXPECTED}")
    return number


def _validate_size(value: object) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise PydanticCustomError("size", "{text}", {"text": str(error)}) from None


ByteSize = Annotated[int, BeforeValidator(_validate_size)]
"""Type of a field that holds a size; see `parse_size`."""


class Block(BaseModel):
    """Base of a configuration block, ours or a tier's: frozen, no unknown keys, no guessed conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _OpenBlock(Block):
    """A block whose other keys belong to somebody else."""

    model_config = ConfigDict(extra="allow")


class CpuBlock(_OpenBlock):
    """What everybody needs to know of the primary tier's block; the tier validates all of it (`options`)."""

    capacity: Annotated[ByteSize, Field(gt=0)] = Field(
        description="Size of the host region, all ranks of the engine together. There is no default: it is your RAM."
    )
    eviction_policy: str = Field(
        default="lru", description='What leaves first when it is full: "lru", "arc", or a plugin\'s.'
    )

    @property
    def options(self) -> dict[str, Any]:
        """The keys that were given, for the tier's own model; sizes are in bytes already."""
        return self.model_dump(exclude_unset=True)


class TierBlock(_OpenBlock):
    """One secondary tier: its type, and the keys that its own model will read."""

    type: str = Field(min_length=1, description='Which tier this is: "fs", "p2p", or a plugin\'s name.')

    @property
    def options(self) -> dict[str, Any]:
        """The keys of the block but `type`, as given."""
        return dict(self.model_extra or {})


class Settings(Block):
    """`kv_connector_extra_config`, typed. Times are in seconds."""

    cpu: CpuBlock = Field(description="The primary tier: host memory.")
    tiers: Annotated[tuple[TierBlock, ...], Field(strict=False)] = Field(
        default=(), description="Secondary tiers, nearest first."
    )
    blocks_per_chunk: int = Field(
        default=1, ge=1, description="Device blocks that are stored and loaded together; only full chunks are kept."
    )
    offload_prompt_only: bool = Field(
        default=False, description="Keep only what the prompt computed, not what was generated."
    )
    lora: Literal["memory", "everywhere", "off"] = Field(
        default="memory",
        description="Where chunks that were computed with a LoRA adapter may go: host memory; the secondary tiers too, "
        "if you never replace an adapter's files under the same name and path (vLLM's hashes do not tell); or nowhere.",
    )
    min_load_tokens: int = Field(default=0, ge=0, description="A hit of fewer tokens is recomputed instead of loaded.")
    max_pinned_device_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the device block pool that stores in flight may hold back; beyond it they are declined.",
    )
    retry_timeout: float = Field(
        default=1.0, ge=0, description="Seconds a request waits for a tier that does not know yet what it has."
    )
    pending_timeout: float = Field(
        default=1.0,
        ge=0,
        description="Seconds without a newly arrived block after which a request starts with what is there.",
    )
    job_timeout: float = Field(
        default=60.0, gt=0, description="Seconds until a device job without an answer stops counting as pending work."
    )
    region_timeout: float = Field(
        default=10.0, gt=0, description="Seconds the scheduler half waits for the first worker's report of the region."
    )
    max_store_offers: int = Field(
        default=8, ge=1, description="How often a range that found no room is offered again, each time after progress."
    )
    tier_job_timeout: float = Field(
        default=30.0, gt=0, description="Seconds until a job of a secondary tier counts as failed."
    )
    breaker_failures: int = Field(
        default=5, ge=1, description="Failures in a row after which a secondary tier is switched off for a while."
    )
    breaker_cooldown: float = Field(
        default=10.0, gt=0, description="Seconds until a tier that was switched off is tried again."
    )
    promotion_headroom: float = Field(
        default=0.1, ge=0, lt=1, description="Share of the host region that promotions leave to new stores."
    )
    promotion_hold: float = Field(
        default=30.0, ge=0, description="Seconds that promoted chunks are kept for the request that asked for them."
    )
    cascade_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the host region that chunks on their way to a secondary tier may hold.",
    )
    drain_timeout: float = Field(
        default=5.0, ge=0, description="Seconds that a reset or a shutdown waits for each secondary tier."
    )
    lifecycle: Literal["tolerant", "strict"] = Field(
        default="tolerant",
        description="What a broken lifecycle rule does: skip that request's offload with a warning, or raise (tests).",
    )
    copy_threads: int = Field(
        default=1, ge=1, le=256, description="Threads that move bytes in each worker of the CPU backend."
    )
    populate: bool = Field(
        default=True,
        description="Give the host region its memory at start, in huge pages where it can, and show a lack of it.",
    )

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any] | None) -> Self:
        """The typed settings. Raises SettingsError with one line for each mistake."""
        return validate_block(cls, {} if extra_config is None else extra_config, ROOT_PATH)

    def worker_config(self) -> WorkerConfig:
        """What the worker half needs of it."""
        return WorkerConfig(self.cpu.capacity, self.blocks_per_chunk, self.copy_threads, self.populate)


BlockT = TypeVar("BlockT", bound=BaseModel)


def validate_block(model_cls: type[BlockT], raw: object, path: str) -> BlockT:
    """`raw` as a `model_cls`. Raises SettingsError, one line per mistake; `path` is where the block stands.

    Tiers use it for their own block; deriving the model from `Block` makes unknown keys a mistake.
    """
    if not isinstance(raw, Mapping):
        raise SettingsError([f"{path}: got {show(raw)}, expected an object with keys"])
    try:
        return model_cls.model_validate(dict(raw))
    except ValidationError as error:
        details = error.errors(include_url=False)
    # Raised outside the handler: a chained pydantic error would print its own many lines.
    raise SettingsError([_problem(model_cls, path, detail) for detail in details])


def settings_table() -> list[tuple[str, str, str]]:
    """(key, default as JSON or "required", description) of every setting, in order."""
    return list(_table_rows(Settings, ""))


def show(value: object) -> str:
    """A value as an error text shows it: one short line, whatever it is."""
    try:
        text = json.dumps(value) if value is None or isinstance(value, bool | str) else reprlib.repr(value)
    except Exception:  # a value whose repr fails must not hide the mistake that we report
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"


def _problem(model_cls: type[BaseModel], path: str, detail: ErrorDetails) -> str:
    """One mistake as one line."""
    location = detail["loc"]
    where = path + "".join(_step(part) for part in location)
    if detail["type"] == "extra_forbidden":
        return f"{where}: unknown key; {_suggestion(model_cls, location)}"
    if detail["type"] == "missing":
        return f"{where}: missing{_misspelled(detail)}; {_what_is_missing(model_cls, location)}"
    return f"{where}: got {show(detail['input'])}, expected {_expectation(detail)}"


def _step(part: int | str) -> str:
    """One step of a key's path; a key is whatever text the user typed."""
    if isinstance(part, str) and re.fullmatch(r"[\w-]{1,60}", part):
        return f".{part}"
    return f"[{show(part)}]"


# pydantic's error types in our words; what is not here keeps pydantic's text.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object with keys",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "invalid_key": "a key that is text",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "model_type": "an object with keys",
    "string_too_short": "text of at least {min_length} character(s)",
    "string_type": "text",
    "tuple_type": "a list",
}


def _expectation(detail: ErrorDetails) -> str:
    words = _EXPECTED.get(detail["type"])
    if words is not None:
        return words.format(**detail.get("ctx", {}))
    text = " ".join(detail["msg"].split())
    for prefix in ("Value error, ", "Assertion failed, ", "Input should be ", "expected "):
        text = text.removeprefix(prefix)
    return text


def _suggestion(model_cls: type[BaseModel], location: tuple[int | str, ...]) -> str:
    known = sorted({name for model in _models_at(model_cls, location[:-1]) for name in _keys(model)})
    near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    return f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(known) or 'none'}"


def _what_is_missing(model_cls: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """The description of the missing key; of a missing block, the keys that it must have."""
    for model in _models_at(model_cls, location[:-1]):
        field = _keys(model).get(str(location[-1]))
        if field is None:
            continue
        inner = [
            name for nested in _models_in(field.annotation) for name, f in _keys(nested).items() if f.is_required()
        ]
        if inner:
            return f"expected an object with {', '.join(inner)}"
        sized = any(isinstance(item, BeforeValidator) and item.func is _validate_size for item in field.metadata)
        return f"expected {_SIZE_EXPECTED}" if sized else (field.description or "expected a value").rstrip(".")
    return "expected a value"


def _misspelled(detail: ErrorDetails) -> str:
    """In a block that allows foreign keys, a misspelled key is not unknown: it only leaves the right one missing."""
    given = detail["input"]
    names = [str(name) for name in given] if isinstance(given, Mapping) else []
    near = difflib.get_close_matches(str(detail["loc"][-1]), names, n=1, cutoff=0.7)
    return f" (is {show(near[0])} meant to be it?)" if near else ""


def _keys(model: type[BaseModel]) -> dict[str, Any]:
    """The fields of a model under the names that a configuration uses for them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _models_at(model_cls: type[BaseModel], location: tuple[int | str, ...]) -> list[type[BaseModel]]:
    """The models that may stand at a location (several where a field is a union)."""
    models = [model_cls]
    for part in location:
        fields = [field for model in models if (field := _keys(model).get(str(part))) is not None]
        # A list index, or a name that pydantic gives to a member of a union, leads to no other models.
        if fields:
            models = [nested for field in fields for nested in _models_in(field.annotation)]
    return models


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Every model that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _table_rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in _keys(model).items():
        default = "required" if field.is_required() else json.dumps(field.get_default())
        yield f"{prefix}{name}", default, field.description or ""
        is_list = default == "[]"
        for nested in _models_in(field.annotation):
            yield from _table_rows(nested, f"{prefix}{name}{'[]' if is_list else ''}.")


@dataclass(frozen=True, slots=True)
class RequestParams:
    """What a client may say about its request in `kv_transfer_params`; None means no limit."""

    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    problems: tuple[str, ...] = ()  # what was ignored, one line each, for a log


_NO_PARAMS = RequestParams()


def parse_request_params(params: Mapping[str, Any] | None) -> RequestParams:
    """The client's limits. Never raises: what cannot be used is ignored and told in `problems`.

    Runs on the scheduler thread for each new request. Keys that are not ours belong to other connectors.
    """
    if not params:
        return _NO_PARAMS
    if not isinstance(params, Mapping):
        return RequestParams(problems=(f"kv_transfer_params: got {show(params)}, expected an object; ignored",))
    problems: list[str] = []
    load = _token_limit(params, "max_load_tokens", problems)
    offload = _token_limit(params, "max_offload_tokens", problems)
    if load is None and offload is None and not problems:
        return _NO_PARAMS
    return RequestParams(load, offload, tuple(problems))


def _token_limit(params: Mapping[str, Any], key: str, problems: list[str]) -> int | None:
    value = params.get(key)
    if value is None:
        return None
    if type(value) is int and value >= 0:
        return value
    problems.append(f"kv_transfer_params.{key}: got {show(value)}, expected a whole number not below 0; ignored")
    return None
