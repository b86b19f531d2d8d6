"""The command, and directories for it to look at, made by the tier itself."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fs"))  # fs_kit
sys.path.insert(0, str(Path(__file__).parents[1] / "p2p"))  # p2p_kit

from cli_kit import Command


@pytest.fixture
def fs(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "fs")


@pytest.fixture
def p2p(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "p2p")
