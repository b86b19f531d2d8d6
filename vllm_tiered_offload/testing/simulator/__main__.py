"""`python -m vllm_tiered_offload.testing.simulator`; everything is in `cli`, which child processes can import."""

import os
import sys

from vllm_tiered_offload.testing.simulator.cli import main


def with_fixed_hashes() -> None:
    """Start over with Python's hash seed fixed: sets of strings are iterated in its order, and a seed means one run."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})


if __name__ == "__main__":
    with_fixed_hashes()
    sys.exit(main())
