"""What `aorta run` tells the processes of its command, in one environment variable."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

VARIABLE = "AORTA_RUN"
BOOTSTRAP = Path(__file__).resolve().parent / "bootstrap"
HOME = Path(__file__).resolve().parents[2]
"""The folder that holds the package aorta."""
WATCHED = ("torch", "torch.distributed.distributed_c10d", "torch.distributed.optim.optimizer")


@dataclass(frozen=True, kw_only=True)
class AttachSettings:
    """Options of `aorta run`."""

    output: str
    step_at: str | None = None
    """module:function whose calls are the steps; None: found at the optimizer."""
    timed_every: int = 1
    detail_every: int = 1
    max_mb: float | None = 1024.0
    placement: str = "native"
    hang: bool = False
    kernels_every: int = 0
    collectives: str = "calls"
    tensorboard: bool = False
    sinks: list[str] = field(default_factory=list)
    """As of --to."""


def environment_for(settings: AttachSettings, environ: dict[str, str]) -> dict[str, str]:
    """The environment of a command whose Python processes are to be recorded."""
    imports = [*WATCHED]
    if settings.step_at is not None:
        imports.append(settings.step_at.partition(":")[0])
    fields = asdict(settings) | {"home": str(HOME), "imports": imports}
    search_path = environ.get("PYTHONPATH")
    path = os.pathsep.join([str(BOOTSTRAP), search_path] if search_path else [str(BOOTSTRAP)])
    return environ | {VARIABLE: json.dumps(fields), "PYTHONPATH": path}


def read_settings() -> AttachSettings:
    """The settings of this process; KeyError where it was not started by `aorta run`."""
    fields = json.loads(os.environ[VARIABLE])
    return AttachSettings(
        **{name: fields[name] for name in AttachSettings.__dataclass_fields__ if name in fields}
    )
