"""The tier's conformance: a few empty classes, and fixtures for what only its author knows."""

import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from vllm_tiered_offload import OffloadKey
from vllm_tiered_offload.testing import conformance

from compressed_tier import CompressedTier


class Faults(conformance.Faults):
    """Trouble in a medium that is a dictionary and a compressor."""

    def damage(self, tier: CompressedTier, key: OffloadKey) -> None:
        tier._chunks[key] = tier._chunks[key][:-1] + bytes([tier._chunks[key][-1] ^ 1])  # zlib ends with a checksum

    def lose(self, tier: CompressedTier, key: OffloadKey) -> None:
        tier._drop(key)

    @contextmanager
    def broken(self, tier: CompressedTier) -> Iterator[None]:
        with (
            patch.object(zlib, "compress", side_effect=zlib.error),
            patch.object(zlib, "decompress", side_effect=zlib.error),
        ):
            yield

    @contextmanager
    def hanging(self, tier: CompressedTier) -> Iterator[None]:
        go_on = threading.Event()

        def wait_first(call: Callable[..., bytes]) -> Callable[..., bytes]:
            return lambda *args: call(*args) if go_on.wait() else b""

        try:
            with (
                patch.object(zlib, "compress", wait_first(zlib.compress)),
                patch.object(zlib, "decompress", wait_first(zlib.decompress)),
            ):
                yield
        finally:
            go_on.set()


class Compressed(conformance.SecondaryTierFixtures):
    @pytest.fixture
    def tier_class(self) -> type[CompressedTier]:
        return CompressedTier

    @pytest.fixture
    def tier_settings(self) -> Mapping[str, Any]:
        return {"capacity": "64MiB"}

    @pytest.fixture
    def faults(self) -> Faults:
        return Faults()

    @pytest.fixture
    def survives_restart(self) -> str:
        return "the chunks are in this process's memory"

    @pytest.fixture
    def shares_between_instances(self) -> str:
        return "the chunks are in this process's memory"

    @pytest.fixture
    def reports_events(self) -> str:
        return "left out of the example"


class TestContract(Compressed, conformance.ContractTests): ...


class TestTelling(Compressed, conformance.TellingTests): ...


class TestThreads(Compressed, conformance.ThreadTests): ...


class TestBytes(Compressed, conformance.BytesTests): ...


class TestDeadlines(Compressed, conformance.DeadlineTests): ...


class TestFaults(Compressed, conformance.FaultTests): ...


class TestRestart(Compressed, conformance.RestartTests): ...


class TestReset(Compressed, conformance.ResetTests): ...


class TestShutdown(Compressed, conformance.ShutdownTests): ...
