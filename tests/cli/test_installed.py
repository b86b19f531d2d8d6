"""The command as pip installs it."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest


@pytest.mark.skipif(
    os.environ.get("VTO_EXPECT_INSTALLED") != "1", reason="ci/test.sh alone promises an installed wheel"
)
def test_the_command_is_there(tmp_path: Path) -> None:
    command = Path(sysconfig.get_path("scripts")) / "vllm-tiered-offload"
    done = subprocess.run([command, "fs", "ls", tmp_path], check=True, capture_output=True, text=True, timeout=60)
    assert "fingerprint" in done.stdout
