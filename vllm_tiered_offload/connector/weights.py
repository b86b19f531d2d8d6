"""Which weights an engine loaded (D5): what must differ between two engines whose weights differ.

    a local directory or file   every weight file's name, size, time, and the digest of its header where it has one
    a hub model                 the commit that its config came from, and what lies in the local snapshot of it
    anything else               the revision, if it is a commit
    dummy weights, or unknown   a name that nobody else has: such chunks are never shared

Content is not read: it can be hundreds of gigabytes. A safetensors header names every tensor with its type, shape and
place, so what it does not tell is a change of values alone, which changes the file's time or the hub's commit.
"""

import hashlib
import logging
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LARGEST_HEADER = 100_000_000  # what the safetensors library itself accepts

Identity = list[list[Any]]
"""JSON values; equal ones mean equal weights."""


def weights_identity(model_config: Any, load_config: Any) -> Identity:
    """The `weights` field of the fingerprint, from vLLM's ModelConfig and LoadConfig. Does file I/O."""
    load_format = str(load_config.load_format)
    if load_format == "dummy":
        return [[load_format, str(uuid.uuid4())]]
    place = Path(model_config.model)
    if place.exists():
        return [[load_format], *_files(place, with_times=True)]
    commit = _commit(model_config)
    if commit is None:
        logger.warning(
            "nothing tells which weights %s has: what it stores is not shared with other engines or restarts. Serve it "
            "from a local directory, or name a commit with --revision",
            model_config.model,
        )
        return [[load_format, f"unknown {uuid.uuid4()}"]]
    snapshot = _snapshot(model_config.model, commit, load_config.download_dir)
    return [[load_format, commit], *(_files(snapshot, with_times=False) if snapshot is not None else ())]


def _commit(model_config: Any) -> str | None:
    """transformers notes the commit that it took the config from."""
    for named in (getattr(model_config.hf_config, "_commit_hash", None), model_config.revision):
        if isinstance(named, str) and _COMMIT.fullmatch(named):
            return named
    return None


def _snapshot(repository: str, commit: str, download_dir: str | None) -> Path | None:
    """The directory with the files of that commit in the hub's local cache."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(repository, "config.json", cache_dir=download_dir, revision=commit)
    except ValueError:  # not the name of a repository: some other loader's address
        return None
    return Path(config).parent if isinstance(config, str) else None


def _files(place: Path, *, with_times: bool) -> Iterator[list[Any]]:
    """Name, size, digest of the header or None, and time of each weight file, in order of names.

    A snapshot's times are those of its download, so they differ where the weights do not.
    """
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    for file in files:
        if file.suffix in _SUFFIXES and file.is_file():
            stat = file.stat()
            name = file.name if file == place else str(file.relative_to(place))
            yield [name, stat.st_size, _header_digest(file), *([stat.st_mtime_ns] if with_times else ())]


def _header_digest(file: Path) -> str | None:
    if file.suffix != ".safetensors":
        return None
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return hashlib.blake2b(stream.read(min(size, _LARGEST_HEADER)), digest_size=16).hexdigest()
