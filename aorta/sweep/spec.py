"""SWEEP.yaml: what a sweep varies, what it keeps, and which metric counts.

load_spec() reads one and refuses, before anything runs, what cannot be swept. An environment variable may be
swept if the NCCL or RCCL of this machine reads it, or it is on a list here: one that nothing reads would make
all trials alike.
"""

import itertools
import math
import mmap
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from aorta.account.metrics import MEANINGS, metric_key
from aorta.config import configuration_path, load_config, validate
from aorta.config.yaml_files import read_yaml
from aorta.errors import ConfigError, did_you_mean

FILES = Path(__file__).resolve().parent / "files"
"""Sweeps that come with aorta."""
Scalar = bool | int | float | str | None
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
OUTPUT = "training.output_dir"
ENVIRONMENT = "env."
"""Prefix of an environment variable's name in the configuration of a trial."""


class ChoiceRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers from low to high, both included, for method optuna."""

    low: int | float
    high: int | float
    log: bool = False
    """True: drawn evenly in the logarithm."""
    step: int | float | None = None


Choice = list[Scalar] | ChoiceRange


class SweepSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a sweep's file."""

    name: str
    """Name of the sweep and of its folder."""

    config: str = "default"
    """Settings that all trials start from: a file relative to the sweep's, or a name as of `aorta train`."""

    overrides: list[str] = []
    """Settings of all trials, as for train.py."""

    ranks: PositiveInt = 1
    """Ranks on this machine per trial."""

    objective: str = "step_ms"
    """A metric of the report, such as exposed_ms or comm_ms.all_gather: its median over steps and ranks."""

    goal: Literal["minimize", "maximize"] | None = None
    """Direction of the objective; null: the one that is better for this metric."""

    method: Literal["grid", "optuna"] = "grid"
    """grid: every combination. optuna: its TPE sampler proposes `trials` of them (extra 'sweep')."""

    trials: PositiveInt = 20
    """Number of different trials that optuna does."""

    seed: int = 0
    """Seed of optuna's proposals."""

    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
    """Seconds after which a trial is ended and counts as failed."""

    parameters: dict[str, Choice] = {}
    """Settings by their dotted name: a list of values, or a range."""

    environment: dict[str, Choice] = {}
    """Environment variables: values as text or numbers; null: not set."""

    def choices(self) -> dict[str, Choice]:
        """Choices by name, settings first, environment variables with their prefix."""
        return {**self.parameters, **{ENVIRONMENT + name: c for name, c in self.environment.items()}}

    def maximizes(self) -> bool:
        """True if a larger objective is better."""
        if self.goal is not None:
            return self.goal == "maximize"
        return MEANINGS[metric_key(self.objective).name].better == "higher"

    def grid(self) -> Iterator[dict[str, Scalar]]:
        """Every combination, the last name varying fastest."""
        lists = {name: choice for name, choice in self.choices().items() if isinstance(choice, list)}
        for values in itertools.product(*lists.values()):
            yield dict(zip(lists, values, strict=True))

    def num_trials(self) -> int:
        """Number of different trials of the whole sweep."""
        if self.method == "optuna":
            return self.trials
        return math.prod(len(choice) for choice in self.choices().values() if isinstance(choice, list))


def load_spec(path: Path | str) -> SweepSpec:
    """The sweep that a YAML file describes, checked. Raises ConfigError for what cannot be swept.

    config/sweeps/NAME.yaml is the sweep that comes with aorta, unless there is such a file here.
    """
    path = Path(path)
    if not path.exists() and path.parts[-3:-1] == ("config", "sweeps"):
        path = FILES / path.name
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold settings such as 'name:' and 'parameters:'")
    for key in data:
        if key not in SweepSpec.__struct_fields__:
            hint = did_you_mean(str(key), SweepSpec.__struct_fields__)
            raise ConfigError(f"{path}: {key} is no setting of a sweep{hint}")
    try:
        spec = msgspec.convert(data, SweepSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not Path(spec.config).is_absolute():
        sibling = path.parent / spec.config
        config = sibling if sibling.is_file() else configuration_path(spec.config)
        spec = msgspec.structs.replace(spec, config=str(config))
    check_spec(spec, str(path))
    return spec


def check_spec(spec: SweepSpec, place: str) -> None:
    """Raise ConfigError, naming the place that the sweep was read from, for what cannot be swept."""
    if not spec.name or set(spec.name) & set("/\\") or spec.name.startswith("."):
        raise ConfigError(f"{place}: name {spec.name!r} cannot be the name of a folder")
    if not spec.choices():
        raise ConfigError(f"{place}: nothing is varied: give parameters or environment")
    kind = metric_key(spec.objective).name
    if kind not in MEANINGS:
        hint = did_you_mean(kind, MEANINGS, f"; there is {', '.join(MEANINGS)}")
        raise ConfigError(f"{place}: objective {spec.objective} is no metric of the report{hint}")
    if spec.goal is None and MEANINGS[kind].better == "neither":
        raise ConfigError(f"{place}: {spec.objective} is neither better nor worse when it grows: give a goal")
    if any(setting.partition("=")[0] == OUTPUT for setting in (*spec.parameters, *spec.overrides)):
        raise ConfigError(
            f"{place}: {OUTPUT} is a folder of the sweep for each trial; give sweep.py an --output"
        )
    for name, choice in spec.choices().items():
        _check_choice(spec, name, choice, place)
    for name in spec.environment:
        check_knob(name)
    for name, choice in spec.parameters.items():
        for value in _ends(choice):
            # Each value alone; combinations that do not fit each other are trials that fail.
            load_config(spec.config, [*spec.overrides, override(name, value)])
    if spec.method == "grid":
        validate(load_config(spec.config, spec.overrides), spec.ranks)


def _check_choice(spec: SweepSpec, name: str, choice: Choice, place: str) -> None:
    if any(isinstance(value, float) and not math.isfinite(value) for value in _ends(choice)):
        raise ConfigError(f"{place}: {name} has a value that is no finite number")
    if isinstance(choice, list):
        if not choice or len({repr(value) for value in choice}) < len(choice):
            raise ConfigError(f"{place}: {name} needs one value or more, each once")
        return
    if spec.method == "grid":
        raise ConfigError(f"{place}: {name} is a range; a grid needs a list of values, or use method: optuna")
    if not choice.low < choice.high or choice.log and choice.low <= 0:
        raise ConfigError(f"{place}: {name} cannot range from {choice.low} to {choice.high}")
    if choice.step is not None and not 0 < choice.step < math.inf:
        raise ConfigError(f"{place}: {name} cannot go in steps of {choice.step}")
    if choice.log and choice.step is not None:
        raise ConfigError(f"{place}: {name} cannot have both log and step")


def _ends(choice: Choice) -> list[Scalar]:
    """Values of a list, ends of a range."""
    return choice if isinstance(choice, list) else [choice.low, choice.high]


def override(name: str, value: Scalar) -> str:
    """Setting as text for --override of the training command."""
    return f"{name}={msgspec.json.encode(value).decode()}"


_NCCL = """
ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE COLLNET_ENABLE COLLNET_NODE_THRESHOLD
COMM_BLOCKING CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DMABUF_ENABLE GDRCOPY_ENABLE
GRAPH_MIXING_SUPPORT GRAPH_REGISTER IB_ADAPTIVE_ROUTING IB_AR_THRESHOLD IB_DISABLE IB_GID_INDEX IB_HCA
IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT
IGNORE_CPU_AFFINITY LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS MIN_CTAS
MIN_NCHANNELS MNNVL_ENABLE NCHANNELS_PER_NET_PEER NET NET_GDR_LEVEL NET_GDR_READ NET_SHARED_BUFFERS
NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLS_ENABLE P2P_DIRECT_DISABLE P2P_DISABLE
P2P_LEVEL P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROTO PXN_DISABLE RUNTIME_CONNECT SHM_DISABLE
SOCKET_IFNAME SOCKET_NTHREADS WIN_ENABLE WORK_FIFO_BYTES
"""
_RCCL = "MSCCLPP_ENABLE MSCCLPP_THRESHOLD MSCCL_ENABLE MSCCL_FORCE_ENABLE"
_OTHERS = """
CUDA_DEVICE_MAX_CONNECTIONS CUDA_MODULE_LOADING GPU_MAX_HW_QUEUES HIP_FORCE_DEV_KERNARG HSA_ENABLE_SDMA
HSA_NO_SCRATCH_RECLAIM HSA_FORCE_FINE_GRAIN_PCIE TORCH_NCCL_HIGH_PRIORITY
TORCH_NCCL_USE_COMM_NONBLOCKING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_CUDA_EVENT_CACHE
TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_TRACE_BUFFER_SIZE PYTORCH_TUNABLEOP_ENABLED PYTORCH_ALLOC_CONF
PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING OMP_NUM_THREADS
MKL_NUM_THREADS GLOO_SOCKET_IFNAME
"""
KNOBS: frozenset[str] = frozenset(
    [*(f"NCCL_{n}" for n in _NCCL.split()), *(f"RCCL_{n}" for n in _RCCL.split()), *_OTHERS.split()]
)
"""Environment variables that may be swept where the library is not there to be asked."""
_OF_LIBRARY = ("NCCL_", "RCCL_")
"""Prefixes of variables that the library is asked about."""
_LIBRARY_FILES = (
    "nvidia/nccl/lib/libnccl.so*",
    "nvidia/*/lib/libnccl.so*",
    "torch/lib/librccl.so*",
    "torch/lib/libnccl.so*",
)
_SYSTEM_FILES = ("/opt/rocm/lib/librccl.so", "/usr/lib/x86_64-linux-gnu/libnccl.so.2")


def check_knob(name: str) -> None:
    """Raise ConfigError where nothing is known to read the variable."""
    if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
        raise ConfigError(f"environment.{name}: names of variables are capital letters, digits and _")
    in_library = library_reads(name) if name.startswith(_OF_LIBRARY) else None
    if in_library or (name in KNOBS and in_library is None):
        return
    if name in KNOBS:
        raise ConfigError(f"environment.{name}: {_library()} does not read it")
    hint = did_you_mean(name, KNOBS, "; aorta/sweep/spec.py lists those that are")
    raise ConfigError(f"environment.{name} is no variable that anything is known to read{hint}")


def library_reads(name: str) -> bool | None:
    """True where NCCL or RCCL, as torch would load it here, holds the name; None where there is none."""
    path = _library()
    return None if path is None else _holds(path, name)


@cache
def _library() -> Path | None:
    for folder in sys.path:
        for pattern in _LIBRARY_FILES:
            for path in sorted(Path(folder or ".").glob(pattern)):
                return path
    return next((Path(path) for path in _SYSTEM_FILES if Path(path).exists()), None)


@cache
def _holds(path: Path, name: str) -> bool | None:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(name.encode() + b"\0") >= 0
    except (OSError, ValueError):
        return None
