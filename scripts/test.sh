#!/usr/bin/env bash
# Format, lint, types, import contracts, tests. Runs all of them and exits 1 if any failed.
# bash scripts/test.sh fast: format, lint and the tests that start no process and read no clock, in a minute.
# Arguments go to pytest: bash scripts/test.sh -k overlap; -n 0 for one test at a time.
set -uo pipefail
unset PYTHONDONTWRITEBYTECODE # or every process compiles aorta again
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository" || exit 1
use_environment dev
fast=()
if [[ ${1:-} == fast ]]; then
  fast=(--fast)
  shift
fi

summary=()
status=0

# stage NAME PACKAGE COMMAND...   Skipped where use_environment could not get the package.
stage() {
  local name=$1 package=$2 start=$SECONDS result=ok
  shift 2
  if [[ -n $package && " $missing" == *" $package "* ]]; then
    say "skipped: $package is not installed"
    summary+=("$(printf '%-18s skipped: %s is not installed' "$name" "$package")")
    return
  fi
  say "== $name"
  "$@" </dev/null || { result=FAILED && status=1; }
  summary+=("$(printf '%-18s %4d s  %s' "$name" $((SECONDS - start)) "$result")")
}

# Types take a minute of one core where nothing is cached: beside the tests, which do not keep all cores busy.
types=
if [[ ${#fast[@]} -eq 0 && " $missing" != *" mypy "* ]]; then
  types_text=$(mktemp)
  "$python" -m mypy >"$types_text" 2>&1 </dev/null &
  types=$!
  trap 'kill "$types" 2>/dev/null; rm -f "$types_text"' EXIT
fi
typed() {
  local result=0
  wait "$types" || result=$?
  cat "$types_text"
  return "$result"
}

stage "ruff format" ruff "$python" -m ruff format --check .
stage "ruff check" ruff "$python" -m ruff check .
if [[ ${#fast[@]} -eq 0 ]]; then
  stage "import contracts" import-linter "$python" -c \
    'from importlinter.cli import lint_imports_command as lint_imports; lint_imports(["--no-logo", "--no-cache"])'
fi
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then
  workers=(-n auto --dist loadscope --no-loadscope-reorder) # how many, and their order: tests/conftest.py
fi
stage "pytest" "" "$python" -m pytest ${workers[@]+"${workers[@]}"} ${fast[@]+"${fast[@]}"} "$@"
if [[ ${#fast[@]} -eq 0 ]]; then
  stage "mypy" mypy typed
fi

printf '\n'
printf '%s\n' "${summary[@]}"
exit "$status"
