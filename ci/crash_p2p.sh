#!/usr/bin/env bash
# Kills an engine that others pull from at N random moments, each time with some bytes pulled and some not, over sockets
# and through NIXL, and checks what the puller makes of it (tests/p2p/p2p_crash.py says exactly what).
#
#     bash ci/crash_p2p.sh [N]        N is 50; the last line says "N kills, 0 wrong, 0 leaked", or the exit code is 1
#     SEED=7 bash ci/crash_p2p.sh     other moments
#     PYTHON=.venv-test/bin/python bash ci/crash_p2p.sh    a Python that has the package's dependencies
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/env.sh

run_on_this_tree vllm_tiered_offload.tiers.p2p.tier tests/p2p/p2p_crash.py "${1:-50}"
