"""Builds a C source of this folder with the machine's compiler, on first use, into the user's cache folder.

`load_library` opens the result in this process; `library_path` gives its place to a program that opens it.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from aorta.errors import AortaError

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
TIMEOUT_S = 60.0
"""Seconds that a compiler may take."""


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

    Built when the cache holds none of this source, machine and compiler flags; where the cache cannot be
    written, in a temporary folder. Raises NativeError.
    """
    try:
        path = _path_in_cache(name)
    except OSError:
        return _load_from_temporary_folder(name)
    return load_path(path)


def library_path(name: str) -> Path:
    """Path of the library of <name>.c in the cache, built: for a program that opens it itself.

    Raises NativeError, also where the cache cannot be written.
    """
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


def _path_in_cache(name: str) -> Path:
    source = source_text(name)
    path = cache_folder() / _file_name(name, source)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        build(source, path)
    return path


def source_text(name: str) -> str:
    try:
        return resources.files(__package__).joinpath(f"{name}.c").read_text(encoding="utf-8")
    except OSError as error:
        raise NativeError(f"the source {name}.c is not installed: {error.strerror}") from None


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


def _file_name(name: str, source: str) -> str:
    key = "\0".join((source, platform.machine(), platform.libc_ver()[1], *FLAGS))
    return f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


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
