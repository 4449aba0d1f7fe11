#!/usr/bin/env bash
# Tries the remedies of single GPUs, each on a GPU of its own, with the time that there is: remedies_on_gpus.sh OUT [S [GPU…]]
# ONLY="gpu_layouts gpu_unread": these alone. S: seconds after which what runs is stopped (60); GPU: their numbers (0 1 2 3).
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: remedies_on_gpus.sh OUT [S [GPU…]]}
limit_s=${2:-60}
shift $(($# < 2 ? $# : 2))
gpus=("${@:-0 1 2 3}")
read -ra gpus <<< "${gpus[*]}"
read -ra programs < <(cd "$here/scripts/remedies" && grep -l '^device: cuda' -- *.py | xargs grep -L '^ranks: 2' | sed 's/\.py$//' | xargs)
[[ -n ${ONLY:-} ]] && read -ra programs <<< "$ONLY"
mkdir -p "$out"
for i in "${!gpus[@]}"; do
  names=()
  for ((j = i; j < ${#programs[@]}; j += ${#gpus[@]})); do names+=("${programs[j]}"); done
  ((${#names[@]})) || continue
  CUDA_VISIBLE_DEVICES=${gpus[i]} timeout "$limit_s" "${PYTHON:-python3}" "$here/remedies.py" "$out/gpu_${gpus[i]}" \
    --device cuda --only "$(IFS=,; echo "${names[*]}")" > "$out/gpu_${gpus[i]}.txt" 2>&1 &
done
wait
cat "$out"/gpu_*.txt
