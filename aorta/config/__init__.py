"""Settings of a training run, and how they are read; no torch, no GPU.

structs     every setting with its type, default and meaning
load        a YAML file, its bases and overrides to a Config; wrong keys and values named in one line
layout      the mesh that a Config gives for a world size, and combinations that cannot work
yaml_files  reading YAML safely; structs of other YAML files of aorta (parts, plans, budgets)
files/      configurations that come with aorta

The recorder needs the structs alone: modules that read YAML are imported when first used.
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

_HOME = dict.fromkeys(("Layout", "resolve_layout", "validate"), "aorta.config.layout")
_HOME |= dict.fromkeys(("configuration_names", "configuration_path", "load_config"), "aorta.config.load")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'aorta.config' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME.keys())
