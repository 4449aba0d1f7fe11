"""The instrument: watches a training process and has one line of numbers written per step and rank.

recorder.py is what a training script holds, and names the parts; CONTRIBUTING.md says which file does what.
The names below are imported when first used: a loader's worker that is a new process needs none of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aorta.record.handles import StepHandle as StepHandle
    from aorta.record.recorder import Recorder as Recorder
    from aorta.record.settings import RecorderSettings as RecorderSettings

__all__ = ["Recorder", "RecorderSettings", "StepHandle"]

_HOME = {"Recorder": "recorder", "RecorderSettings": "settings", "StepHandle": "handles"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'aorta.record' has no attribute {name!r}")
    return getattr(importlib.import_module(f"aorta.record.{_HOME[name]}"), name)
