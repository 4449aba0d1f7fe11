"""The instrument: watches a training process and has one line of numbers written per step and rank.

recorder.py is what a training script holds, and names the parts; CONTRIBUTING.md says which file does what.
"""

from aorta.record.handles import StepHandle
from aorta.record.recorder import Recorder
from aorta.record.settings import RecorderSettings

__all__ = ["Recorder", "RecorderSettings", "StepHandle"]
