# shellcheck shell=bash
# Sourced by launch_cuda.sh, launch_rocm.sh and the capture scripts:
#   launch PLATFORM [CONFIG] [train.py arguments]
# starts train.py on every GPU that torch sees here, PLATFORM being cuda or rocm. What it goes by:
#   CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES   as the runtimes do
#   NPROC                                    ranks on this machine, instead of one per GPU
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   several machines; under srun Slurm tells them
#   PYTHON                                   interpreter, instead of python3 on PATH or .venv's
# It sets no variable that changes what is measured. `per_rank`, if set, is a command in front of each rank's.

# The comment at the top of the script is its help.
case ${1:-} in
-h | --help)
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
  exit 0
  ;;
esac

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
default_port=29500
per_rank=()

say() { printf '%s\n' "$*" >&2; }

refuse() {
  say "$(basename "$0"): $*"
  exit 2
}

# whole NAME VALUE LEAST
whole() {
  if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || [ "$2" -lt "$3" ]; then
    refuse "$1=$2 must be a whole number, at least $3"
  fi
}

# Sets `python`. Installs nothing: several machines may start at once on one file system.
choose_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" "$repository/.venv/bin/python"; do
    if "$candidate" -c 'import torch' 2>/dev/null; then
      python=$candidate
      return
    fi
    [ -z "${PYTHON:-}" ] || break
  done
  refuse "${PYTHON:-python3} has no torch; set PYTHON to an interpreter that has"
}

# Sets `num_gpus` from the runtime, and refuses a torch that was made for the other platform.
count_gpus() {
  local platform=$1 found
  found=$("$python" -c 'import torch; print("rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu", torch.cuda.device_count())') ||
    refuse "torch could not count the GPUs"
  num_gpus=${found#* }
  if [ "${found% *}" = cpu ]; then
    refuse "this torch is made for CPUs alone; install one for $platform (scripts/demo.sh runs on a CPU)"
  fi
  if [ "${found% *}" != "$platform" ]; then
    refuse "this torch is made for ${found% *}; use launch_${found% *}.sh, or a torch for $platform"
  fi
  if [ "$num_gpus" -eq 0 ]; then
    refuse "torch sees no GPU here (scripts/demo.sh runs on a CPU)"
  fi
}

# Sets `num_nodes`, `node_rank`, `master_addr`, `master_port`.
choose_nodes() {
  num_nodes=${NNODES:-1} node_rank=${NODE_RANK:-} master_addr=${MASTER_ADDR:-} master_port=${MASTER_PORT:-}
  whole NNODES "$num_nodes" 1
  whole SLURM_NNODES "${SLURM_NNODES:-1}" 1
  if [ -z "${NNODES:-}" ] && [ "${SLURM_NNODES:-1}" -gt 1 ]; then
    if [ -z "${SLURM_STEP_ID:-}" ]; then
      refuse "the job has $SLURM_NNODES nodes, and this is started on one of them alone; use srun (scripts/slurm.sbatch)"
    fi
    num_nodes=$SLURM_NNODES node_rank=${node_rank:-${SLURM_NODEID:-}}
    if [ -z "$master_addr" ]; then
      master_addr=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}") ||
        refuse "scontrol does not tell the nodes of the job; set MASTER_ADDR"
      master_addr=${master_addr%%$'\n'*}
    fi
    whole SLURM_JOB_ID "${SLURM_JOB_ID:-0}" 0
    master_port=${master_port:-$((default_port + 10#${SLURM_JOB_ID:-0} % 1000))}
  fi
  if [ "$num_nodes" -eq 1 ]; then
    [ "${node_rank:-0}" = 0 ] || refuse "NODE_RANK=$node_rank needs NNODES, the number of machines"
    return 0
  fi
  [ -n "$node_rank" ] || refuse "NNODES=$num_nodes needs NODE_RANK, the number of this machine from 0"
  [ -n "$master_addr" ] || refuse "NNODES=$num_nodes needs MASTER_ADDR, the address of the machine with NODE_RANK=0"
  whole NODE_RANK "$node_rank" 0
  whole MASTER_PORT "${master_port:-$default_port}" 1
  if [ "$node_rank" -ge "$num_nodes" ]; then
    refuse "NODE_RANK=$node_rank must be below NNODES=$num_nodes"
  fi
}

# Splits the arguments into `config` and `arguments`.
choose_config() {
  config=$repository/config/default.yaml
  case ${1:-} in
  *.yaml | *.yml)
    config=$1
    shift
    [ -f "$config" ] || config=$repository/$config
    [ -f "$config" ] || refuse "there is no ${config#"$repository"/}, neither here nor in $repository"
    ;;
  esac
  arguments=("$@")
}

launch() {
  local platform=$1 agent command
  shift
  choose_config "$@"
  choose_python
  count_gpus "$platform"
  choose_nodes
  local num_ranks=${NPROC:-$num_gpus}
  whole NPROC "$num_ranks" 1
  if [ "$num_ranks" -gt "$num_gpus" ]; then
    refuse "NPROC=$num_ranks is more than the $num_gpus GPUs that torch sees here"
  fi
  agent=("$python" -m torch.distributed.run --nproc_per_node "$num_ranks")
  if [ "$num_nodes" -gt 1 ]; then
    agent+=(--nnodes "$num_nodes" --node_rank "$node_rank" --master_addr "$master_addr"
      --master_port "${master_port:-$default_port}")
  else
    agent+=(--standalone)
  fi
  command=("$repository/train.py" --config "$config" "${arguments[@]}")
  if [ ${#per_rank[@]} -gt 0 ]; then
    agent+=(--no_python)
    command=("${per_rank[@]}" "$python" "${command[@]}")
  fi
  say "$num_ranks ranks on this machine${num_nodes:+, $num_nodes machine(s)}: $config"
  "${agent[@]}" "${command[@]}"
}
