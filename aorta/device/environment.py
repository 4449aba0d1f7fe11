"""Describes a run's surroundings for run.json (variables, versions, devices) and warns about settings.

The warnings name settings under which a run does not behave as it would without them.
"""

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from aorta._version import __version__
from aorta.device.backend import CPU, accelerator
from aorta.device.variables import KNOWN_VARIABLES
from aorta.records.schema import DeviceKind
from aorta.records.secrets import is_secret_name, is_secret_value
from aorta.timeline.types import STREAM_NAMES

_PREFIXES = (
    "NCCL_",
    "RCCL_",
    "TORCH_NCCL_",
    "TORCH_SYMM_MEM_",
    "TORCH_DISTRIBUTED_",
    "GLOO_",
    "CUDA_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "AMD_",
    "GPU_",
    "PYTORCH_",
    "OMP_",
    "MKL_NUM_THREADS",
)
"""Beginnings of variables that NCCL, RCCL, the GPU runtimes and torch act on."""
_SWITCH = re.compile(r"-?\d{1,12}|true|false|on|off|yes|no|", re.IGNORECASE)

_NOT_OF_USER = re.compile(
    r"_|(AORTA|BASH|CI|CONDA|DBUS|DOCKER|GITHUB|GITLAB|GROUP|GPG|INVOCATION|JOURNAL|JOB|KUBERNETES|LC|LESS|LOCAL|LS"
    r"|MASTER|OMPI|PALS|PBS|PMI|PMIX|PRTE|PYTEST|ROLE|RUNNER|SBATCH|SLURM|SLURMD|SSH|SUDO|SYSTEMD|TMUX|TORCHELASTIC"
    r"|VIRTUAL|VSCODE|XDG)_"
    r"|(COLUMNS|COLORTERM|DEBIAN_FRONTEND|DISPLAY|EDITOR|EUID|HISTFILE|HISTSIZE|HOME|HOSTNAME|HOSTTYPE|LANG"
    r"|LANGUAGE|LINES|LOGNAME|MAIL|OLDPWD|PAGER|PATH|PPID|PS1|PWD|PYTHONPATH|RANK|SHELL|SHLVL|STY|TEMP|TERM|TMP"
    r"|TMPDIR|UID|USER|WINDOWID|WORLD_SIZE)$"
    r"|.*(_PORT|_PID|_SOCK|_SERVICE_HOST)$"
)
"""Variables that a shell, a desktop, a service or a launcher sets: they differ between any two runs."""
_MOST_DIGITS = 6
"""Of a number that is kept: longer ones are ids of accounts and the like."""
_LONGEST_NAME = 80
GIT_S = 3.0
"""Seconds that git may take to describe the program's repository."""

_FALSIFYING = (
    ("TORCH_NCCL_BLOCKING_WAIT", "the host blocks in every wait for a collective"),
    ("NCCL_BLOCKING_WAIT", "the host blocks in every wait for a collective"),
    ("CUDA_LAUNCH_BLOCKING", "every kernel launch waits for the kernel, nothing can overlap"),
    ("HIP_LAUNCH_BLOCKING", "every kernel launch waits for the kernel, nothing can overlap"),
    ("AMD_SERIALIZE_KERNEL", "kernels are serialised, nothing can overlap"),
    ("AMD_SERIALIZE_COPY", "copies are serialised, they cannot overlap"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "every allocation and free synchronises the device"),
)
"""Variables that change what a run measures, and how."""


def collect_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that NCCL, RCCL, the GPU runtimes and torch act on, sorted by name.

    NCCL's configuration files count too: they set what the environment does not. Of variables that are not
    in KNOWN_VARIABLES only numbers and switches are kept, and no value that may be a secret.
    """
    environ = os.environ if environ is None else environ
    settings = dict(_nccl_files(environ)) | dict(environ)
    return {
        name: value
        for name, value in sorted(settings.items())
        if name.startswith(_PREFIXES) and _is_kept(name, value)
    }


def _is_kept(name: str, value: str) -> bool:
    if is_secret_name(name) or is_secret_value(value):
        return False
    return name in KNOWN_VARIABLES or _SWITCH.fullmatch(value) is not None


def user_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Other variables, for comparisons to name those that differ: switches and short numbers as they are, of
    any other value a fingerprint of 16 bits. None that a shell, a desktop or a launcher sets, and none whose
    name or value may be a secret."""
    environ = os.environ if environ is None else environ
    found = {}
    for name, value in sorted(environ.items()):
        if name.startswith(_PREFIXES) or _NOT_OF_USER.match(name):
            continue
        if is_secret_name(name) or is_secret_value(value) or len(name) > _LONGEST_NAME:
            continue
        is_plain = _SWITCH.fullmatch(value) is not None and len(value) <= _MOST_DIGITS
        found[name] = (
            value if is_plain else f"#{hashlib.sha256(value.encode(errors='replace')).hexdigest()[:4]}"
        )
    return found


def _nccl_files(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(name, value) from the files NCCL reads; a later pair wins.

    Source: NCCL user guide, environment variables: /etc/nccl.conf, and ~/.nccl.conf or
    the file that NCCL_CONF_FILE names.
    """
    user_file = environ.get("NCCL_CONF_FILE") or Path(environ.get("HOME", "/"), ".nccl.conf")
    for path in (Path("/etc/nccl.conf"), Path(user_file)):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        for line in text.splitlines():
            name, separator, value = line.partition("#")[0].partition("=")
            if separator:
                yield name.strip(), value.strip()


def environment_warnings(
    environ: Mapping[str, str] | None = None,
    platform: DeviceKind | None = None,
    num_streams: int = len(STREAM_NAMES),
) -> list[str]:
    """One line for each setting under which the numbers do not show the program as it runs otherwise.

    num_streams: device streams that the run uses, to judge the number of hardware queues on ROCm.
    """
    environ = collect_environment(environ)
    platform = current_platform() if platform is None else platform
    lines = []
    if platform != "cpu":
        lines += [
            f"{name}={environ[name]}: {effect}" for name, effect in _FALSIFYING if _is_set(environ, name)
        ]
    if platform == "cuda" and environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        lines.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one hardware queue: communication that is "
            "launched before compute starts first, and what is launched behind it can wait for it, more so "
            "with timing events between them"
        )
    if platform == "hip":
        num_queues = environ.get("GPU_MAX_HW_QUEUES", "4")
        if num_queues.isdecimal() and int(num_queues) < num_streams:
            source = "set" if "GPU_MAX_HW_QUEUES" in environ else "the default"
            lines.append(
                f"GPU_MAX_HW_QUEUES={num_queues} ({source}): {num_streams} streams share that many queues, "
                f"and work on streams that share one runs in order; set it to {num_streams} or more"
            )
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        lines.append(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: ranks compare every collective first, which costs host time"
        )
    return lines


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off", "n", "f")


def current_platform() -> DeviceKind:
    """The kind of the devices that this process may use."""
    devices = accelerator()
    return devices.kind if devices.is_available() else CPU.kind


def collect_versions() -> dict[str, str | None]:
    """None where a component is absent or does not say."""
    return {
        "aorta": __version__,
        "aorta_commit": _checkout_commit(),
        "program_commit": program_commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl_version(),
        "cudnn": _cudnn_version(),
        "driver": _driver_version(),
        "kernel": platform.release(),
    }


def _checkout_commit() -> str | None:
    """The commit of the checkout that this package lies in, with -dirty where tracked files differ."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    described = _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return None if described is None else described.decode().strip() or None


def program_commit() -> str | None:
    """The commit of the repository that the program lies in; where tracked files differ with -dirty and a
    fingerprint of what differs. None outside of a repository, and where git takes too long."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:
        return None
    folder = Path(main).resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    changed = None if commit is None else _git(folder, "diff", "--no-ext-diff", "--no-textconv", "HEAD")
    if commit is None or changed is None:
        return None
    dirty = f"-dirty-{hashlib.sha256(changed).hexdigest()[:8]}" if changed else ""
    return f"{commit.decode().strip()}{dirty}"


def _git(folder: Path, *arguments: str) -> bytes | None:
    """What git prints; None where it fails. It takes no lock that the user's own git would wait for."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=GIT_S,
            check=True,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _nccl_version() -> str | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _cudnn_version() -> str | None:
    version = torch.backends.cudnn.version() if accelerator().is_available() else None
    return None if version is None else str(version)


def _driver_version() -> str | None:
    """Version of the kernel module, which containers show too."""
    nvidia = _read_text("/proc/driver/nvidia/version")
    if match := re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", nvidia):
        return match.group(1)
    return _read_text("/sys/module/amdgpu/version") or None


def collect_devices() -> list[dict[str, Any]]:
    """One entry for each GPU that this process may use, in torch's order; without GPUs one for the CPU."""
    if current_platform() == "cpu":
        return [_cpu()]
    devices = accelerator()
    return [devices.describe(index) for index in range(devices.count())]


def _cpu() -> dict[str, Any]:
    match = re.search(r"^model name\s*:\s*(.+)$", _read_text("/proc/cpuinfo"), re.MULTILINE)
    return {
        "kind": "cpu",
        "index": 0,
        "name": match.group(1) if match else platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "num_cores": psutil.cpu_count(logical=False),
        "num_usable_cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
