#!/usr/bin/env bash
# ab_on_gpus.sh OUT [PYTHON [MINUTES]]: on 1 or more GPUs. Does `aorta ab` find 1 % more work in 3 of 3 series, and
# call one program against itself in none? As many series as there are GPUs run beside each other, each with a GPU
# and cores of its own, for MINUTES (3: six pairs); what they do not decide goes on with the same command.
# SERIES: some of "planted_1 same planted_2 planted_3". Needs torch, numpy, scipy, click, msgspec and psutil.
set -u
OUT=$1 PYTHON=${2:-python3} MINUTES=${3:-3}
mkdir -p "$OUT"
mapfile -t gpus < <(tr , '\n' <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}")
mapfile -t cores < <("$PYTHON" -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
share=$((${#cores[@]} / ${#gpus[@]}))
declare -A values=([planted_1]=100,101 [same]=100,+100 [planted_2]=101,100 [planted_3]=100,101)
series() { # NAME NUMBER_OF_GPU
  local own
  own=$(IFS=,; echo "${cores[*]:$(($2 * share)):share}")
  CUDA_VISIBLE_DEVICES=${gpus[$2]} taskset -c "$own" "$PYTHON" -m aorta ab --minutes "$MINUTES" \
    --matters 0.5% --env "WORK=${values[$1]}" -o "$OUT/$1" -- "$PYTHON" benchmarks/planted_loop.py \
    >"$OUT/$1.txt" 2>"$OUT/$1.err"
  echo "$1 (${values[$1]}): exit $?  $(head -1 "$OUT/$1.txt") $(tail -1 "$OUT/$1.err")"
}
number=0
for name in ${SERIES:-planted_1 same planted_2 planted_3}; do
  series "$name" $number &
  number=$(((number + 1) % ${#gpus[@]}))
  ((number)) || wait
done
wait
