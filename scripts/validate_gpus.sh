#!/usr/bin/env bash
# What has to hold on GPUs, in one go: bash scripts/validate_gpus.sh [NUM_GPUS] [FOLDER] [PART...]
# Raw results and logs go to FOLDER. Every part runs, or those that are named (tests harmless remedies), and the exit
# code says whether one failed.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
num_gpus=${1:-2}
if ! [[ $num_gpus =~ ^[1-9][0-9]*$ ]]; then
  say "validate_gpus.sh: NUM_GPUS must be a whole number from 1, got $num_gpus"
  exit 2
fi
folder=$(mkdir -p "${2:-artifacts/validation}" && cd "${2:-artifacts/validation}" && pwd) || exit 1
only=" ${*:3} "
cd "$repository" || exit 1
use_environment
"$python" -c 'import pytest, hypothesis' 2>/dev/null || use_environment dev
present=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if ((present < num_gpus)); then
  say "validate_gpus.sh: needs $num_gpus GPUs, there are $present"
  exit 2
fi
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0
ran=0

part() {  # part NAME COMMAND...
  local name=$1
  shift
  [[ -n ${only// /} && $only != *" $name "* ]] && return
  ran=$((ran + 1))
  say "== $name"
  "$@" 2>&1 | tee "$folder/$name.log" || status=1
}

ranks=("$python" -m torch.distributed.run --standalone --nproc_per_node "$num_gpus")
part tests "$python" -m pytest tests/gpu
part harmless "${ranks[@]}" benchmarks/harmless.py --output "$folder/harmless.csv"
part remedies "$python" benchmarks/plants/remedies.py "$folder/remedies" --device cuda --repeats 1 \
  --only gpu_simulated,gpu_own_gathers,gpu_late_gathers
part kernel-truth "${ranks[@]}" benchmarks/truth.py kernels --rounds 3 --output "$folder/kernel_truth.csv"
part kernel-cost "${ranks[@]}" benchmarks/cost.py --pin --together --pairs 40 --cases fsdp_short tp ddp fsdp \
  --variants records native events --output "$folder/kernel_cost.csv"
part kernel-memory "$python" benchmarks/truth.py memory --steps 60000 --output "$folder/kernel_memory.csv"
part restarts "$python" benchmarks/reliability/restarts.py --trials 10 --backend nccl --ranks 2 \
  --output "$folder/restarts.csv"
part plants "$python" benchmarks/plants/judge.py "$folder/plants" --gpus "$((num_gpus > 2 ? 2 : num_gpus))" \
  --output "$folder/plants.csv"
part overhead "${ranks[@]}" benchmarks/cost.py --pin --cases fsdp fsdp_short ddp tp --pairs 24 \
  --variants native dedicated events \
  --output "$folder/overhead.csv"
part hangs "$python" benchmarks/reliability/hangs.py --backend nccl --jobs 2 --output "$folder/hangs.csv"
part queues "${ranks[@]}" -m aorta.queues run-priority all --streams 4,16 --budget-s 0.5 \
  --output "$folder/queues.json"
for op in ag_gemm gemm_rs gemm_ar; do
  part "program-$op" "${ranks[@]}" -m -- aorta.host_ir compare --op "$op" --m 65536 --n 1024 --k 4096
done
if ((num_gpus == 2)); then
  part queues-one "$python" -m aorta.queues run-priority all --streams 4,16 --budget-s 0.5 \
    --output "$folder/queues_one.json"
  for queues in 1 2 8 32; do
    part "queue-probe-$queues" env CUDA_DEVICE_MAX_CONNECTIONS="$queues" "$python" -m aorta.queues probe --part queues
  done
fi
if ((num_gpus == 4)); then
  part fsdp-tp "${ranks[@]}" train.py --config config/fsdp_tp.yaml \
    --override training.output_dir="$folder/fsdp-tp" profiling.enabled=true
fi
if ((ran == 0)); then
  say "validate_gpus.sh: no part is called so:$only"
  exit 2
fi
exit "$status"
