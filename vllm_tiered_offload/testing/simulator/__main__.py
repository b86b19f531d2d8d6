"""`python -m vllm_tiered_offload.testing.simulator`; everything is in `cli`, which child processes can import."""

import sys

from vllm_tiered_offload.testing.simulator.cli import main

if __name__ == "__main__":
    sys.exit(main())
