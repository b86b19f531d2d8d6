#!/usr/bin/env bash
# Everything that must hold before a change lands, on a fresh machine: style, types, unit and simulator tests, and the
# end-to-end tests on a real `vllm serve`. The tests meet the built wheel, as a user would, and not this source tree.
#
#     bash ci/test.sh [--all] [--fast]     --all also runs the slow tests; --fast leaves the end-to-end tests out
#     bash ci/test.sh --matrix             every version of vLLM that we run on, a short look at each: ci/matrix.sh
#     VENV=/path/to/venv bash ci/test.sh   uses an environment that has everything, and installs nothing into it:
#                                          the tests then meet whatever vllm_tiered_offload it has
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/env.sh

REPOSITORY=$PWD
PYTHON_SOURCES=(vllm_tiered_offload tests examples ci)
SLOW="and not slow"
END_TO_END=yes
for option in "$@"; do
    case $option in
        --all) SLOW="" ;;
        --fast) END_TO_END=no ;;
        --matrix) exec bash ci/matrix.sh ;;
        *) die "unknown option $option; known: --all, --fast, --matrix" ;;
    esac
done

use_test_venv

say "ruff"
"$VENV/bin/ruff" format --check "${PYTHON_SOURCES[@]}"
"$VENV/bin/ruff" check "${PYTHON_SOURCES[@]}"
say "mypy"
"$VENV/bin/mypy" vllm_tiered_offload
say "unit and simulator tests"
run_tests -m "not e2e $SLOW" "$REPOSITORY/tests"
say "mutants, against the tests that they name"
bash ci/mutants.sh --named-only
if [ "$END_TO_END" = yes ]; then
    say "end-to-end tests on vllm serve"
    run_tests -m "e2e $SLOW" "$REPOSITORY/tests/e2e"
fi
