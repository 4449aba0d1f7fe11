"""The instrument: records every collective and every step of a training script."""

from aorta.record.handles import StepHandle
from aorta.record.recorder import Recorder
from aorta.record.settings import RecorderSettings
from aorta.steps.calibration import Calibration, calibrate

__all__ = ["Calibration", "Recorder", "RecorderSettings", "StepHandle", "calibrate"]
