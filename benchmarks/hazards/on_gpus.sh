#!/usr/bin/env bash
# Hazards on two GPUs: planted cases with delays, clean programs, mutants, torch's CSAN, the cost.
# bash benchmarks/hazards/on_gpus.sh OUT [PYTHON]       prints a table, whatever fails
# PARTS: some of "cost whole cases mutants deletions clean numbers csan" (all but the last).
# Without the others cost takes 75 s, and is alone on the machine; whole 90 s; cases 60 s; mutants, deletions
# and clean 60 to 90 s each, beside one another 3 minutes; numbers 40 s. DELETIONS: some of those that
# mutants.py prints. KINDS: some of the clean programs.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
python=${2:-python3}
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export OMP_NUM_THREADS=2
programs=benchmarks/hazards/programs.py
torchrun=("$python" -m torch.distributed.run --standalone --nproc-per-node 2)
check=("$python" -m aorta check --json)

# piece NAME SECONDS COMMAND...: in the background, its output in NAME.txt, its status in NAME.rc
piece() {
  local name=$1 seconds=$2
  shift 2
  while [ "$(jobs -rp | wc -l)" -ge "${PARALLEL:-10}" ]; do wait -n; done
  (timeout -k 5 "$seconds" "$@" >"$out/$name.txt" 2>"$out/$name.err"; echo $? >"$out/$name.rc") &
}

has() { [[ " ${PARTS:-cost whole cases mutants deletions clean numbers} " == *" $1 "* ]]; }

mutants="fsdp2:reduce_scatter_before_its_input fsdp2:all_gather_before_its_input
fsdp2:all_gather_output_before_wait fsdp2:optimizer_before_the_reduction fsdp2:gather_before_the_optimizer
ddp_hook:hook_without_fork ddp_hook:hook_without_wait ddp_hook:hook_decompresses_early
loader:loader_without_wait loader:loader_without_record_stream
host_optimizer:host_optimizer_copies_before_backward host_optimizer:host_optimizer_reads_before_the_copy
host_optimizer:host_optimizer_parameters_not_awaited"
deletions=${DELETIONS:-$("$python" benchmarks/hazards/mutants.py)}
kinds=${KINDS:-"fsdp2 fsdp2_hook ddp ddp_hook ddp_mixed ddp_overlapped zero tp cp pp graphs compile offload checkpoint fsdp2_offload fsdp2_offload_once loader host_optimizer accelerate"}

if has cost; then  # narrow, the host is the bound; wide, the device
  piece inside 100 "${torchrun[@]}" benchmarks/hazards/cost.py --cuda --seconds 8 \
    ddp:64x32 fsdp2:64x32 ddp:1024x16384 fsdp2:1024x16384
  wait
  piece inside_without_numbers 60 "${torchrun[@]}" benchmarks/hazards/cost.py --cuda --seconds 4 --no-numbers \
    ddp:64x32 fsdp2:64x32
  wait
fi
if has whole; then  # without aorta
  piece bare_as_shipped 90 "${torchrun[@]}" benchmarks/hazards/as_shipped.py
  wait
fi
cat "$out"/inside*.txt "$out"/bare_as_shipped.txt 2>/dev/null
has cases && piece cases 150 "${torchrun[@]}" benchmarks/hazards/cases.py "$out/cases"
has numbers && piece numbers 110 "$python" benchmarks/hazards/wrong_numbers.py --cuda --output "$out/numbers.csv"
has csan && piece cases_csan 100 "${torchrun[@]}" benchmarks/hazards/cases.py "$out/cases" --csan
for mutant in $deletions; do
  kind=${mutant%%:*} name=${mutant##*:}
  has deletions && piece "deletion_$name" 90 "${check[@]}" --every 6 -o "$out/records/deletion_$name" -- \
    "${torchrun[@]}" $programs "$kind" --mutant "$name" --steps 48
done
for kind in ddp_overlapped zero; do
  has deletions && piece "whole_$kind" 90 "${check[@]}" --every 6 -o "$out/records/whole_$kind" -- \
    "${torchrun[@]}" $programs "$kind" --steps 36
done
for kind in fsdp2_hook ddp_mixed; do
  has whole || break
  piece "whole_$kind" 90 "${check[@]}" --every 6 -o "$out/records/whole_$kind" -- \
    "${torchrun[@]}" $programs "$kind" --steps 36
  for form in shipped mended; do
    flag=(); [ $form = mended ] && flag=(--mended)
    piece "${form}_$kind" 90 "${check[@]}" --every 6 -o "$out/records/${form}_$kind" -- \
      "${torchrun[@]}" benchmarks/hazards/as_shipped.py --check "$kind" "${flag[@]}"
  done
done
for mutant in $mutants; do
  kind=${mutant%%:*} name=${mutant##*:}
  has mutants && piece "mutant_$name" 90 "${check[@]}" --every 6 -o "$out/records/mutant_$name" -- \
    "${torchrun[@]}" $programs "$kind" --mutant "$name" --steps 60
done
for kind in $kinds; do
  has clean && piece "clean_$kind" 140 "${check[@]}" --every 2 -o "$out/records/clean_$kind" -- \
    "${torchrun[@]}" $programs "$kind" --steps 36
done
wait
for kind in $kinds; do
  has clean && piece "bare_clean_$kind" 60 "${torchrun[@]}" $programs "$kind" --steps 36
  has csan && piece "csan_clean_$kind" 60 "${torchrun[@]}" $programs "$kind" --steps 24 --csan
done
for mutant in $mutants; do
  kind=${mutant%%:*} name=${mutant##*:}
  has csan && piece "csan_mutant_$name" 60 "${torchrun[@]}" $programs "$kind" --mutant "$name" --steps 24 --csan
done
wait
cat "$out"/numbers.txt 2>/dev/null
"$python" benchmarks/hazards/summary.py "$out"
