#!/usr/bin/env bash
# Runs the fifteen programs that run out of memory on 2 GPUs, and judges them, in about 4 minutes: memory_on_gpus.sh OUT
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: memory_on_gpus.sh OUT}
"${PYTHON:-python3}" "$here/memory.py" "$out" --output "$out/memory_plants.csv"
