"""What has to be installed for what, and what is said where it is not."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from aorta.errors import REPORT, InstrumentError, not_installed, to_install

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECORDING = (
    "aorta.attach.session",
    "aorta.attach.instrument",
    "aorta.record.recorder",
    "aorta.steps.process",
)

BARE = """
import importlib, sys

asked = []

class OnlyBase:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, OnlyBase())
{code}
"""
ABSENT = {{"PyYAML": "yaml"}.get(name, name) for name in REPORT}


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


def without_reports(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has what recording needs and nothing more."""
    program = BARE.format(absent=ABSENT, code=code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_the_extra_of_reports_is_what_users_are_told() -> None:
    assert {name_of(line) for line in PROJECT["optional-dependencies"]["report"]} == set(REPORT)


def test_recording_needs_torch_msgspec_click_numpy_and_psutil() -> None:
    assert {name_of(line) for line in PROJECT["dependencies"]} == {
        "torch",
        "click",
        "msgspec",
        "numpy",
        "psutil",
    }


def test_what_records_needs_and_loads_nothing_of_reports() -> None:
    """The peak is in a YAML file: without PyYAML it is not known, and the run is closed all the same."""
    done = without_reports(f"""
for module in {RECORDING!r}:
    importlib.import_module(module)
print(asked, "aorta.traces.kineto" in sys.modules)

from aorta.record.description import UnknownPeak, peak_record
for device in ({{'kind': 'cpu'}}, {{'kind': 'cuda', 'name': 'NVIDIA H200'}}):
    try:
        peak_record([device], 'bf16')
    except UnknownPeak as error:
        print(error)
""")
    assert done.returncode == 0, done.stderr
    loaded, cpu, cuda = done.stdout.splitlines()
    assert loaded == "[] False"
    assert cpu == "no GPU was used, and peak rates are known of GPUs alone"
    assert cuda.startswith("yaml is not installed")


@pytest.mark.parametrize("command", [["report", "x"], ["why", "x"], ["compare", "x", "y"], ["top", "x"]])
def test_a_command_that_needs_more_says_so_in_a_line(command: list[str], tmp_path: Path) -> None:
    arguments = [str(tmp_path) if word == "x" else word for word in command]
    done = without_reports(f"from aorta.cli import main; sys.argv[1:] = {arguments!r}; main()")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_the_line_names_every_package_of_reports() -> None:
    told = not_installed(ModuleNotFoundError("No module named 'yaml'", name="yaml"))
    assert told == (
        "yaml is not installed, and reports need it: pip install '.[report]' in aorta's checkout, or "
        "pip install isal matplotlib pandas plotly pyarrow PyYAML rich scipy tensorboard"
    )
    assert not_installed(ModuleNotFoundError("No module named 'aorta.nowhere'", name="aorta.nowhere")) is None


def test_nobody_is_told_to_install_the_other_aorta() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "aorta").rglob("*.py")]
    assert [str(page) for page in pages if re.search(r"pip install '?aorta", page.read_text())] == []


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("dask.distributed", "pip install dask[distributed]"),
        ("opentelemetry.sdk", "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"),
        ("wandb", "pip install wandb"),
    ],
)
def test_an_optional_package_is_installed_by_its_own_name(module: str, command: str) -> None:
    assert to_install(module) == command


@pytest.mark.parametrize(
    ("version", "accepted"), [("2.13.0+cpu", True), ("2.11.0", True), ("2.9.1+cu128", False)]
)
def test_a_torch_that_cannot_be_recorded_is_refused_before_anything_is_replaced(
    version: str, accepted: bool
) -> None:
    from aorta.record.interception.switch import require_torch

    if accepted:
        require_torch(version)
        return
    with pytest.raises(InstrumentError, match="torch 2.11 or newer, and this is torch 2.9.1"):
        require_torch(version)
