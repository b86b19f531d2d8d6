#!/usr/bin/env bash
# Conversations come back from host memory on a real `vllm serve`, on a machine without an accelerator.
#
#     bash examples/host_memory.sh               makes .venv, installs, gets a small model, runs, prints a table
#     VENV=/path/to/venv bash examples/...       uses an environment that has everything, and installs nothing
#
# A reference engine without the connector answers first. Then an engine with it answers the same prompts cold, from
# the device cache, and from host memory after other prompts have pushed them out of the device. Exit 0 means that
# every answer was equal to the reference, log-probabilities included, and that tokens were really loaded.
# The result is in build/host_memory.json, the engines' output in build/host_memory.*.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
EXAMPLE=host_memory
source examples/serve.sh

HOST_MEMORY=2GiB
KV_BYTES_PER_TOKEN=23040 # 30 layers, keys and values, 3 heads of 64, 2 bytes each

prepare
rm -f build/host_memory.json

start_engine reference
client reference
stop_engine

start_engine offload --kv-transfer-config '{
    "kv_connector": "TieredOffloadConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu": {"capacity": "'"$HOST_MEMORY"'"}}
}'
client offload --device-tokens $((DEVICE_BLOCKS * 32)) --kv-bytes-per-token "$KV_BYTES_PER_TOKEN" \
    --json build/host_memory.json
say "done: build/host_memory.json"
