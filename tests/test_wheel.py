"""The wheel alone, installed outside the checkout, in a folder with spaces."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.timeout(600)  # pip, on a machine that does other things too


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds the wheel and sees the packages of this one."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    folder = tmp_path_factory.mktemp("a fresh machine")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*build, "--wheel-dir", str(folder), _sources(folder)], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    site = (
        folder / "venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    )
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", str(folder / "venv" / "bin" / "python"), "install"]
    install += ["--quiet", "--no-compile", "--no-deps", "--no-index", "--force-reinstall", str(wheel)]
    subprocess.run(install, check=True)
    return folder


def _sources(folder: Path) -> str:
    """A copy of what the wheel is made from: building writes into its folder."""
    copy = folder / "sources"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("aorta", "examples", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return str(copy)


def fresh_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK")}


def run(installed: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(installed / "venv" / "bin" / "aorta"), *arguments]
    environment = fresh_environment() | variables
    return subprocess.run(
        command, cwd=installed, env=environment, capture_output=True, text=True, check=False
    )


def test_the_command_is_there_and_comes_from_the_wheel(installed: Path) -> None:
    python = installed / "venv" / "bin" / "python"
    command = [python, "-c", "import aorta; print(aorta.__file__)"]
    told = subprocess.check_output(command, cwd=installed, env=fresh_environment(), text=True)
    assert told.startswith(str(installed))
    result = run(installed, "--version")
    assert result.stdout.startswith("aorta, version ")


def test_every_data_file_of_the_package_is_in_the_wheel(installed: Path) -> None:
    (wheel,) = installed.glob("*.whl")
    there = set(zipfile.ZipFile(wheel).namelist())
    data = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "aorta").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert data <= there
    pages = {f"aorta/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages | {"aorta/examples/accumulation.py"} <= there
    assert "aorta/attach/bootstrap/sitecustomize.py" in there


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_libraries_that_the_wheel_brought_need_no_compiler(installed: Path) -> None:
    (wheel,) = installed.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    report = json.loads(
        run(installed, "doctor", "--json", CC="/not/there", AORTA_CACHE_DIR="/not/there").stdout
    )
    checks = {check["name"]: check for check in report}
    assert checks["native parts"]["detail"] == "built"
    assert checks["documentation"]["detail"].endswith("site-packages/aorta/docs/index.md")


def test_a_configuration_is_found_by_its_name(installed: Path) -> None:
    # With a number of ranks the settings are read before torch is loaded.
    result = run(installed, "train", "--config", "fsdpp", "--nproc-per-node", "2")
    assert result.returncode == 2
    assert "aorta comes with ddp, default, fsdp, fsdp_tp, moe, tp" in result.stderr


@pytest.mark.slow
def test_a_run_is_recorded_and_reported(installed: Path) -> None:
    assert (
        run(installed, "demo", "training.max_steps=4", "--output", "a run", OMP_NUM_THREADS="1").returncode
        == 0
    )
    assert (installed / "a run" / "report" / "report.html").exists()
