# Sourced by demo.sh and test.sh: `use_environment [extra]` sets `python` to an interpreter that holds
# aorta's requirements (those of reports, and the extra's too), in this order:
#   1. $PYTHON, or else python3 on PATH, used as it is;
#   2. .venv of this repository, made and filled where needed. It sees the packages of 1 when torch is
#      among them, so that a torch made for this machine's GPU is kept.
# Where there is no network, an interpreter that has the requirements but not the extra's is used as it is;
# `missing` then names what it lacks, and otherwise it is empty.

# The comment at the top of the script is its help.
case ${1:-} in
-h | --help)
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
  exit 0
  ;;
esac

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$repository/.venv
unfinished=$venv/unfinished
fresh_torch=torch==2.13.0
export PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH}

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "$*"
  exit 1
}

# Prints the names of the requirements in pyproject.toml that the interpreter $1 does not meet, one per line.
# The extras report and $2 are read as well; 'torch' as $2 asks for torch alone.
unmet_requirements() {
  "$1" - "$repository/pyproject.toml" "${2:-}" <<'PYTHON'
import sys
import tomllib
from importlib import metadata

try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement

path, extra = sys.argv[1:]
with open(path, "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
lines = project["dependencies"] + extras.get("report", []) + extras.get(extra, [])
for requirement in map(Requirement, lines):
    if extra == "torch" and requirement.name != "torch":
        continue
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        print(requirement.name)
    else:
        if not requirement.specifier.contains(version, prereleases=True):
            print(requirement.name)
PYTHON
}

meets_requirements() { local unmet && unmet=$(unmet_requirements "$@" 2>/dev/null) && [ -z "$unmet" ]; }

# The interpreter that everything starts from, as an absolute path.
base_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  fail "aorta needs Python 3.11 or newer, and ${PYTHON:-python3} is not; set PYTHON to one that is"
}

make_venv() {
  local base=$1
  say "making $venv with $base"
  rm -rf "$venv" && mkdir "$venv"
  touch "$unfinished" # stays behind when this is interrupted, and the next run starts again
  "$base" -m venv "$venv" || fail "$base cannot make a virtual environment (on Debian: apt-get install python3-venv)"
  if meets_requirements "$base" torch; then
    # Not --system-site-packages: when the base is a virtual environment, that shows its parent's packages.
    "$base" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' \
      >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base_python.pth"
  fi
}

pip_install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" </dev/null; }

can_download() {
  pip_install --dry-run --ignore-installed --no-deps --retries 1 --timeout 15 msgspec >/dev/null 2>&1
}

fill_venv() {
  local extra=$1 torch=()
  meets_requirements "$venv/bin/python" torch || torch=("$fresh_torch")
  say "installing what pyproject.toml asks for${torch:+ and $fresh_torch, which takes minutes}"
  if ! pip_install "setuptools>=77.0.3" "${torch[@]}" ||
    ! pip_install --no-build-isolation --editable "$repository[report${extra:+,$extra}]"; then
    fail "pip could not install what pyproject.toml asks for"
  fi
  rm -f "$unfinished"
}

same_installation() {
  local prefix='import sys; print(sys.base_prefix)'
  [ "$("$1" -c "$prefix")" = "$("$2" -c "$prefix")" ]
}

use_environment() {
  local extra=${1:-} base
  missing=
  base=$(base_python) || exit 1
  python=$base
  meets_requirements "$python" "$extra" && return

  python=$venv/bin/python
  if [ ! -x "$python" ] || [ -e "$unfinished" ]; then
    make_venv "$base"
  elif [ -n "${PYTHON:-}" ] && ! same_installation "$base" "$python"; then
    fail "$venv was not made with PYTHON=$PYTHON: remove the one or unset the other"
  elif meets_requirements "$python" "$extra"; then
    return
  fi
  if can_download; then
    fill_venv "$extra"
  else
    use_without_network "$base" "$extra"
  fi
}

use_without_network() {
  local base=$1 extra=$2 candidate
  for candidate in "$base" "$venv/bin/python"; do
    if [ -z "${CI:-}" ] && meets_requirements "$candidate"; then
      [ -e "$unfinished" ] && rm -rf "$venv"
      python=$candidate
      missing=$(unmet_requirements "$python" "$extra" | tr '\n' ' ')
      say "no package can be downloaded: using $python as it is, without $missing"
      return
    fi
  done
  fail "no package can be downloaded, and $base lacks: $(unmet_requirements "$base" "$extra" | tr '\n' ' ')"
}
