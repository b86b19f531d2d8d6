"""Whatever lies in a directory, the two parsers answer with a value or with their own error, and never with a lie.

The frame: no file but the very one that was stored passes for it. The manifest: only what says exactly what a manifest
says is one, and nothing in it can point anywhere or stop a reader.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from fs_kit import ROW, Bench, fingerprint, keys_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vllm_tiered_offload.tiers.block_frame import (
    HEADER_BYTES,
    FrameError,
    FrameFault,
    decode_header,
    encode_header,
    expect,
    verify,
)
from vllm_tiered_offload.tiers.fs.faults import NamespaceError
from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.inspect import Entry, Kind, check_chunk, walk
from vllm_tiered_offload.tiers.fs.manifest import FORMAT, MANIFEST, MAX_BYTES, Manifest, ManifestError, read_manifest
from vllm_tiered_offload.tiers.fs.namespace import Namespace
from vllm_tiered_offload.tiers.fs.owner import Owner, host_token

[KEY, OTHER] = keys_of("fuzz", 2)
SPACE, ELSEWHERE = (bytes.fromhex(fingerprint(model=name).digest) for name in ("a", "b"))
PAYLOAD = bytes(range(256)) * 4
FRAME = encode_header(KEY, PAYLOAD, SPACE) + PAYLOAD
STRANGERS = [
    encode_header(OTHER, PAYLOAD, SPACE) + PAYLOAD,
    encode_header(KEY, PAYLOAD, ELSEWHERE) + PAYLOAD,
    encode_header(KEY, PAYLOAD[:-1], SPACE) + PAYLOAD[:-1],
    bytes(len(FRAME)),
]
OWNER = Owner("engine", host_token(), os.getpid(), 12345)
MANIFESTS = [Manifest.new(fingerprint(), None).to_bytes(), Manifest.new(fingerprint(), OWNER).to_bytes()]

thorough = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_frame(data: bytes) -> bytes:
    """The payload, the way that the tier reads it. Raises FrameError."""
    header = decode_header(data)
    payload = data[HEADER_BYTES:]
    expect(header, KEY, SPACE, len(PAYLOAD))
    verify(header, payload)
    return payload


# (what, where, how much): one accident. A test prints these and not the bytes.
Accident = tuple[str, float, int]
accidents = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "stretch", "remove", "zero", "splice", "turn"]),
        st.floats(0, 1),
        st.integers(0, 70),
    ),
    max_size=3,
)


def after(whole: bytes, happened: list[Accident], others: list[bytes]) -> bytes:
    """`whole` with bits flipped, cut off, stretched, a piece lost, blanked or turned, the end of another one."""
    data = bytearray(whole)
    for what, where, number in happened:
        at = int(where * len(data))
        match what:
            case "flip" if at < len(data):
                data[at] ^= 1 << number % 8
            case "cut":
                del data[at:]
            case "stretch":
                data[at:at] = bytes([number]) * (number + 1)
            case "remove":
                del data[at : at + number]
            case "zero":
                data[at : at + number] = bytes(len(data[at : at + number]))
            case "turn":
                data[at : at + number] = data[at : at + number][::-1]
            case "splice":
                data[at:] = others[number % len(others)][at:]
    return bytes(data)


# The frame


@given(accidents)
@thorough
@example([])
@example([("cut", 1.0, 0), ("stretch", 1.0, 0)])
@example([("splice", 0.0, 0)])
@example([("splice", 0.0, 1)])
def test_only_the_frame_itself_is_the_frame(happened: list[Accident]) -> None:
    """Mutations: leaving key, fingerprint or length out of `expect`, or a checksum out, lets one pass."""
    data = after(FRAME, happened, STRANGERS)
    good = data == FRAME
    try:
        same = read_frame(data) == PAYLOAD
    except FrameError as error:
        assert error.kind in FrameFault  # noqa: PT017
        assert not good
    else:
        assert same
        assert good


@pytest.fixture
def chunk(tmp_path: Path) -> tuple[Path, Entry]:
    bench = Bench(tmp_path)
    bench.fill([KEY])
    bench.store([KEY])
    [entry] = [entry for entry in walk(str(tmp_path), pytest.fail) if entry.kind is Kind.CHUNK]
    return bench.path(KEY), entry


@given(happened=accidents)
@thorough
def test_a_damaged_file_is_neither_served_nor_called_good(chunk: tuple[Path, Entry], happened: list[Accident]) -> None:
    """`fs verify` calls good what a load would serve, and nothing else; a load removes only what is bad."""
    path, entry = chunk
    whole = path.read_bytes()
    assert len(whole) == HEADER_BYTES + ROW
    data = after(whole, happened, [bytes(len(whole)), whole[::-1]])
    good = data == whole
    path.write_bytes(data)
    try:
        assert (check_chunk(Files(), entry) is None) == good
        tier = Bench(path.parents[3])
        assert tier.load([KEY]).success == good
        assert path.exists() or not good
        tier.assert_idle()
    finally:
        path.write_bytes(whole)


# The manifest


def changed(**changes: Any) -> bytes:
    """A manifest, some of whose members are something else."""
    return json.dumps({**json.loads(MANIFESTS[1]), **changes}).encode()


def with_fields(*pairs: tuple[str, str]) -> bytes:
    return changed(fingerprint=json.dumps(sorted(pairs)))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
members = st.sampled_from(["format", "created", "fingerprint", "private_to", "fields", "about"])


@given(st.binary(max_size=300))
@thorough
def test_any_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.parse(data)


@given(st.sampled_from(MANIFESTS), accidents)
@thorough
def test_a_damaged_manifest_is_one_or_none(whole: bytes, happened: list[Accident]) -> None:
    """Where the damage leaves it a manifest (of something else), it can be read, written and shown."""
    data = after(whole, happened, MANIFESTS)
    try:
        manifest = Manifest.parse(data)
    except ManifestError as error:
        assert str(error).isprintable()  # noqa: PT017
        return
    assert Manifest.parse(manifest.to_bytes()) == manifest
    json.dumps(manifest.values, allow_nan=False).encode()
    assert "/" not in repr(manifest.private_to)


@given(st.dictionaries(members, anything, max_size=3))
@thorough
def test_any_json_is_a_manifest_or_a_manifest_error(changes: dict[str, Any]) -> None:
    try:
        manifest = Manifest.parse(changed(**changes))
    except ManifestError:
        return
    assert changes.get("format", FORMAT) == FORMAT
    assert manifest.fingerprint == fingerprint() or "fingerprint" in changes
    assert manifest.private_to == OWNER or changes["private_to"] is None


HOSTILE = {
    "not UTF-8": (b"\xff\xfe" + MANIFESTS[0], "is not UTF-8 text"),
    "UTF-16": (MANIFESTS[0].decode().encode("utf-16"), "is not UTF-8 text"),
    "too long": (MANIFESTS[0] + b" " * MAX_BYTES, "is larger than"),
    "empty": (b"", "is not JSON"),
    "half": (MANIFESTS[0][:-20], "is not JSON"),
    "two": (MANIFESTS[0] * 2, "is not JSON"),
    "nested": (b"[" * 200_000, "is not JSON"),
    "a list": (b"[]", "is not a JSON object"),
    "a number with many digits": (b'{"format": ' + b"9" * 100_000 + b"}", "is not JSON"),
    "no format": (changed(format=None), "is not of the format"),
    "a newer format": (changed(format="vllm-tiered-offload fs 2"), "is not of the format"),
    "no time": (changed(created="<script>"), "does not say when"),
    "other digits": (changed(created="\u0661234-01-01T00:00:00Z"), "does not say when"),
    "no fingerprint": (changed(fingerprint=None), "has no fingerprint"),
    "an empty fingerprint": (changed(fingerprint="[]"), "cannot be read"),
    "a fingerprint of numbers": (changed(fingerprint="[[1,2]]"), "cannot be read"),
    "a fingerprint that is nested": (changed(fingerprint="[" * 100_000), "cannot be read"),
    "a field that is a path": (with_fields(("../../etc", "1")), "no name"),
    "a field with an escape": (with_fields(("a\x1b[31m", "1")), "no name"),
    "a value that is no JSON": (with_fields(("model", "tiny")), "model is not plain JSON"),
    "a value that is not finite": (with_fields(("model", "NaN")), "model is not plain JSON"),
    "a value beyond all floats": (with_fields(("model", "[1e999]")), "model is not plain JSON"),
    "a value nested too deep": (with_fields(("model", "[" * 50 + "]" * 50)), "model is not plain JSON"),
    "a value nested far too deep": (with_fields(("model", "[" * 90_000 + "]" * 90_000)), "model is not plain JSON"),
    "an owner that is a list": (changed(private_to=["engine", "host", 1]), "whose private generation"),
    "an owner that is false": (changed(private_to=False), "whose private generation"),
    **{
        f"an owner with {field} {value!r:.20}": (
            changed(private_to={"engine": "engine", "host": "0" * 12, "pid": 1, "started": 1, field: value}),
            "whose private generation",
        )
        for field, values in {
            "engine": ["../../etc", "a/b", "", None, "x" * 100, "ü", "a\n"],
            "host": ["../", "0" * 11, "g" * 12, 12, None],
            "pid": [0, -1, True, "1", 1.0, 1 << 80, None],
            "started": [-1, True, "1", 1.0, 1 << 80, None],
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    """By the parser, and by an engine: it neither uses the directory nor takes anything away."""
    data, reason = HOSTILE[name]
    with pytest.raises(ManifestError, match=reason):
        Manifest.parse(data)
    namespace = Namespace(Files(), str(tmp_path), fingerprint(), "engine", private=False)
    directory = Path(namespace.path)
    directory.mkdir(parents=True)
    (directory / MANIFEST).write_bytes(data)
    for use in (namespace.check, namespace.prepare_for_writing):
        with pytest.raises(NamespaceError, match=r"this directory is not used; remove it to start anew") as caught:
            use()
        assert reason in str(caught.value)
    assert (directory / MANIFEST).read_bytes() == data
    Bench(tmp_path, model=fingerprint(model="neighbour"))
    assert directory.is_dir(), "nobody collects what does not say whose it is"


@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
def test_a_manifest_that_is_no_file_neither_hangs_nor_leads_away(tmp_path: Path, kind: str) -> None:
    """Mutation: opening without O_NONBLOCK waits for ever for somebody to write into the pipe."""
    path = tmp_path / MANIFEST
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "real").write_bytes(MANIFESTS[0])
        path.symlink_to(tmp_path / "real")
    else:
        path.mkdir()
    with pytest.raises((OSError, ManifestError)):
        read_manifest(Files(), str(tmp_path))


def test_a_recursion_limit_is_no_way_out() -> None:
    """Wherever the reader stands, deep nesting is a reason and no crash."""

    def deeper(frames: int) -> None:
        if frames:
            deeper(frames - 1)
        else:
            with pytest.raises(ManifestError):
                Manifest.parse(with_fields(("model", "[" * 90_000)))

    deeper(sys.getrecursionlimit() // 2)
