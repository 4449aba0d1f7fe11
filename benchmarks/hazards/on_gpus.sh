#!/usr/bin/env bash
# Hazards on two GPUs: planted cases with delays, clean programs, mutants, torch's CSAN beside, and the cost.
# bash benchmarks/hazards/on_gpus.sh OUT [PYTHON]       about five minutes; prints a table, whatever fails
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
python=${2:-python3}
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=2
programs=benchmarks/hazards/programs.py

torchrun=("$python" -m torch.distributed.run --standalone --nproc-per-node 2)

# piece NAME SECONDS COMMAND...: in the background, its output in NAME.txt, its status in NAME.rc
piece() {
  local name=$1 seconds=$2
  shift 2
  while [ "$(jobs -rp | wc -l)" -ge "${PARALLEL:-8}" ]; do wait -n; done
  (timeout -k 5 "$seconds" "$@" >"$out/$name.txt" 2>"$out/$name.err"; echo $? >"$out/$name.rc") &
}

piece cases 150 "${torchrun[@]}" benchmarks/hazards/cases.py "$out/cases"
piece cases_csan 100 "${torchrun[@]}" benchmarks/hazards/cases.py "$out/cases" --csan
mutants="fsdp2:reduce_scatter_before_its_input fsdp2:all_gather_before_its_input
fsdp2:all_gather_output_before_wait fsdp2:optimizer_before_the_reduction fsdp2:gather_before_the_optimizer
ddp_hook:hook_without_fork ddp_hook:hook_without_wait ddp_hook:hook_decompresses_early
loader:loader_without_wait loader:loader_without_record_stream
host_optimizer:host_optimizer_copies_before_backward host_optimizer:host_optimizer_reads_before_the_copy
host_optimizer:host_optimizer_parameters_not_awaited"
kinds="fsdp2 ddp ddp_hook tp cp pp graphs compile offload checkpoint fsdp2_offload loader host_optimizer"
for mutant in $mutants; do
  kind=${mutant%%:*} name=${mutant##*:}
  piece "mutant_$name" 90 "$python" -m aorta check --every 6 --json -o "$out/records/mutant_$name" -- \
    "${torchrun[@]}" $programs "$kind" --mutant "$name" --steps 20
done
for kind in $kinds; do
  piece "clean_$kind" 140 "$python" -m aorta check --every 2 --json -o "$out/records/clean_$kind" -- \
    "${torchrun[@]}" $programs "$kind" --steps 26
done
wait
for kind in ddp fsdp2; do
  PARALLEL=1 piece "bare_$kind" 60 "${torchrun[@]}" $programs $kind --steps 204
  PARALLEL=1 piece "run_$kind" 60 "$python" -m aorta run --no-report -o "$out/records/run_$kind" -- \
    "${torchrun[@]}" $programs $kind --steps 204
  PARALLEL=1 piece "checked_$kind" 60 "$python" -m aorta check --every 200 --no-confirm --json \
    -o "$out/records/checked_$kind" -- "${torchrun[@]}" $programs $kind --steps 204
done
wait
for kind in $kinds; do
  piece "bare_clean_$kind" 60 "${torchrun[@]}" $programs "$kind" --steps 26
  [ -n "${CSAN-yes}" ] && piece "csan_clean_$kind" 60 "${torchrun[@]}" $programs "$kind" --steps 8 --csan
done
for mutant in $mutants; do
  kind=${mutant%%:*} name=${mutant##*:}
  [ -n "${CSAN-yes}" ] && piece "csan_mutant_$name" 60 "${torchrun[@]}" $programs "$kind" --mutant "$name" --steps 8 --csan
done
wait
"$python" benchmarks/hazards/summary.py "$out"
