#!/usr/bin/env bash
# Two engines of one model: what A has computed, B pulls out of A's memory. Then A is killed in the middle of a pull.
#
#     bash examples/two_engines.sh               makes .venv, installs, gets a small model, runs, prints a table
#     VENV=/path/to/venv bash examples/...       uses an environment that has everything, and installs nothing
#     TRANSPORT=sockets bash examples/...        rows go over sockets although NIXL is installed
#
# A reference engine without the connector answers first. Then A answers prompts of 2,900 tokens, and B is asked the same
# ones, and others that nobody has. Exit 0 means that every answer was equal to the reference (log-probabilities too,
# but for the request whose peer was killed under it: it computes in a batch of another shape), that every prompt came
# whole, and that B went on when A was gone.
# The result is the last line and in build/two_engines.json, the engines' output in build/two_engines.*.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
EXAMPLE=two_engines
source examples/serve.sh

prepare
rm -f build/two_engines.json

# connector TIER_SETTINGS: on loopback peers need no keys.
connector() {
    echo '{
        "kv_connector": "TieredOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu": {"capacity": "1GiB"}, "tiers": [{"type": "p2p", "transport": "'"${TRANSPORT:-auto}"'", '"$1"'}]}
    }'
}

start_engine reference
client reference
stop_engine

PORT=$(free_port "$VENV")
start_engine A --kv-transfer-config "$(connector '"port": '"$PORT")"
client seed
GROUP_OF_A=${ENGINES[-1]}
disown "$GROUP_OF_A" # that it gets killed is no news

# B can also reach A through a gate of the client, which shuts it in the middle of a pull.
GATE=$(free_port "$VENV")
peer() { echo '{"host": "127.0.0.1", "port": '"$1"'}'; }
start_engine B --kv-transfer-config "$(connector '"peers": ['"$(peer "$PORT"), $(peer "$GATE")"']')"
client pull --owner "$GROUP_OF_A" --owner-port "$PORT" --gate "$GATE" --json build/two_engines.json
