#!/usr/bin/env bash
# Trains under Nsight Systems: bash scripts/nsys_capture.sh [CONFIG] [train.py arguments]
# Leaves in NSYS_OUTPUT_DIR/run_<UTC>/ the run's records, a folder per rank with its report and SQLite export,
# and the kernels' lines among the records:  python analysis/overlap_report.py --log-dir nsys_traces/run_... ...
#   NSYS_OUTPUT_DIR  (nsys_traces)
#   NSYS_ARGS        what nsys profile is given, instead of CUDA and NVTX tracing without sampling
#   CAPTURE_RUN      name of the folder, needed on several machines; and those of scripts/launch.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
source "$(dirname "${BASH_SOURCE[0]}")/capture.sh"

command -v nsys >/dev/null || refuse "nsys is not on PATH (Nsight Systems)"
version=$(nsys --version 2>&1 | tr '\n' ' ') || refuse "nsys --version fails: $version"
read -r -a options <<<"${NSYS_ARGS:---trace=cuda,nvtx --sample=none --cpuctxsw=none}"

begin_capture cuda "${NSYS_OUTPUT_DIR:-nsys_traces}" "$@"
say "$version: nsys profile ${options[*]}"
# shellcheck disable=SC2016  # expanded in the rank
per_rank=(bash -c 'mkdir -p "$1/rank$RANK" && exec nsys profile -o "$1/rank$RANK/rank$RANK" "${@:3:$2}" "${@:$2+3}"'
  rank "$folder" "${#options[@]}" "${options[@]}")
run_captured cuda "$@"

for report in "$folder"/rank*/*.nsys-rep; do
  [ -e "$report" ] || continue
  is_first_node || break # it exports all, as it merges all
  nsys export --type sqlite --output "${report%.nsys-rep}.sqlite" "$report" || status=1
done
end_capture
