#!/usr/bin/env bash
# Trains two ranks on what is here, GPUs if there are two and else the CPU, and reports where the time went.
# It is `aorta demo`, with an interpreter that has what aorta needs, into artifacts/demo of this checkout.
# Arguments are settings: bash scripts/demo.sh training.max_steps=50
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"
use_environment
exec "$python" -m aorta demo "$@"
