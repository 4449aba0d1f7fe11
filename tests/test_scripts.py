"""The scripts, on a small checkout that holds them and stand-ins for what they start."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

PYPROJECT = """
[project]
name = "aorta"
version = "0"
dependencies = {dependencies}
[project.optional-dependencies]
dev = {dev}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"
    shutil.copytree(SCRIPTS, folder / "scripts")
    require(folder)
    return folder


def require(checkout: Path, dependencies: tuple[str, ...] = (), dev: tuple[str, ...] = ()) -> None:
    text = PYPROJECT.format(dependencies=list(dependencies), dev=list(dev))
    (checkout / "pyproject.toml").write_text(text)


def bash(command: str, checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "CI"}
    environ |= {"PYTHON": sys.executable} | variables
    return subprocess.run(
        ["bash", "-c", command], cwd="/", env=environ | {"C": str(checkout)}, capture_output=True, text=True
    )


def chosen(extra: str, checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = f'source "$C/scripts/environment.sh"; use_environment {extra}; echo "$python|$missing"'
    return bash(command, checkout, **variables)


ONE_PROCESS = {"PYTEST_XDIST_AUTO_NUM_WORKERS": "0"}
NO_NETWORK = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/nonexistent", "PIP_CONFIG_FILE": os.devnull}


def test_an_interpreter_that_has_everything_is_used_as_it_is(checkout: Path) -> None:
    require(checkout, ("pytest>=7", "msgspec"), ("hypothesis",))
    result = chosen("dev", checkout, **NO_NETWORK)
    assert result.stdout == f"{sys.executable}|\n"
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("requirements", "unmet"),
    [
        (("pytest>=7", "msgspec"), ""),
        (("pytest>=900", "msgspec"), "pytest\n"),
        (("pytest", "aorta-not-there"), "aorta-not-there\n"),
    ],
)
def test_requirements_are_compared_with_what_is_installed(
    requirements: tuple[str, ...], unmet: str, checkout: Path
) -> None:
    require(checkout, requirements)
    result = bash('source "$C/scripts/environment.sh"; unmet_requirements "$PYTHON"', checkout)
    assert result.stdout == unmet


@pytest.mark.parametrize(
    ("dependencies", "variables"),
    [
        pytest.param(("aorta-not-there",), {}, id="a-dependency-is-missing"),
        pytest.param((), {"CI": "true"}, id="ci-skips-nothing"),
    ],
)
def test_without_network_what_cannot_work_fails(
    dependencies: tuple[str, ...], variables: dict[str, str], checkout: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True)
    require(checkout, dependencies, ("aorta-not-there",))
    result = chosen("dev", checkout, **NO_NETWORK, **variables)
    assert result.returncode == 1
    assert "aorta-not-there" in result.stderr


WITHOUT_PIP = """
import runpy, sys
sys.path.pop(0 if sys.flags.safe_path else 1)
sys.argv.insert(1, "--without-pip")
runpy.run_module("venv", run_name="__main__")
"""


def test_an_interrupted_installation_starts_again(checkout: Path) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (checkout / ".venv" / "unfinished").touch()
    require(checkout, ("pytest",), ("aorta-not-there",))
    without_pip = checkout / "without_pip"  # which takes seconds, and which it has from its base
    without_pip.mkdir()
    (without_pip / "venv.py").write_text(WITHOUT_PIP)
    result = chosen("dev", checkout, **NO_NETWORK, PYTHONPATH=str(without_pip))
    assert "making" in result.stderr
    assert result.stdout == f"{sys.executable}|aorta-not-there \n"
    assert not (checkout / ".venv").exists()


WITH_HELP = (
    "amd_check",
    "demo",
    "launch_cuda",
    "launch_rocm",
    "nsys_capture",
    "rocprof_capture",
    "test",
    "validate_gpus",
)


@pytest.mark.parametrize("script", [f"{name}.sh" for name in WITH_HELP])
def test_help_is_the_comment_at_the_top(script: str, checkout: Path) -> None:
    result = bash(f'bash "$C/scripts/{script}" --help', checkout, PYTHON="/bin/false")
    assert (result.returncode, result.stderr) == (0, "")
    first = (checkout / "scripts" / script).read_text().splitlines()[1]
    assert result.stdout.splitlines()[0] == first.removeprefix("# ")
    assert "set -" not in result.stdout
    assert not (checkout / "artifacts").exists()


def test_an_unsuitable_python_is_refused(checkout: Path) -> None:
    result = chosen("", checkout, PYTHON="/bin/false")
    assert result.returncode == 1
    assert "Python 3.11 or newer" in result.stderr


def test_all_stages_run_and_one_failure_fails_the_whole(checkout: Path) -> None:
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_it.py").write_text("def test_it():\n    assert True\n")
    (checkout / "unformatted.py").write_text("x   =  1\n")
    result = bash('bash "$C/scripts/test.sh" -p no:cacheprovider', checkout, **ONE_PROCESS)
    summary = result.stdout.splitlines()[-5:]
    assert [line.split("  ")[0] for line in summary] == [
        "ruff format",
        "ruff check",
        "import contracts",
        "pytest",
        "mypy",
    ]
    assert "FAILED" in summary[0]
    assert summary[3].endswith("ok")
    assert summary[4].endswith("FAILED")  # it has nothing to read there
    assert result.returncode == 1


def test_a_tool_that_cannot_be_had_is_skipped_visibly(checkout: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True)
    require(checkout, (), ("ruff>=900", "mypy>=900", "import-linter>=900"))
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_it.py").write_text("def test_it():\n    assert True\n")
    result = bash('bash "$C/scripts/test.sh" -p no:cacheprovider', checkout, **NO_NETWORK, **ONE_PROCESS)
    assert "skipped: ruff is not installed" in result.stderr
    assert result.stdout.splitlines()[-5].startswith("ruff format        skipped: ruff is not installed")
    assert result.stdout.splitlines()[-2].endswith("ok")
    assert result.stdout.splitlines()[-1].endswith("skipped: mypy is not installed")
    assert result.returncode == 0


def test_the_demo_is_that_of_aorta_in_the_checkout(checkout: Path) -> None:
    (checkout / "aorta").mkdir()
    (checkout / "aorta" / "__init__.py").touch()
    (checkout / "aorta" / "__main__.py").write_text("import os, sys\nprint(os.getcwd(), *sys.argv[1:])\n")
    result = bash('bash "$C/scripts/demo.sh" training.max_steps=3', checkout)
    assert (result.returncode, result.stdout) == (0, f"{checkout} demo training.max_steps=3\n")
