"""What is plain arithmetic stays importable where there is no torch."""

import importlib.util
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
    "aorta.report",
]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_plain_modules_leave_torch_unloaded(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} does not exist yet")
    code = f"import sys, pkgutil, importlib, {module} as m\n"
    if module != "aorta":
        code += "for part in pkgutil.walk_packages(getattr(m, '__path__', []), m.__name__ + '.'):\n"
        code += "    importlib.import_module(part.name)\n"
    assert run_python(code + "print('torch' in sys.modules)") == "False\n"


def test_aorta_itself_loads_nothing_large() -> None:
    large = {"torch", "numpy", "msgspec", "scipy", "pandas", "matplotlib", "yaml"}
    code = f"import sys, aorta; print(sorted({large!r} & set(sys.modules)), aorta.__version__ != '')"
    assert run_python(code) == "[] True\n"


def test_the_public_function_is_found_when_it_is_used() -> None:
    import aorta
    import aorta.recording

    assert aorta.instrument is aorta.attach.instrument.instrument
    assert "instrument" in dir(aorta)


def test_other_names_are_refused() -> None:
    import aorta

    with pytest.raises(AttributeError, match="module 'aorta' has no attribute 'instrumnet'"):
        _ = aorta.instrumnet
