#!/usr/bin/env bash
# Checks on this machine's GPUs what aorta promises of them: bash scripts/amd_check.sh [FILE] [--quick]
# Takes 10 min at most (5 with --quick) and writes FILE (device_check.json), which holds nothing private:
#   bash scripts/amd_check.sh FILE --grade    says line by line what holds in it, as the check does at its end
# On NVIDIA's GPUs it is a rehearsal of the same; without a GPU the parts that need none run. Installs nothing:
# torch and what recording needs is enough.
#   PYTHON   interpreter, instead of python3 on PATH or .venv's
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
choose_python
export PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$repository/benchmarks/device_check.py" "$@"
