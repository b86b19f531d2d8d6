#!/usr/bin/env bash
# The whole thing in five minutes on a machine without an accelerator: conversations leave the device for host memory and
# disk, come back from host memory, and after a restart of the engine come back from disk.
#
#     bash examples/quickstart.sh                makes .venv, installs, gets a small model, runs, prints a table
#     VENV=/path/to/venv bash examples/...       uses an environment that has everything, and installs nothing
#
# A reference engine without the connector answers first. Exit 0 means that every answer, from every source, was equal to
# the reference, log-probabilities included, and that tokens were really loaded from both tiers.
# The result is in build/quickstart.json, the engines' output in build/quickstart.*.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
EXAMPLE=quickstart
source examples/serve.sh

DISK=$PWD/build/quickstart.kv

prepare
rm -rf build/quickstart.json "$DISK"

start_engine reference
client reference
stop_engine

CONNECTOR='{
    "kv_connector": "TieredOffloadConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "cpu": {"capacity": "1GiB"},
        "tiers": [{"type": "fs", "root": "'"$DISK"'", "capacity": "4GiB"}]
    }
}'
start_engine first --kv-transfer-config "$CONNECTOR"
client first --state build/quickstart.state.json --root "$DISK" --device-tokens $((DEVICE_BLOCKS * 32))
stop_engine

start_engine restarted --kv-transfer-config "$CONNECTOR"
client restarted --state build/quickstart.state.json --json build/quickstart.json
stop_engine
rm -rf "$DISK"
say "done: build/quickstart.json"
