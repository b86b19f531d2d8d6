#!/usr/bin/env bash
# Proves that the tests would notice: each patch in tests/mutants/ breaks one invariant of DESIGN in a scratch copy of
# this tree, and the fast test that it names must fail there, and little else. About 35 minutes on two cores.
#
#     bash ci/mutants.sh [--named-only] [--jobs N] [NAME ...]   --named-only runs the named tests alone, in two minutes;
#                                                               NAMEs are mutants: tests/mutants/NAME.patch
#     VENV=/path/to/venv bash ci/mutants.sh                     as for ci/test.sh
#
# The last line is `N killed, M survived`; the status is 0 only when all were killed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/env.sh

use_test_venv
exec "$VENV/bin/python" tests/mutants/run_mutants.py "$@"
