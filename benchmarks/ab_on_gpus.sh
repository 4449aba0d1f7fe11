#!/usr/bin/env bash
# ab_on_gpus.sh OUT [PYTHON [MINUTES]]: on 1 or 2 GPUs, 4 min. Does `aorta ab` find 1 % more work in 3 of 3 series,
# and call one program against itself in none? What its MINUTES (0.95 a series) do not decide goes on with the same
# command. Needs torch, numpy, scipy, click, msgspec and psutil.
set -u
OUT=$1 PYTHON=${2:-python3} MINUTES=${3:-0.95}
mkdir -p "$OUT"
export XDG_STATE_HOME=$OUT/state
num=$("$PYTHON" -c 'import torch; print(max(1, min(2, torch.cuda.device_count())))')
# A launcher takes seconds of every run, and one process needs none.
launch=()
((num > 1)) && launch=(-m torch.distributed.run --standalone --nproc_per_node "$num")
series() { # NAME VALUES
  "$PYTHON" -m aorta ab -n 4 --minutes "$MINUTES" --matters 0.5% --env "WORK=$2" -o "$OUT/$1" -- \
    "$PYTHON" "${launch[@]}" benchmarks/planted_loop.py \
    >"$OUT/$1.txt" 2>"$OUT/$1.err"
  echo "$1 ($2, $num GPUs): exit $?  $(head -1 "$OUT/$1.txt") $(tail -1 "$OUT/$1.err")"
}
series planted_1 100,101
series same 100,+100
series planted_2 101,100
series planted_3 100,101
