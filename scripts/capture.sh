# Sourced by rocprof_capture.sh and nsys_capture.sh, after launch.sh.
# shellcheck shell=bash disable=SC2154  # launch.sh sets what is not set here

# begin_capture PLATFORM DIR [CONFIG] [arguments]: makes the `folder` of this run.
begin_capture() {
  local setting
  for setting in "${@:3}"; do
    case $setting in
    training.output_dir=*) refuse "$setting: this script names the folder; set CAPTURE_RUN instead" ;;
    profiling.enabled=true)
      refuse "$setting: one profiler at a time; torch's own is off in this script" ;;
    esac
  done
  choose_config "${@:3}"
  choose_python
  count_gpus "$1"
  choose_nodes
  [[ ${CAPTURE_RUN:-} != */* ]] || refuse "CAPTURE_RUN=$CAPTURE_RUN must be the name of a folder"
  if [ "$num_nodes" -gt 1 ] && [ -z "${CAPTURE_RUN:-}" ]; then
    refuse "set CAPTURE_RUN to the same name on all $num_nodes machines: it names the folder of the run"
  fi
  folder=$2/${CAPTURE_RUN:-run_$(date -u +%Y%m%dT%H%M%SZ)}
  if is_first_node && [ -e "$folder/run.json" ]; then
    refuse "$folder holds a run already; set CAPTURE_RUN to another name"
  fi
  if ! mkdir -p "$folder" 2>/dev/null || ! [ -w "$folder" ]; then
    refuse "cannot write $folder"
  fi
  folder=$(cd "$folder" && pwd)
  status=0
}

is_first_node() { [ "${node_rank:-0}" = 0 ]; }

# run_captured PLATFORM [CONFIG] [arguments]: one profiler at a time, so torch's own stays off; sets `status`.
run_captured() {
  local platform=$1 settings
  shift
  settings=("training.output_dir=$folder" profiling.ranges=true profiling.enabled=false)
  launch "$platform" "$@" --override "${settings[@]}" || status=$?
}

# Adds the kernels' lines to the records, says where everything is, exits as the training did.
end_capture() {
  if is_first_node; then
    (cd "$repository" && "$python" -m aorta merge "$folder") || [ "$status" -ne 0 ] || status=1
    say "wrote $folder"
  fi
  exit "$status"
}
