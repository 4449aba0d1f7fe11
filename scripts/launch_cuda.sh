#!/usr/bin/env bash
# Trains on every NVIDIA GPU that is visible here: bash scripts/launch_cuda.sh [CONFIG] [train.py arguments]
# scripts/launch.sh says which variables it goes by.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch cuda "$@"
