"""The ways between `aorta run` and the processes of its command: options go in by one environment variable,
lines for the user come out on stderr.

Imported by every Python below `aorta run` that imports torch, so it imports nothing heavy.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aorta.launcher import rank_text

VARIABLE = "AORTA_RUN"
"""The environment variable that holds the options, as JSON."""
BOOTSTRAP = Path(__file__).resolve().parent / "bootstrap"
"""The folder with our sitecustomize.py, for PYTHONPATH."""
HOME = Path(__file__).resolve().parents[2]
"""The folder that holds the package aorta."""
LAUNCHER = "torch.distributed.elastic.multiprocessing.api"
"""Module of torchrun's agent that learns how a process ended."""
TRANSFORMERS = "transformers.modeling_utils"
"""Whose models have an eval() that calls none of torch's."""
WATCHED = (
    "torch",
    "torch.distributed.distributed_c10d",
    "torch.distributed.optim.optimizer",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    TRANSFORMERS,
    LAUNCHER,
)
"""Modules after whose import sitecustomize calls aorta.attach.hooks.imported."""


@dataclass(frozen=True, kw_only=True)
class AttachSettings:
    """Options of `aorta run`."""

    output: str
    step_at: str | None = None
    """module:function whose calls are the steps; None: steps are found at the optimizer."""
    overhead: str = "1%"
    placement: str = "native"
    hang: bool = False
    hang_timeout_s: float | None = None
    """None: the default of hang.timeout_s."""
    kernels: str = "auto"
    """auto, off: events time the steps. on: the driver's kernel records on ROCm too."""
    stacks: bool = True
    sinks: list[str] = field(default_factory=list)
    """KIND=TARGET, as --to takes them."""
    check_every: int = 0
    """Check two steps of every so many for hazards, as `aorta check` does; 0: none."""
    check_confirm: bool = True
    """Delay the operations of findings to confirm them."""
    check_exceptions: str | None = None
    """File of the user's known exceptions."""


def environment_for(settings: AttachSettings, environ: dict[str, str]) -> dict[str, str]:
    """Return the environment of a command whose Python processes are to be recorded."""
    imports = [*WATCHED]
    if settings.step_at is not None:
        imports.append(settings.step_at.partition(":")[0])
    fields = asdict(settings) | {"home": str(HOME), "imports": imports}
    search_path = environ.get("PYTHONPATH")
    path = os.pathsep.join([str(BOOTSTRAP), search_path] if search_path else [str(BOOTSTRAP)])
    return environ | {VARIABLE: json.dumps(fields), "PYTHONPATH": path}


def read_settings() -> AttachSettings:
    """Read the settings of this process; KeyError where it was not started by `aorta run`."""
    fields = json.loads(os.environ[VARIABLE])
    return AttachSettings(
        **{name: fields[name] for name in AttachSettings.__dataclass_fields__ if name in fields}
    )


def say(message: str) -> None:
    """Print one line on stderr, with the rank; never raises, for it runs inside the user's program."""
    rank = rank_text()
    rank_note = "" if rank is None else f" (rank {rank})"
    try:
        sys.stderr.write(f"aorta{rank_note}: {message}\n")
        sys.stderr.flush()
    except Exception:
        pass
