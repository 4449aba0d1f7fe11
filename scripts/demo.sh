#!/usr/bin/env bash
# Trains two ranks on what is here, GPUs if there are two and else the CPU, and reports where the time went.
# Arguments are settings: bash scripts/demo.sh training.max_steps=50
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
use_environment
output_dir=$repository/artifacts/demo

num_gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$num_gpus" -lt 2 ]; then
  say "$num_gpus GPUs: two ranks on the CPU, over gloo"
  export CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES=
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # what torchrun would choose, without its warning

"$python" -m torch.distributed.run --standalone --nproc_per_node 2 train.py \
  --config config/default.yaml --override "training.output_dir=$output_dir" "$@"
"$python" analysis/overlap_report.py --log-dir "$output_dir" --label demo --output "$output_dir/report"
