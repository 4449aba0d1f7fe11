#!/usr/bin/env bash
# cost_on_gpus.sh OUT [PYTHON [SECONDS [LOOP...]]]: on 2 GPUs, 5 min. What does recording cost? Loops whose cost is
# known worst come first; SECONDS (28) go into the blocks of each. KINDS=left_out asks for that kind of blocks alone
# (70 s of each of tp, item and foreach for an interval of 0.01 to each side: 4 min).
set -u
OUT=$1 PYTHON=${2:-python3} SECONDS_OF_A_LOOP=${3:-28}
shift $(($# < 3 ? $# : 3))
mkdir -p "$OUT"
timeout 345 "$PYTHON" -m torch.distributed.run --nproc_per_node 2 --master_port 29722 benchmarks/cost_loops.py \
  ${KINDS:+--kinds $KINDS} --loops ${*:-item tp ddp buckets foreach fsdp_short fsdp} --seconds "$SECONDS_OF_A_LOOP" --limit-seconds 5 \
  --output "$OUT/cost_loops.csv" 2>"$OUT/cost_loops.err" | tee "$OUT/cost_loops.txt"
