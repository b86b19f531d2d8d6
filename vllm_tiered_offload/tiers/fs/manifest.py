"""The manifest of a namespace: which bytes its chunks are, once for people (`fields`) and once for machines.

Whoever can write the directory can write anything into it, so nothing in here is trusted: what is not exactly a
manifest is refused with a reason, and no name in it ever becomes a path.
"""

import json
import math
import os
import re
import time
from dataclasses import asdict, dataclass
from typing import Any

from vllm_tiered_offload.contract.fingerprint import Fingerprint
from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.owner import Owner

MANIFEST = "manifest.json"
FORMAT = "vllm-tiered-offload fs 1"
MAX_BYTES = 1 << 20

_ABOUT = "KV cache of a language model. Chunks are valid only for exactly these fields."
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_FIELD_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ENGINE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HOST = re.compile(r"[0-9a-f]{12}")
_MAX_PID = 1 << 31
_MAX_START = 10**18  # clock ticks
_MAX_DEPTH = 32


class ManifestError(ValueError):
    """This is no manifest; the text says why, as the end of a sentence that begins with the file's path."""


@dataclass(frozen=True)
class Manifest:
    """`private_to` is the engine process that owns a private generation; None for a shared namespace."""

    fingerprint: Fingerprint
    private_to: Owner | None = None
    created: str = ""

    @classmethod
    def new(cls, fingerprint: Fingerprint, private_to: Owner | None) -> "Manifest":
        """Made now."""
        return cls(fingerprint, private_to, time.strftime(_TIME, time.gmtime()))

    @property
    def values(self) -> dict[str, Any]:
        """The fingerprint's fields and their values."""
        return {name: json.loads(value) for name, value in self.fingerprint.fields}

    def to_bytes(self) -> bytes:
        """What `parse` reads."""
        manifest = {
            "format": FORMAT,
            "about": _ABOUT,
            "created": self.created,
            "fields": self.values,
            "private_to": None if self.private_to is None else asdict(self.private_to),
            "fingerprint": self.fingerprint.to_json(),
        }
        return json.dumps(manifest, indent=1).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> "Manifest":
        """Raises ManifestError, and nothing else, for whatever is no manifest of this format."""
        found = _json_object(data)
        if found.get("format") != FORMAT:
            raise ManifestError(f"is not of the format {FORMAT!r}")
        created = found.get("created")
        if not isinstance(created, str) or not _CREATED.fullmatch(created):
            raise ManifestError("does not say when it was made")
        return cls(_fingerprint(found.get("fingerprint")), _owner(found.get("private_to")), created)


def read_manifest(files: Files, directory: str) -> Manifest:
    """The manifest of a namespace's directory. Raises OSError or ManifestError."""
    # Not blocking, for the name may be that of a pipe.
    fd = files.open(f"{directory}/{MANIFEST}", os.O_RDONLY | os.O_NONBLOCK)
    try:
        buffer = bytearray(min(files.size(fd), MAX_BYTES + 1))
        done = 0
        while done < len(buffer) and (read := files.preadv(fd, [memoryview(buffer)[done:]], done)):
            done += read
    finally:
        files.close(fd)
    return Manifest.parse(bytes(buffer[:done]))


def _json_object(data: bytes) -> dict[str, object]:
    if len(data) > MAX_BYTES:
        raise ManifestError(f"is larger than {MAX_BYTES} bytes")
    try:
        found = json.loads(data.decode())
    except UnicodeDecodeError:
        raise ManifestError("is not UTF-8 text") from None
    except (ValueError, RecursionError):
        raise ManifestError("is not JSON") from None
    if not isinstance(found, dict):
        raise ManifestError("is not a JSON object")
    return found


def _fingerprint(text: object) -> Fingerprint:
    if not isinstance(text, str):
        raise ManifestError("has no fingerprint")
    try:
        fingerprint = Fingerprint.from_json(text)
    except ValueError:
        raise ManifestError("has a fingerprint that cannot be read") from None
    for name, value in fingerprint.fields:
        if not _FIELD_NAME.fullmatch(name):
            raise ManifestError("has a fingerprint with a field that is no name")
        if not _is_plain_json(value):
            raise ManifestError(f"has a fingerprint whose field {name} is not plain JSON")
    return fingerprint


def _is_plain_json(text: str) -> bool:
    """Whether a fingerprint could have it: finite numbers, and nested so little that anybody can walk through it."""
    try:
        return _is_plain(json.loads(text), _MAX_DEPTH)
    except (ValueError, RecursionError):
        return False


def _is_plain(value: object, depth: int) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if not isinstance(value, dict | list):
        return True
    children = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_plain(child, depth - 1) for child in children)


def _owner(found: object) -> Owner | None:
    if found is None:
        return None
    if isinstance(found, dict):
        engine, host, pid = found.get("engine"), found.get("host"), found.get("pid")
        started = found.get("started")
        if (
            isinstance(engine, str)
            and isinstance(host, str)
            and type(pid) is int
            and type(started) is int
            and _ENGINE.fullmatch(engine)
            and _HOST.fullmatch(host)
            and 0 < pid < _MAX_PID
            and 0 <= started < _MAX_START
        ):
            return Owner(engine, host, pid, started)
    raise ManifestError("does not say whose private generation it is")
