#!/usr/bin/env bash
# Trains under rocprofv3: bash scripts/rocprof_capture.sh [CONFIG] [train.py arguments]
# Leaves in ROCPROF_OUTPUT_DIR/run_<UTC>/ the run's records, a folder of traces per rank, and the kernels'
# lines among the records:  python analysis/overlap_report.py --log-dir rocprof_traces/run_... --label NAME ...
#   ROCPROF_OUTPUT_DIR  (rocprof_traces)
#   ROCPROF_ARGS        what rocprofv3 is given, instead of kernel, memory copy, RCCL and marker tracing
#                       (--att, which traces instructions, only if it is asked for here)
#   ROCPROF_CONVERT     formats to make of rocpd databases afterwards, such as "pftrace csv"
#   CAPTURE_RUN         name of the folder, needed on several machines; and those of scripts/launch.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
source "$(dirname "${BASH_SOURCE[0]}")/capture.sh"

command -v rocprofv3 >/dev/null || refuse "rocprofv3 is not on PATH (ROCm has it in /opt/rocm/bin)"
version=$(rocprofv3 --version 2>&1 | tr '\n' ' ') || refuse "rocprofv3 --version fails: $version"
help=$(rocprofv3 --help 2>&1) || refuse "rocprofv3 --help fails"

# Tracing options and output format that this version has.
options=()
if [ -n "${ROCPROF_ARGS:-}" ]; then
  read -r -a options <<<"$ROCPROF_ARGS"
else
  for option in --kernel-trace --memory-copy-trace --rccl-trace --marker-trace; do
    if [[ $help == *"$option"* ]]; then
      options+=("$option")
    else
      say "this rocprofv3 has no $option: left out"
    fi
  done
  [ ${#options[@]} -gt 0 ] || refuse "this rocprofv3 knows none of the tracing options; set ROCPROF_ARGS"
fi
if [[ " ${options[*]} " != *" --output-format"* && " ${options[*]} " != *" -f "* ]]; then
  # rocpd is the default since ROCm 7, where the others are deprecated; before there was none.
  for format in rocpd json csv; do
    if [[ $help == *"$format"* ]]; then
      options+=(--output-format "$format")
      break
    fi
  done
fi

begin_capture rocm "${ROCPROF_OUTPUT_DIR:-rocprof_traces}" "$@"
say "rocprofv3 $version: ${options[*]}"
# Processes that a rank starts are traced too, hence the pid in the name.
# shellcheck disable=SC2016  # expanded in the rank
per_rank=(bash -c 'mkdir -p "$1/rank$RANK" && exec rocprofv3 -d "$1/rank$RANK" -o "rank${RANK}_%pid%" "${@:3:$2}" -- "${@:$2+3}"'
  rank "$folder" "${#options[@]}" "${options[@]}")
run_captured rocm "$@"

convert() {
  local formats database
  read -r -a formats <<<"$ROCPROF_CONVERT"
  if ! command -v rocpd >/dev/null; then
    say "rocpd is not on PATH: nothing is converted"
    return 1
  fi
  for database in "$folder"/rank*/*.db; do
    [ -e "$database" ] || continue
    rocpd convert -i "$database" -f "${formats[@]}" -d "$(dirname "$database")" \
      -o "$(basename "$database" .db)" || return 1
  done
}
if [ -n "${ROCPROF_CONVERT:-}" ] && is_first_node; then
  convert || status=1
fi
end_capture
