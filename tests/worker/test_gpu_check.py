"""ci/gpu_check.sh runs where no test does; its steps are tried here with the host as the device."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "ci" / "gpu_check.py"


def test_dry_run(tmp_path: Path) -> None:
    """All checks pass, and the result says that no device took part. A store that swaps two rows makes this fail."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, SCRIPT, "--dry-run", "--quick", "--json", tmp_path / "result.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["dry_run"] is True
    assert result["problems"] == []
    assert result["checks"]["round_trips"] > 20
    assert result["bandwidth"]["load"]["32768"]["chosen"] > 0
