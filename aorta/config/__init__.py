"""Settings: plain structs, YAML files with a base, overrides, and checks that need no GPU and no torch."""

from aorta.config.layout import Layout, resolve_layout, validate
from aorta.config.load import configuration_names, configuration_path, load_config
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
