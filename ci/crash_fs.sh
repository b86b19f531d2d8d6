#!/usr/bin/env bash
# Kills a process that writes through the filesystem tier at N random moments, each time with a write in flight, and
# checks what it leaves and what a restart makes of it (tests/fs/fs_crash.py says exactly what).
#
#     bash ci/crash_fs.sh [N]         N is 100; the last line says "N kills, 0 corrupt, 0 leftovers", or the exit code is 1
#     ROOT_DIRECTORY=/mnt/disk bash ci/crash_fs.sh    on that filesystem instead of the one of temporary files
#     SEED=7 bash ci/crash_fs.sh      other moments
#     PYTHON=.venv-test/bin/python bash ci/crash_fs.sh    a Python that has the package's dependencies
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/env.sh

run_on_this_tree vllm_tiered_offload.tiers.fs.tier tests/fs/fs_crash.py "${1:-100}"
