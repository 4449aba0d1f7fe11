"""aorta doctor: check what works on this machine, and say how to fix the rest."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

import aorta
from aorta.cli.options import json_option
from aorta.command_line import OneScreenCommand, output_of_verdict
from aorta.errors import CANNOT_TELL, FINE, REPORT, to_install

State = Literal["works", "missing", "broken", "not needed"]


@dataclass(frozen=True)
class DoctorCheck:
    """The state of one thing that aorta needs or can use."""

    name: str
    state: State
    detail: str
    """The version or place that was found, or what is missing."""
    remedy: str = ""
    """The fix, if it does not work."""
    required: bool = False


@click.command("doctor", cls=OneScreenCommand)
@json_option
def doctor_command(as_json: bool) -> int:
    """Check what works on this machine: torch, GPUs, telemetry, profilers, compiler, optional packages.

    Each thing that does not work comes with a fix. Exit code 3: a required one is missing or broken.
    """
    checks = list(_checks())
    with output_of_verdict():
        if as_json:
            click.echo(json.dumps([asdict(check) for check in checks], indent=1))
        else:
            _print(checks)
    return CANNOT_TELL if _failed(checks) else FINE


def _failed(checks: list[DoctorCheck]) -> list[DoctorCheck]:
    """Required checks that do not pass."""
    return [check for check in checks if check.required and check.state not in ("works", "not needed")]


def _checks() -> Iterator[DoctorCheck]:
    for check in (
        _python,
        _aorta,
        _torch,
        _reports,
        _native,
        _documentation,
        _gpus,
        _distributed,
        _telemetry,
        _kernel_times,
        _cupti,
        *_TOOLS,
        _attaching,
        _environment,
    ):
        try:
            yield check()
        except Exception as error:
            name = getattr(check, "__name__", "check").strip("_")
            yield DoctorCheck(name, "broken", f"{type(error).__name__}: {error}")
    for package, use in _PACKAGES:
        yield _package(package, use)


def _print(checks: list[DoctorCheck]) -> None:
    """Print the answer, then what was found by section; without rich, which recording does not need."""
    failed = _failed(checks)
    answer = f"not ready: fix {', '.join(check.name for check in failed)}" if failed else "ready"
    click.echo(f"aorta is {answer} on this machine")
    optional = {name for name, *_ in _PACKAGES} | {check.__name__ for check in _TOOLS} | {"opentelemetry-sdk"}
    sections = {
        "Required": [check for check in checks if check.required],
        "This machine": [check for check in checks if not check.required and check.name not in optional],
        "Optional": [check for check in checks if check.name in optional],
    }
    colours = {"works": "green", "missing": "yellow", "broken": "red"}
    width = max(len(check.name) for check in checks)
    indent = " " * (width + 16)
    columns = max(60, shutil.get_terminal_size((110, 24)).columns)
    for title, members in sections.items():
        click.echo("\n" + click.style(title, bold=True))
        for check in members:
            lines = [check.detail]
            if check.remedy and check.state in ("missing", "broken"):
                lines.append(f"-> {check.remedy}")
            told = "\n".join(
                textwrap.fill(
                    line, columns, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
                )
                for line in lines
            )
            state = click.style(f"{check.state:<10}", fg=colours.get(check.state))
            click.echo(f"  {check.name:<{width}}  {state}  {told.lstrip()}")


def _python() -> DoctorCheck:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    return DoctorCheck(
        "python",
        "works" if good else "broken",
        f"{version} in {sys.executable}",
        "install Python 3.11 or newer",
        required=True,
    )


def _aorta() -> DoctorCheck:
    from aorta._version import __version__

    path = shutil.which("aorta")
    if path is None:
        return DoctorCheck(
            "aorta",
            "missing",
            f"{__version__}, not on PATH",
            "run python -m aorta instead, or pip install . in its checkout",
        )
    return DoctorCheck("aorta", "works", f"{__version__}, {path}")


def _documentation() -> DoctorCheck:
    package = Path(aorta.__file__).resolve().parent
    # Within the package in an installation, beside it in a checkout.
    for page in (package / "docs" / "index.md", package.parent / "docs" / "index.md"):
        if page.is_file():
            return DoctorCheck("documentation", "works", str(page))
    return DoctorCheck("documentation", "missing", "not installed with aorta", "read docs/ of its sources")


def _torch() -> DoctorCheck:
    import torch

    from aorta._version import OLDEST_TORCH

    build = (
        f"ROCm {torch.version.hip}"
        if torch.version.hip
        else f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "CPU only"
    )
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    state: State = "works" if (major, minor) >= OLDEST_TORCH else "broken"
    return DoctorCheck(
        "torch", state, f"{torch.__version__}, {build}", "pip install 'torch>=2.11'", required=True
    )


def _reports() -> DoctorCheck:
    modules = {"PyYAML": "yaml"}
    lacking = [name for name in REPORT if importlib.util.find_spec(modules.get(name, name)) is None]
    lacking = [name for name in lacking if name != "isal"]  # faster than zlib, and not for every processor
    if lacking:
        detail = f"this environment records only: {', '.join(lacking)} not installed"
        return DoctorCheck("reports", "missing", detail, to_install("rich"))
    return DoctorCheck("reports", "works", "every package that reports need is installed")


def _native() -> DoctorCheck:
    from aorta.device.native.build import NativeError, find_compiler, is_built

    if is_built("kernel_records"):
        return DoctorCheck("native parts", "works", "built")
    try:
        return DoctorCheck("native parts", "works", f"{find_compiler()[0]} builds them on first use")
    except NativeError as error:
        detail = f"{error}: GPUs are timed by events, without kernels, and NCCL's own events are not read"
        return DoctorCheck("native parts", "missing", detail, "apt-get install gcc, or set CC")


def _gpus() -> DoctorCheck:
    from aorta.device.backend import accelerator

    devices = accelerator()
    number = devices.count()
    if number:
        names = {devices.name(devices.device(index)) for index in range(number)}
        return DoctorCheck("GPUs", "works", f"{number} x {', '.join(sorted(names))}")
    if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd"):
        return DoctorCheck(
            "GPUs",
            "broken",
            "a driver is installed, but torch sees no GPU",
            "check CUDA_VISIBLE_DEVICES / HIP_VISIBLE_DEVICES and that torch is built for this GPU",
        )
    return DoctorCheck("GPUs", "not needed", "none: training runs on the CPU, over gloo")


def _distributed() -> DoctorCheck:
    import torch.distributed as dist

    if not dist.is_available():
        return DoctorCheck(
            "collectives",
            "broken",
            "this torch is built without torch.distributed",
            "install a torch that has it: pip install torch",
            required=True,
        )
    known = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    names = ", ".join(name for name, is_there in known.items() if is_there)
    return DoctorCheck("collectives", "works", names, required=True)


def _telemetry() -> DoctorCheck:
    from aorta.device.backend import accelerator
    from aorta.device.telemetry import INSTALLS_AMDSMI

    if not accelerator().is_available():
        return DoctorCheck("telemetry", "not needed", "no GPU")
    if accelerator().kind == "hip":
        if importlib.util.find_spec("amdsmi"):
            return DoctorCheck("telemetry", "works", "amdsmi")
        return DoctorCheck("telemetry", "missing", "module amdsmi not installed", INSTALLS_AMDSMI)
    if importlib.util.find_spec("pynvml"):
        import pynvml

        pynvml.nvmlInit()
        return DoctorCheck("telemetry", "works", f"NVML, driver {pynvml.nvmlSystemGetDriverVersion()}")
    return DoctorCheck("telemetry", "missing", "package pynvml not installed", to_install("pynvml"))


def _kernel_times() -> DoctorCheck:
    from torch.profiler import ProfilerActivity, supported_activities

    activities = supported_activities()
    if ProfilerActivity.CUDA in activities:
        return DoctorCheck("kernel traces", "works", "torch.profiler traces the GPU")
    return DoctorCheck("kernel traces", "not needed", "this torch is built without GPU support")


def _cupti() -> DoctorCheck:
    """CUPTI's version and what is known to be wrong in it; no GPU is asked."""
    import ctypes

    import torch

    from aorta.device.cupti_faults import known_faults, version_text
    from aorta.device.kernel_records import KernelRecordsUnavailable, cupti_path

    if torch.version.hip is not None:
        return _rocprofiler()
    if torch.version.cuda is None:
        return DoctorCheck("CUPTI", "not needed", "this torch is built without CUDA")
    version = ctypes.c_uint32()
    try:
        library = ctypes.CDLL(str(cupti_path()))
        library.cuptiGetVersion(ctypes.byref(version))
    except (KernelRecordsUnavailable, OSError) as error:
        return DoctorCheck("CUPTI", "missing", f"{error}: GPUs are timed by events", "reinstall torch")
    faults = "".join(f"; known: {fault}" for fault in known_faults(version.value))
    return DoctorCheck("CUPTI", "works", f"version {version_text(version.value)}{faults}")


def _rocprofiler() -> DoctorCheck:
    """rocprofiler-sdk's version; no tool is registered."""
    import ctypes

    from aorta.device.kernel_records import rocprofiler_path

    parts = [ctypes.c_uint32() for _ in range(3)]
    try:
        library = ctypes.CDLL(rocprofiler_path())
        library.rocprofiler_get_version(*(ctypes.byref(part) for part in parts))
    except (AttributeError, OSError) as error:
        remedy = "install rocprofiler-sdk, part of ROCm 6.2 and later"
        return DoctorCheck("rocprofiler-sdk", "missing", f"{error}: GPUs are timed by events", remedy)
    version = ".".join(str(part.value) for part in parts)
    return DoctorCheck("rocprofiler-sdk", "works", f"version {version}; aorta run --kernels on reads it")


def _tool(command: str, use: str, remedy: str, *version: str) -> Callable[[], DoctorCheck]:
    def check() -> DoctorCheck:
        path = shutil.which(command)
        if path is None:
            return DoctorCheck(command, "missing", f"not on PATH, needed for {use}", remedy)
        if not version:
            return DoctorCheck(command, "works", path)
        process = subprocess.run([path, *version], capture_output=True, text=True, timeout=20, check=False)
        lines = (process.stdout + process.stderr).strip().splitlines()
        return DoctorCheck(command, "works", f"{path}: {lines[0] if lines else ''}")

    check.__name__ = command
    return check


_TOOLS = (
    _tool("nsys", "scripts/nsys_capture.sh", "install Nsight Systems (NVIDIA)", "--version"),
    _tool("rocprofv3", "scripts/rocprof_capture.sh", "install rocprofiler-sdk (part of ROCm)"),
    _tool("c++", "torch.compile and Triton", "apt-get install g++", "--version"),
    _tool("srun", "jobs on several machines under Slurm", "log in to a Slurm cluster"),
)

_PACKAGES = (
    ("dask", "aorta report --dask"),
    ("opentelemetry.sdk", "aorta run --to opentelemetry=URL"),
    ("wandb", "aorta run --to wandb=PROJECT"),
    ("mlflow", "aorta run --to mlflow=EXPERIMENT"),
    ("tensorboard", "TensorBoard scalars"),
)


def _package(module: str, use: str) -> DoctorCheck:
    package = module.partition(".")[0]
    name = {"opentelemetry": "opentelemetry-sdk"}.get(package, package)
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        return DoctorCheck(name, "missing", f"not installed, needed for {use}", to_install(module))
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return DoctorCheck(name, "works", f"{version}  {use}".strip())


def _attaching() -> DoctorCheck:
    """Start a Python process as `aorta run` does and see if aorta is in it."""
    from aorta.attach.settings import AttachSettings, environment_for

    environment = environment_for(AttachSettings(output=os.getcwd()), dict(os.environ))
    code = "import sys; print([type(f).__name__ for f in sys.meta_path][0])"
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if process.stdout.strip() == "TorchFinder":
        return DoctorCheck("aorta run", "works", "can record the Python processes of a command")
    return DoctorCheck(
        "aorta run",
        "broken",
        f"cannot reach the Python processes of a command: {process.stderr.strip()[-200:]}",
        "start Python without -I, -E or -S, which ignore PYTHONPATH or sitecustomize",
    )


def _environment() -> DoctorCheck:
    """Look for environment variables that distort measurements."""
    from aorta.device.environment import environment_warnings

    warnings = list(environment_warnings())
    if warnings:
        return DoctorCheck(
            "environment", "broken", "; ".join(warnings), "unset these variables before you measure"
        )
    return DoctorCheck("environment", "works", "no variable distorts measurements")
