#!/usr/bin/env bash
# The device copy engine on a real GPU: byte-exact round trips, order against long kernels, failures, and bandwidth.
#
#     bash ci/gpu_check.sh                  under six minutes; prints a table, writes build/gpu_check.json
#     PYTHON=/path/to/python bash ...       needs torch with CUDA and numpy; Triton where small loads are to be fast
#     bash ci/gpu_check.sh --dry-run        the same steps with the host as the device: shows that the script runs
#
# Neither vLLM nor this package needs to be installed. Exit 0 means that every byte was right, every wait was needed and
# kept, and the bandwidth reached what README promises.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec env PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 \
    timeout --signal=INT --kill-after=20 350 "${PYTHON:-python3}" ci/gpu_check.py --json build/gpu_check.json "$@"
