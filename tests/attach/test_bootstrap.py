"""The start of a Python below `aorta run`: hidden sitecustomize, finders of the program, what is loaded."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aorta.attach.settings import AttachSettings, environment_for

FINDER = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        for finder in sys.meta_path:  # all of them, as importlib.util.find_spec would
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                print("found")
                return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.processes
def test_a_step_at_names_a_function_without_harm_beside_a_finder_that_asks_all_finders(
    tmp_path: Path,
) -> None:
    """Instrumentation of other tools looks modules up this way; asking each other must end. torch describes
    its functions while it is imported; a replaced one could not be described."""
    (tmp_path / "sitecustomize.py").write_text(FINDER)
    settings = AttachSettings(output=str(tmp_path), step_at="torch:randn")
    environment = environment_for(settings, os.environ | {"PYTHONPATH": str(tmp_path)})
    code = "import sys, torch; print(tuple(torch.randn(2).shape), 'aorta.attach.hooks' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "found\n(2,) True\n"


@pytest.mark.processes
def test_a_program_is_attached_to_whose_own_sitecustomize_imports_torch(tmp_path: Path) -> None:
    """A common place for patches of a site."""
    (tmp_path / "sitecustomize.py").write_text("import torch\nprint('patched')\n")
    settings = AttachSettings(output=str(tmp_path))
    environment = environment_for(settings, os.environ | {"PYTHONPATH": str(tmp_path)})
    code = "import sys; print('torch' in sys.modules, 'aorta.attach.hooks' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "patched\nTrue True\n"


@pytest.mark.processes
def test_hooks_and_closing_lines_load_neither_torch_nor_the_recorder() -> None:
    """Every process below `aorta run` that imports torch loads the hooks; few of them ever train."""
    code = (
        "import aorta.attach.coverage, aorta.attach.hooks, sys\n"
        "print([name for name in ('torch', 'aorta.record', 'aorta.attach.session') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.processes
def test_ctrl_c_ends_a_program_by_its_signal_whatever_runs_at_its_end() -> None:
    code = (
        "import atexit\nfrom aorta.attach.hooks import end_by_interrupt\n"
        "atexit.register(lambda: (exec('1'), end_by_interrupt()))\nraise KeyboardInterrupt"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert result.returncode == -signal.SIGINT
