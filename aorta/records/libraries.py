"""Which library a file of Python belongs to: what is in none is the program's own. Imports nothing heavy."""

import glob
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

OWN = "aorta"
PYTHON = "python"
_AORTA = str(Path(__file__).resolve().parents[1]) + os.sep
_TRAINING = f"{_AORTA}training{os.sep}"
"""The loop of `aorta train`, which is the program there."""
_SITES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TYPED = ("<stdin>", "<cell", "<ipython-input")
"""Code that somebody has typed, by what its functions are said to be of."""
_STANDARD = tuple(
    path.rstrip(os.sep) + os.sep for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))
)


def library_of(path: str) -> str:
    """'torch', 'lightning', 'python' for its standard library, 'aorta'; '' of the program's files.

    What runs as `python -m package.module` is the program, wherever it is installed; of aorta its loop alone.
    """
    name = _library_of(path)
    return "" if name and name != OWN and name == _main_package() else name


def program_frame(within: CodeType | None = None) -> FrameType | None:
    """The innermost one of the program, within what this function called; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not within:
        if not library_of(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


@cache
def _library_of(path: str) -> str:
    if path.startswith(_TRAINING):
        return ""
    if path.startswith((_AORTA, "<frozen")):
        return OWN
    for mark in _SITES:
        if mark in path:
            return path.rpartition(mark)[2].partition(os.sep)[0].removesuffix(".py")
    torch = sys.modules.get("torch")
    folder = os.path.dirname(getattr(torch, "__file__", None) or "")
    if folder and path.startswith(folder + os.sep):
        return "torch"
    if path.startswith(_STANDARD):
        return PYTHON
    for folder in filter(None, map(str, sys.path)):  # of PYTHONPATH, too
        if path.startswith(folder + os.sep) and _is_for_packages(folder):
            return path[len(folder) + 1 :].partition(os.sep)[0].removesuffix(".py")
    return PYTHON if path.startswith("<") and not path.startswith(_TYPED) else ""


@cache
def _is_for_packages(folder: str) -> bool:
    """Whether pip has installed into it (--target), and the program itself is not there."""
    script = os.path.abspath(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    return not script.startswith(folder + os.sep) and bool(glob.glob(f"{glob.escape(folder)}/*.dist-info"))


def _main_package() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = str(getattr(spec, "name", None) or "")
    return name.partition(".")[0] if "." in name else ""
