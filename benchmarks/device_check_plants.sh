#!/usr/bin/env bash
# Does the grade of scripts/amd_check.sh find what is wrong? bash benchmarks/device_check_plants.sh FOLDER [PYTHON]
# Needs 2 GPUs and 5 min: the quick check as it is, then two parts of it with a planted failure each: a
# machine without a compiler, a network interface that is not there.
set -uo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd) || exit 1
export PYTHON=${2:-python3}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

graded() { # graded NAME
  PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" benchmarks/device_check.py --grade "$folder/$1.json" >"$folder/$1.txt"
  echo "exit status $?" >>"$folder/$1.txt"
}

bash scripts/amd_check.sh "$folder/check.json" --quick 2>"$folder/check.log"
graded check
cat "$folder/check.txt"

planted() { # planted NAME PART VARIABLE=VALUE...
  local name=$1 part=$2
  shift 2
  env "$@" bash scripts/amd_check.sh "$folder/$name.json" --parts "$part" >"$folder/$name.log" 2>&1
  graded "$name"
  if grep -q "^fail *$part" "$folder/$name.txt"; then echo "planted $name: found"; else echo "planted $name: NOT FOUND"; fi
}

planted no_compiler records CC=/bin/false AORTA_CACHE_DIR="$folder/empty"
planted no_interface launcher NCCL_SOCKET_IFNAME=nosuch0
