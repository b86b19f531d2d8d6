# What the examples share: an environment, a small model, and `vllm serve` with it. Source it from the repository's root.
#
# The caller sets EXAMPLE, the name that its files in build/ carry.
source ci/env.sh

MODEL=build/SmolLM2-135M-Instruct
NAME=SmolLM2-135M-Instruct
DEVICE_BLOCKS=200 # of 32 tokens: two of the conversations fit, seven do not

# Everything runs from files that are here already.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# vLLM sets one core more aside for a connector. All engines must compute with as many threads: it decides how fast
# they are, and also how sums are rounded.
export VLLM_CPU_NUM_OF_RESERVED_CPU=1
export VLLM_CPU_KVCACHE_SPACE=1 # GiB; the number of blocks above decides, this only has to be enough

ENGINES=() # that run, the newest last
stop_engine() {
    [ ${#ENGINES[@]} -eq 0 ] || stop_group "${ENGINES[-1]}"
    unset 'ENGINES[-1]'
}
stop_engines() {
    while [ ${#ENGINES[@]} -gt 0 ]; do stop_engine; done
}
trap stop_engines EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# prepare: an environment with this package in it, unless VENV names one, and the model.
prepare() {
    mkdir -p build
    if [ -z "${VENV:-}" ]; then
        VENV=.venv
        make_venv "$VENV"
        say "installing vllm-tiered-offload with vLLM's CPU build (the first time this takes minutes)"
        build_wheel "$VENV" build/wheel
        pip_install "$VENV" "$(echo build/wheel/*.whl)[cpu]"
        pip_install "$VENV" --no-deps --force-reinstall build/wheel/*.whl # the same version, maybe of newer sources
        drop_broken_torch_extras "$VENV"
        install_test_model "$VENV"
    fi
    "$VENV/bin/python" examples/make_model.py "$MODEL"
}

# start_engine LABEL [vllm serve arguments]: in a process group of its own, so that all of it can be ended.
start_engine() {
    local log=build/$EXAMPLE.$1.log port
    port=$(free_port "$VENV")
    say "starting vllm serve: $1 (output in $log)"
    shift
    URL=http://127.0.0.1:$port
    vllm_serve "$VENV" "$MODEL" --served-model-name "$NAME" --host 127.0.0.1 --port "$port" \
        --dtype bfloat16 --block-size 32 --num-gpu-blocks-override "$DEVICE_BLOCKS" --max-model-len 4096 \
        --max-num-batched-tokens 4096 --enforce-eager --shutdown-timeout 20 "$@" >"$log" 2>&1 </dev/null &
    ENGINES+=($!)
    wait_healthy "${ENGINES[-1]}" "$URL" "$log"
}

# client RUN [arguments]: the example's own client against the engine that runs now.
client() {
    "$VENV/bin/python" "examples/$EXAMPLE.py" "$1" --url "$URL" --model "$NAME" \
        --answers "build/$EXAMPLE.reference.json" "${@:2}"
}
