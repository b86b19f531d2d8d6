"""The filesystem tier through the conformance suite for secondary tiers, faults of its files included."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_tiered_offload import OffloadKey, SecondaryTierManager
from vllm_tiered_offload.testing.conformance import Faults, SecondaryTierConformance
from vllm_tiered_offload.tiers.fs.files import Files
from vllm_tiered_offload.tiers.fs.tier import FsTier


class UnreliableFiles(Files):
    """Reads and writes of chunks fail while `broken`, and wait while `open_road` is not set."""

    def __init__(self) -> None:
        self.broken = False
        self.open_road = threading.Event()
        self.open_road.set()

    def _pass(self) -> None:
        self.open_road.wait()
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass()
        return super().pwritev(fd, buffers, offset)


class FsFaults(Faults):
    def __init__(self, files: UnreliableFiles) -> None:
        self.files = files

    def _path(self, tier: SecondaryTierManager, key: OffloadKey) -> Path:
        assert isinstance(tier, FsTier)
        return Path(tier._holdings.namespace.file_path(key))

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> None:
        with self._path(tier, key).open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))

    def lose(self, tier: SecondaryTierManager, key: OffloadKey) -> None:
        self._path(tier, key).unlink()

    @contextmanager
    def broken(self, tier: SecondaryTierManager) -> Iterator[None]:
        self.files.broken = True
        yield
        self.files.broken = False

    @contextmanager
    def hanging(self, tier: SecondaryTierManager) -> Iterator[None]:
        self.files.open_road.clear()
        try:
            yield
        finally:
            self.files.open_road.set()


class TestFs(SecondaryTierConformance):
    @pytest.fixture
    def tier_class(self) -> type[SecondaryTierManager]:
        return FsTier

    @pytest.fixture
    def tier_settings(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"root": str(tmp_path / "kv"), "share_refresh": 0.1}

    @pytest.fixture
    def files(self) -> UnreliableFiles:
        return UnreliableFiles()

    @pytest.fixture(autouse=True)
    def _short_shutdown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What hangs is given up on sooner than in production, so that the tests are quick."""
        monkeypatch.setattr("vllm_tiered_offload.tiers.fs.tier.SHUTDOWN_SECONDS", 0.5)

    @pytest.fixture
    def shutdown_limit(self) -> float:
        return 2.0

    @pytest.fixture
    def new_tier(self, tier_settings: Mapping[str, Any], files: UnreliableFiles) -> Callable[..., SecondaryTierManager]:
        def make(engine_id: str = "engine-1", events: bool = False) -> SecondaryTierManager:
            return FsTier.from_settings(tier_settings, engine_id=engine_id, events=events, files=files)

        return make

    @pytest.fixture
    def faults(self, files: UnreliableFiles) -> FsFaults:
        return FsFaults(files)


class TestFsWithCapacity(TestFs):
    """A capacity makes the tier scan before it stores, and evict."""

    @pytest.fixture
    def tier_settings(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"root": str(tmp_path / "kv"), "share_refresh": 0.1, "capacity": "16MiB", "io": "buffered"}
