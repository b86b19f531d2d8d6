"""The peer tier's own settings block."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from vllm_tiered_offload.settings import Block

_Z85 = r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
PublicKey = Annotated[str, Field(pattern=rf"^{_Z85}$")]
"""A CURVE key as 40 characters of Z85."""

_HOST = re.compile(r"[0-9A-Za-z_.:-]{1,253}")


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can be, or reach, `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_host(host: str) -> str:
    if not _HOST.fullmatch(host):
        raise PydanticCustomError("host", "a host name or an address")
    return host


class PeerAddress(Block):
    """Where another engine listens, and the key that it must have."""

    host: str = Field(
        description="Host name or address. A name may stand for several engines (a headless service): each is a peer."
    )
    port: int = Field(ge=1, le=65535, description="Its `port`.")
    public_key: PublicKey | None = Field(
        default=None, description="Its public key; needed beyond this machine, and whoever has it may pull from us."
    )

    _host = field_validator("host")(_check_host)


class P2pTierSettings(Block):
    """One `{"type": "p2p", ...}` block. Times are in seconds."""

    peers: Annotated[tuple[PeerAddress, ...], Field(strict=False, max_length=64)] = Field(
        default=(), description="Engines to pull from: a list of objects with `host`, `port` and `public_key`."
    )
    listen: str = Field(default="127.0.0.1", description="Address to serve on; the default is this machine alone.")
    port: int = Field(default=0, ge=0, le=65535, description="Port to serve on; 0 takes any, which the log tells.")
    key_file: str | None = Field(
        default=None, description="File with our secret key, 40 characters of Z85. Needed beyond this machine."
    )
    allowed_keys: Annotated[tuple[PublicKey, ...], Field(strict=False)] = Field(
        default=(), description="Public keys that may pull from us, beside those of `peers`."
    )
    insecure_trusted_network: bool = Field(
        default=False,
        description="Do without keys beyond this machine: whoever reaches the port can read everybody's prompts.",
    )
    transport: Literal["auto", "nixl", "sockets"] = Field(
        default="auto",
        description="How rows travel: read out of the peer's memory with NIXL, or over sockets. auto: NIXL where both "
        "ends have it and are on one machine without a key_file: it neither encrypts nor asks who reads or writes.",
    )
    lease_seconds: float = Field(
        default=10.0, gt=0, le=3600, description="How long rows stay pinned for a peer that was told of them."
    )
    lease_share: float = Field(
        default=0.25, gt=0, le=1, description="Share of the host region that may be pinned for peers."
    )
    lookup_timeout: float = Field(default=0.5, gt=0, description="Until a peer that does not answer does not have it.")
    pull_timeout: float = Field(default=10.0, gt=0, description="Until rows that were asked for count as failed.")
    handover_timeout: float = Field(
        default=1.0,
        ge=0,
        description="How long a request waits for chunks that its `remote_prefiller` does not have yet; longer than "
        "`retry_timeout` only along with that.",
    )
    silence_timeout: float = Field(
        default=1.0, gt=0, description="Until a peer that owes an answer and says nothing at all is given up."
    )
    lookup_cache: float = Field(
        default=1.0, ge=0, description="How long other requests believe that no peer has a chunk, without asking."
    )
    resolve_period: float = Field(
        default=30.0, gt=0, description="Seconds between two looks at which addresses the names of `peers` have."
    )
    keep_on_reset: bool = Field(
        default=False,
        description="Go on sharing after a cache reset. Only right if the weights are the same afterwards.",
    )

    _host = field_validator("listen")(_check_host)

    @field_validator("key_file")
    @classmethod
    def _usable_path(cls, path: str | None) -> str | None:
        if path is not None and (not path.strip() or "\0" in path):
            raise PydanticCustomError("path", "the path of a file")
        return None if path is None else str(Path(path).expanduser().absolute())

    @model_validator(mode="after")
    def _keys_beyond_this_machine(self) -> Self:
        if self.key_file is not None or self.insecure_trusted_network:
            self._no_peer_without_key()
            return self
        outside = [self.listen, *(peer.host for peer in self.peers)]
        outside = [host for host in outside if not is_loopback(host)]
        if outside:
            raise PydanticCustomError(
                "keys",
                "a key_file, because {host} is not this machine (or insecure_trusted_network: true, if whoever reaches "
                "the port may read everybody's prompts)",
                {"host": outside[0]},
            )
        return self

    def _no_peer_without_key(self) -> None:
        """Under keys every peer has one."""
        for peer in self.peers if self.key_file is not None else ():
            if peer.public_key is None:
                raise PydanticCustomError(
                    "keys", "a public_key of peer {host}:{port}, because there is a key_file", {**peer.model_dump()}
                )

    @property
    def keys_that_may_pull(self) -> frozenset[str]:
        """The allow-list."""
        return frozenset(self.allowed_keys) | {peer.public_key for peer in self.peers if peer.public_key is not None}
