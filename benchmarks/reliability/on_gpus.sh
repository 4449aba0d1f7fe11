#!/usr/bin/env bash
# on_gpus.sh OUT: restarts and endings over NCCL on two GPUs, in three minutes; tables on stdout, rows in OUT.
set -uo pipefail
out=${1:?usage: on_gpus.sh OUT}
mkdir -p "$out"
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=$(cd "$here/../.." && pwd)${PYTHONPATH:+:$PYTHONPATH}
# The trials are short and small: several at once on the same two GPUs.
timeout 165 "$python" "$here/endings.py" --backend nccl --ranks 2 --jobs 2 --timeout-s 10 --limit-s 100 --total-s 120 \
    --only sleeps sigkill segv abort exception _exit-7 _exit-0 early --output "$out/endings_nccl.csv" \
    > "$out/endings_nccl.log" 2>&1 &
endings=$!
timeout 170 "$python" "$here/restarts.py" --trials 20 --backend nccl --jobs 6 --hang-s 12 --limit-s 90 \
    --total-s 110 --output "$out/restarts_nccl.csv" > "$out/restarts_nccl.log" 2>&1
tail -2 "$out/restarts_nccl.log"
wait "$endings"
tail -10 "$out/endings_nccl.log"
