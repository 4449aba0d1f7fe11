#!/usr/bin/env bash
# A workload under rocprofv3, nsys or torch.profiler, whichever is there:
#   bash scripts/hw_queue/profile_queues.sh WORKLOAD [STREAMS] [option of run...]
set -euo pipefail
if (($# == 0)); then
  echo "usage: profile_queues.sh WORKLOAD [STREAMS] [option...]" >&2
  exit 2
fi
workload=$1
streams=${2:-8}
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
use_environment
exec "$python" -m aorta.hw_queue_eval profile "$workload" --streams "$streams" "${@:3}"
