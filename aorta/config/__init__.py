"""Settings: plain structs, YAML files with a base, overrides, and checks that need no GPU and no torch.

The recorder needs the structs alone: what reads YAML files is imported when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from aorta.config.structs import (
    CompileConfig,
    Config,
    DataConfig,
    DistributedConfig,
    HangConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfilingConfig,
    RecordingConfig,
    SchedulerConfig,
    TrainingConfig,
)

if TYPE_CHECKING:
    from aorta.config.layout import Layout, resolve_layout, validate
    from aorta.config.load import configuration_names, configuration_path, load_config

__all__ = [
    "CompileConfig",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "HangConfig",
    "Layout",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfilingConfig",
    "RecordingConfig",
    "SchedulerConfig",
    "TrainingConfig",
    "configuration_names",
    "configuration_path",
    "load_config",
    "resolve_layout",
    "validate",
]

_HOME = {
    "Layout": "aorta.config.layout",
    "configuration_names": "aorta.config.load",
    "configuration_path": "aorta.config.load",
    "load_config": "aorta.config.load",
    "resolve_layout": "aorta.config.layout",
    "validate": "aorta.config.layout",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'aorta.config' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME.keys())
