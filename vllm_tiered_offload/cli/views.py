"""What the commands say about a root: lines and rows for people, values for JSON. Nothing is printed here."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from vllm_tiered_offload.cli.explain import Explanation
from vllm_tiered_offload.cli.output import count, size
from vllm_tiered_offload.cli.verifying import Verification
from vllm_tiered_offload.tiers.fs.inspect import BadFile, Kind, NamespaceSurvey, RootSurvey, Usage
from vllm_tiered_offload.tiers.fs.manifest import MANIFEST, Manifest
from vllm_tiered_offload.tiers.fs.namespace import is_older_format
from vllm_tiered_offload.tiers.fs.owner import Owner
from vllm_tiered_offload.tiers.fs.upkeep import Removal

NAMESPACE_COLUMNS = ["fingerprint", "model", "KV type", ">ranks", ">chunks", ">size", "last change", "remarks"]
USAGE_COLUMNS = ["", ">bytes", ">in chunks", ">quarantined", ">temporary", ">rest"]

Named = tuple[str, Manifest]
"""A manifest and what the user calls it."""

Pair = tuple[Named, Named, list[Explanation]]


def by_last_change(found: RootSurvey) -> list[NamespaceSurvey]:
    """The one that changed last in front."""
    return sorted(found.namespaces.values(), key=lambda n: (-n.usage.newest, n.digest))


# ls


def namespace_row(namespace: NamespaceSurvey) -> list[str]:
    fields = {} if namespace.manifest is None else namespace.manifest.values
    ranks = "/".join(str(fields.get(f"{kind}_parallel", "?")) for kind in ("tensor", "pipeline", "context"))
    return [
        namespace.digest[:12],
        str(fields.get("model", "?")),
        _words(fields.get("kv_dtype", "?")),
        ranks,
        f"{namespace.usage.files[Kind.CHUNK]:,}",
        size(namespace.usage.bytes[Kind.CHUNK]),
        _time(namespace.usage.newest),
        remark(namespace),
    ]


def remark(namespace: NamespaceSurvey) -> str:
    if namespace.problem is not None:
        return f"{MANIFEST}: {namespace.problem.why}"
    owner = namespace.owner
    return "" if owner is None else f"private to {owner.engine}, {state(owner)}"


def state(owner: Owner) -> str:
    me = Owner.of("cli")
    if owner.host != me.host:
        return "elsewhere"
    return "which has ended" if me.finds_stale(owner, 0.0) else "which runs"


def remarks(found: RootSurvey) -> Iterator[str]:
    """What else lies in the root, and what to do about it."""
    for name, usage in sorted(found.other_formats.items()):
        if is_older_format(name):
            text = f"an older format, not used any more: `fs drop {found.root} --old-formats` removes it"
        else:
            text = "a newer format: left alone"
        yield f"{name}: {size(usage.total)} of {text}"
    for number, thing, what in [
        (
            len(found.temporaries),
            "unfinished file",
            "writes under way or cut short; `fs gc` removes those of dead engines",
        ),
        (len(found.quarantined), "quarantined file", "bad chunks; `fs gc` removes them"),
        (found.usage.files[Kind.STRANGE], "strange file", "made by no engine, left alone"),
    ]:
        if number:
            yield f"{count(number, thing)}: {what}"


def namespace_json(namespace: NamespaceSurvey) -> dict[str, Any]:
    manifest, owner = namespace.manifest, namespace.owner
    return {
        "fingerprint": namespace.digest,
        "path": namespace.path,
        "problem": None if namespace.problem is None else namespace.problem.why,
        "created": None if manifest is None else manifest.created,
        "last_change": _time(namespace.usage.newest),
        "fields": None if manifest is None else manifest.values,
        "private_to": None if owner is None else {"engine": owner.engine, "pid": owner.pid, "state": state(owner)},
        **usage_json(namespace.usage),
    }


def ls_json(found: RootSurvey) -> dict[str, Any]:
    return {
        "root": found.root,
        "namespaces": [namespace_json(namespace) for namespace in by_last_change(found)],
        "other_formats": [
            {"name": name, "path": f"{found.root}/{name}", "older": is_older_format(name), "bytes": usage.total}
            for name, usage in sorted(found.other_formats.items())
        ],
        "temporaries": len(found.temporaries),
        "quarantined": len(found.quarantined),
        "strange": found.usage.files[Kind.STRANGE],
    }


# du


def usage_rows(found: RootSurvey) -> Iterator[list[str]]:
    for digest, namespace in sorted(found.namespaces.items()):
        yield [digest[:12], *usage_row(namespace.usage)]
    for name, usage in sorted(found.other_formats.items()):
        yield [name, *usage_row(usage)]
    yield ["total", *usage_row(found.usage)]


def usage_row(usage: Usage) -> list[str]:
    named = [usage.bytes[kind] for kind in (Kind.CHUNK, Kind.QUARANTINED, Kind.TEMPORARY)]
    return [f"{usage.total:,}", *map(size, named), size(usage.total - sum(named))]


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "bytes": usage.total,
        "file_bytes": usage.file_bytes,
        "chunks": usage.files[Kind.CHUNK],
        "bytes_by_kind": {kind.value: usage.bytes[kind] for kind in Kind},
    }


def du_json(found: RootSurvey) -> dict[str, Any]:
    return {
        "root": found.root,
        **usage_json(found.usage),
        "namespaces": {digest: usage_json(n.usage) for digest, n in sorted(found.namespaces.items())},
        "other_formats": {name: usage_json(usage) for name, usage in sorted(found.other_formats.items())},
    }


# verify


def verification_lines(result: Verification) -> Iterator[str]:
    for file in result.bad:
        yield f"{file.path}: {file.fault.value}: {file.why}"
    for file in result.unchecked:
        yield f"{file.path}: not checked: {file.why}"
    unchecked = f", {len(result.unchecked)} not checked" if result.unchecked else ""
    yield f"{count(result.chunks, 'chunk')} ({size(result.bytes)}) read: {len(result.bad)} bad{unchecked}"


def verification_json(found: RootSurvey, result: Verification) -> dict[str, Any]:
    return {
        "root": found.root,
        "chunks": result.chunks,
        "bytes": result.bytes,
        "bad": _files_json(result.bad),
        "unchecked": _files_json(result.unchecked),
    }


def _files_json(files: Iterable[BadFile]) -> list[dict[str, str]]:
    return [{"path": file.path, "kind": file.fault.value, "why": file.why} for file in files]


# gc, drop


def removal_line(removal: Removal) -> str:
    return f"{removal.path}: {removal.what.value}, {size(removal.bytes)}"


def removals_line(done: list[Removal], *, dry_run: bool) -> str:
    total = size(sum(removal.bytes for removal in done))
    return f"{count(len(done), 'item')} ({total}) {'would be ' if dry_run else ''}removed"


def removals_json(found: RootSurvey, done: list[Removal], *, dry_run: bool) -> dict[str, Any]:
    return {
        "root": found.root,
        "dry_run": dry_run,
        "bytes": sum(removal.bytes for removal in done),
        "removed": [{"path": r.path, "what": r.what.value, "bytes": r.bytes} for r in done],
    }


# explain


def pair_lines(pair: Pair) -> list[str]:
    (a, _), (b, _), differences = pair
    lines = [line for difference in differences for line in difference.lines()]
    return [f"a: {a}", f"b: {b}", *(f"  {line}" for line in lines or ["nothing differs: the two share their chunks"])]


def pairs_json(pairs: list[Pair]) -> dict[str, Any]:
    return {
        "pairs": [
            {"a": a, "b": b, "same": not differences, "differences": [d.to_json() for d in differences]}
            for (a, _), (b, _), differences in pairs
        ]
    }


# Words


def _words(value: Any) -> str:
    """A list of equal words is that word."""
    words = [str(word) for word in value] if isinstance(value, list) else [str(value)]
    return ", ".join(dict.fromkeys(words))


def _time(seconds: float) -> str:
    """UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
