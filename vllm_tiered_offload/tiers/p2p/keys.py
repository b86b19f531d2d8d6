"""Who may talk to us: CURVE keys and the allow-list.

libzmq asks for every new connection, with a request of the ZAP protocol (RFC 27) on an inproc socket, and learns
whether that key may connect and what its user is called. We call it by its key, so an identity cannot be chosen.
"""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"vllm-tiered-offload"
_ZAP_PARTS = 7
_KEY_CHARACTERS = 40


class KeyFileError(ValueError):
    """There is no key in the file. The text is one line and names the setting."""


class OwnKeys(NamedTuple):
    """A key pair, in Z85."""

    public: bytes
    secret: bytes


def read_key_file(path: str) -> OwnKeys:
    """The key pair whose secret half is in the file. Raises KeyFileError."""
    try:
        with Path(path).open("rb") as file:
            secret = file.read(4096).strip()
    except OSError as error:
        raise KeyFileError(f"key_file {path}: {error.strerror}") from error
    try:
        if len(secret) != _KEY_CHARACTERS:
            raise ValueError("length")
        return OwnKeys(zmq.curve_public(secret), secret)
    except (ValueError, zmq.ZMQError):
        raise KeyFileError(f"key_file {path}: expected one secret key, {_KEY_CHARACTERS} characters of Z85") from None


def answer_zap(parts: Sequence[bytes], allowed: Collection[str]) -> list[bytes]:
    """The answer to a request of libzmq's: a connection is allowed if its key is, and its user is named by the key."""
    request_id = parts[1] if len(parts) > 1 else b""
    user = ""
    if len(parts) == _ZAP_PARTS and parts[5] == b"CURVE" and len(parts[6]) == 32:
        user = z85.encode(parts[6]).decode("ascii")
    if user in allowed:
        return [b"1.0", request_id, b"200", b"OK", user.encode(), b""]
    return [b"1.0", request_id, b"400", b"not allowed", b"", b""]


def new_keys() -> OwnKeys:
    """A fresh key pair."""
    return OwnKeys(*zmq.curve_keypair())


def write_key_file(path: str, keys: OwnKeys) -> None:
    """A new file with the secret half, which its owner alone may read. Raises OSError, also where a file is there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)  # whatever the umask is
        file.write(keys.secret + b"\n")
