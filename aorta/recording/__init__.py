"""The instrument: records every collective and every step of a training script."""

from aorta.recording.handles import StepHandle
from aorta.recording.recorder import Recorder
from aorta.recording.settings import RecorderSettings
from aorta.steps.calibration import Calibration, calibrate

__all__ = ["Calibration", "Recorder", "RecorderSettings", "StepHandle", "calibrate"]
