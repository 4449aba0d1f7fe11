#!/usr/bin/env bash
# cost_on_gpus.sh OUT [PYTHON]: on 2 GPUs, 5 min. Are learned collectives those that happened, and what does
# recording cost? The loops in which it cost most come first and have most time.
set -u
OUT=$1 PYTHON=${2:-python3}
mkdir -p "$OUT"
timeout 130 "$PYTHON" -m pytest -n 0 -q tests/gpu/test_nccl.py -k "learned or old_names" >"$OUT/learned.txt" 2>&1
echo "learned collectives: exit $?"
tail -3 "$OUT/learned.txt"
loops() { # SECONDS LOOP...
  local seconds=$1 port=$((29700 + $1))
  shift
  timeout 170 "$PYTHON" -m torch.distributed.run --nproc_per_node 2 --master_port "$port" benchmarks/cost_loops.py \
    --loops "$@" --seconds "$seconds" --limit-seconds 6 --output "$OUT/cost_loops_$seconds.csv" \
    2>"$OUT/cost_loops_$seconds.err" | tee -a "$OUT/cost_loops.txt"
}
loops 22 buckets item tp ddp
loops 13 fsdp_short foreach fsdp
