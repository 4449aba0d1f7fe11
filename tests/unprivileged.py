"""Runs commands as somebody without rights to files, also where the tests are run by root."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner", "--inh-caps=-all")


def python_without_rights(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Skips the test where root keeps its rights."""
    before: tuple[str, ...] = ()
    if os.geteuid() == 0:
        before = WITHOUT_RIGHTS
        if shutil.which("setpriv") is None or subprocess.run([*before, "true"]).returncode:
            pytest.skip("needs a user who is not root, or setpriv, which takes root's rights away")
    command = [*before, sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@contextmanager
def mode(path: Path, bits: int) -> Iterator[None]:
    """Of a folder; afterwards it can be removed."""
    path.chmod(bits)
    try:
        yield
    finally:
        path.chmod(0o755)
