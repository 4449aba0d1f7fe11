#!/usr/bin/env bash
# Records and judges the plants of gpu.py, on 2 GPUs in about 8 minutes: on_gpus.sh OUT [GPUS [NAME,…]]
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: on_gpus.sh OUT [GPUS [NAME,…]]}
"${PYTHON:-python3}" "$here/judge.py" "$out" --gpus "${2:-2}" ${3:+--only "$3"} --output "$out/plants_gpu.csv"
