#!/usr/bin/env bash
# Trains on every AMD GPU that is visible here: bash scripts/launch_rocm.sh [CONFIG] [train.py arguments]
# scripts/launch.sh says which variables it goes by.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch rocm "$@"
