"""What is plain arithmetic stays importable where there is no torch."""

import subprocess
import sys

import pytest

WITHOUT_TORCH = [
    "aorta",
    "aorta.errors",
    "aorta.command_line",
    "aorta.config",
    "aorta.timeline",
    "aorta.records",
    "aorta.steps",
    "aorta.traces",
    "aorta.account",
    "aorta.hang.find",
    "aorta.hang.show",
]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_plain_modules_leave_torch_unloaded() -> None:
    """Loaded one after the other in one interpreter: the first that loads torch is named."""
    code = f"""
import sys, pkgutil, importlib
for name in {WITHOUT_TORCH!r}:
    package = importlib.import_module(name)
    parts = pkgutil.walk_packages(getattr(package, "__path__", []), name + ".") if name != "aorta" else []
    for module in (name, *(part.name for part in parts)):
        importlib.import_module(module)
        if "torch" in sys.modules:
            raise SystemExit(module)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_aorta_itself_loads_nothing_large() -> None:
    large = {"torch", "numpy", "msgspec", "scipy", "pandas", "matplotlib", "yaml"}
    code = f"import sys, aorta; print(sorted({large!r} & set(sys.modules)), aorta.__version__ != '')"
    assert run_python(code) == "[] True\n"
    code = f"import sys, aorta.cli; print(sorted({large!r} & set(sys.modules)))"  # what the help loads
    assert run_python(code) == "[]\n"


def test_the_public_function_is_found_when_it_is_used() -> None:
    import aorta
    import aorta.record

    assert aorta.instrument is aorta.attach.instrument.instrument
    assert "instrument" in dir(aorta)


def test_other_names_are_refused() -> None:
    import aorta

    with pytest.raises(AttributeError, match="module 'aorta' has no attribute 'instrumnet'"):
        _ = aorta.instrumnet


def test_a_report_of_records_loads_no_reader_of_traces() -> None:
    """They take a tenth of its time."""
    code = """
import sys, aorta.page.write, aorta.why.causes.rank
from aorta.cli.report import trace_reading
trace_reading()
names = ("aorta.traces.sources", "aorta.traces.kineto", "aorta.why.replay")
print([name for name in names if name in sys.modules])
"""
    assert run_python(code) == "[]\n"
