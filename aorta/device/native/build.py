"""Opens the C libraries of this folder: built by a wheel, or else on first use into the user's cache folder.

`load_library` opens one in this process; `library_path` gives its place to a program that opens it. Where
many machines share a cache folder, one of them builds and the others wait for it.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from importlib import resources
from pathlib import Path

from aorta.errors import AortaError

LIBRARIES = ("kernel_records", "kernel_records_rocm")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
TIMEOUT_S = 60.0
"""Seconds that a compiler may take, and that others wait for what it builds."""
POLL_S = 0.1
_INCLUDE = re.compile(r'^#include "([a-z_]+\.h)"$', re.MULTILINE)


class NativeError(AortaError):
    """Raised when a library cannot be built or loaded; the message is one line and says why."""


def cache_folder() -> Path:
    """The folder of built libraries: $AORTA_CACHE_DIR/native, else below $XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("AORTA_CACHE_DIR")
    if chosen:
        return Path(chosen) / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aorta" / "native"


def load_library(name: str) -> ctypes.CDLL:
    """The library of <name>.c. Its functions run without the interpreter lock.

    Built when neither the package nor the cache holds one of this source, machine and compiler flags; where
    the cache cannot be written, in a temporary folder. Raises NativeError.
    """
    # Where none came with the package, or it is of another C library than this machine's, one is built.
    with suppress(NativeError):
        return load_path(_path_in_package(name))
    try:
        path = _path_in_cache(name)
    except OSError:
        return _load_from_temporary_folder(name)
    return load_path(path)


def library_path(name: str) -> Path:
    """Path of the library of <name>.c, built: for a program that opens it itself.

    Raises NativeError, also where the cache cannot be written.
    """
    with suppress(NativeError):
        path = _path_in_package(name)
        load_path(path)
        return path
    try:
        return _path_in_cache(name)
    except OSError as error:
        raise NativeError(f"the cache folder {cache_folder()} cannot be written: {error.strerror}") from None


def load_path(path: Path) -> ctypes.CDLL:
    """The library at a path. Raises NativeError."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path.name} cannot be loaded: {error}") from None


def is_built(name: str) -> bool:
    """Whether the package or the cache holds the library of <name>.c, so that no compiler is needed."""
    source = source_text(name)
    return _path_in_package(name).exists() or (cache_folder() / _file_name(name, source)).exists()


def _path_in_package(name: str) -> Path:
    return Path(__file__).parent / built_name(name, source_text(name))


def _path_in_cache(name: str) -> Path:
    source = source_text(name)
    path = cache_folder() / _file_name(name, source)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _build_once(source, path)
    return path


def _build_once(source: str, path: Path) -> None:
    """Build, or wait for the process, of this machine or another one, that builds already.

    Ten thousand nodes with one home start at once. The one that makes the file `.building` builds; it leaves
    there what failed, so that those who waited do not fail one after the other. A claim older than TIMEOUT_S
    is of a process that was killed.
    """
    claim = path.with_suffix(".building")
    while not path.exists():
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            _wait_for(claim)
            continue
        try:
            if not path.exists():  # else another one built it between the look and the claim
                build(source, path)
        except NativeError as error:
            claim.write_text(str(error), encoding="utf-8")
            time.sleep(3 * POLL_S)  # until those who wait have read it
            raise
        finally:
            claim.unlink(missing_ok=True)


def _wait_for(claim: Path) -> None:
    """Return when it may be worth another look. Raises NativeError where the one who built failed."""
    try:
        failure = claim.read_text(encoding="utf-8", errors="replace")
        age_s = time.time() - claim.stat().st_mtime
    except FileNotFoundError:
        return
    if age_s > TIMEOUT_S + 5:
        claim.unlink(missing_ok=True)
    elif failure:
        raise NativeError(failure)
    else:
        time.sleep(POLL_S)


def source_text(name: str) -> str:
    """<name>.c with what it includes of this folder, so that one text is what the library is built from."""
    return _INCLUDE.sub(lambda line: _text_of_file(line.group(1)), _text_of_file(f"{name}.c"))


def _text_of_file(name: str) -> str:
    try:
        return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    except OSError as error:
        raise NativeError(f"the source {name} is not installed: {error.strerror}") from None


def build(source: str, path: Path) -> None:
    """Compile `source` to `path`, whole or not at all: ranks of a job build at the same time.

    Raises NativeError where the compiler fails, OSError where the folder cannot be written.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
        text, library = Path(folder) / "source.c", Path(folder) / "library.so"
        text.write_text(source, encoding="utf-8")
        command = [*compiler, *FLAGS, "-o", str(library), str(text), "-ldl"]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise NativeError(f"{compiler[0]} took longer than {TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise NativeError(f"{compiler[0]} cannot be run: {error.strerror}") from None
        if process.returncode != 0:
            raise NativeError(f"{compiler[0]} failed: {_first_line(process.stderr)}")
        os.replace(library, path)


def find_compiler() -> list[str]:
    """$CC, or the first compiler on PATH. Raises NativeError where there is none."""
    chosen = os.environ.get("CC", "").split()
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    if chosen:
        raise NativeError(f"no C compiler: CC={chosen[0]} is not on PATH")
    raise NativeError(f"no C compiler: none of {', '.join(COMPILERS)} is on PATH; install one or set CC")


def built_name(name: str, source: str) -> str:
    """File name of the library within a wheel, which is of one platform."""
    return f"{name}-{_digest(source, *FLAGS)}.so"


def _file_name(name: str, source: str) -> str:
    return f"{name}-{_digest(source, platform.machine(), platform.libc_ver()[1], *FLAGS)}.so"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _load_from_temporary_folder(name: str) -> ctypes.CDLL:
    source = source_text(name)
    try:
        with tempfile.TemporaryDirectory(prefix="aorta-") as folder:
            path = Path(folder) / _file_name(name, source)
            build(source, path)
            return load_path(path)  # stays loaded when the file goes
    except OSError as error:
        raise NativeError(f"no folder to build in can be written: {error.strerror}") from None


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it printed nothing"])[0][:200]
