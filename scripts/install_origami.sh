#!/usr/bin/env bash
# Builds rocm-origami from source for the projection's optional origami backend. Needs no AMD GPU; needs
# Debian's or Ubuntu's HIP headers and library, so the packages below are installed with apt.
set -euo pipefail

python=${PYTHON:-python3}
version=0.0.3

packages=(libamdhip64-dev rocm-cmake hipcc g++)
missing=()
for package in "${packages[@]}"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if ((${#missing[@]})); then
    if [[ $(id -u) -ne 0 ]]; then
        echo "install first: sudo apt-get install ${missing[*]}" >&2
        exit 2
    fi
    apt-get update
    apt-get install --yes --no-install-recommends "${missing[@]}"
fi

"$python" -m pip install scikit-build-core nanobind cmake ninja
nanobind=$("$python" -c 'import nanobind; print(nanobind.cmake_dir())')
empty=$(mktemp -d)
trap 'rmdir "$empty"' EXIT

# Keeps the build offline: what it would fetch is installed already.
export CMAKE_PREFIX_PATH=/usr
export CMAKE_ARGS="-DCMAKE_MODULE_PATH=/usr/share/rocm/cmake \
-DFETCHCONTENT_SOURCE_DIR_ROCM-CMAKE=/usr \
-DCMAKE_POLICY_VERSION_MINIMUM=3.5 \
-DFETCHCONTENT_SOURCE_DIR_NANOBIND=$empty \
-Dnanobind_DIR=$nanobind"
"$python" -m pip install --no-build-isolation --no-binary rocm-origami "rocm-origami==$version"
"$python" -c 'import origami; print("origami", getattr(origami, "__version__", ""), "works")'
