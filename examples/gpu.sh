#!/usr/bin/env bash
# The quickstart on a GPU: conversations leave the device for host memory and disk, come back from host memory, and after
# a restart of the engine come back from disk.
#
#     bash examples/gpu.sh                       makes .venv-gpu, installs, gets a small model, runs, prints a table
#     VENV=/path/to/venv bash examples/gpu.sh    uses an environment that has everything, and installs nothing
#
# It has not been run on a GPU yet (README, Status). Exit 0 means what it means for examples/quickstart.sh: every answer,
# from every source, was equal to a reference engine without the connector, log-probabilities included. That needs
# kernels whose results do not depend on what else is in the batch, hence VLLM_BATCH_INVARIANT; where vLLM has none for
# your device, compare texts instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/env.sh

command -v nvidia-smi >/dev/null && nvidia-smi -L || die "no NVIDIA GPU was found here; examples/quickstart.sh needs none"

if [ -z "${VENV:-}" ]; then
    VENV=$PWD/.venv-gpu
    make_venv "$VENV"
    say "installing vllm-tiered-offload with vLLM's CUDA build (the first time this takes minutes)"
    build_wheel "$VENV" build/wheel
    pip_install "$VENV" "$(echo build/wheel/*.whl)[cuda]"
    pip_install "$VENV" --no-deps --force-reinstall build/wheel/*.whl
    install_test_model "$VENV"
fi
export VENV VLLM_BATCH_INVARIANT=1

say "the copy engine by itself"
PYTHON=$VENV/bin/python bash ci/gpu_check.sh || die "ci/gpu_check.sh failed: see above before you trust any answer"

exec bash examples/quickstart.sh
