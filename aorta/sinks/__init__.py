"""Where else the numbers of the steps go: Prometheus, TensorBoard, OpenTelemetry, Weights & Biases, MLflow.

A sink gets StepRecords on a thread of its own, some steps late, and never blocks the training. One that
fails says so once and gets nothing more.
"""

from aorta.sinks.sink import KINDS, Sinks, check_target, open_sinks

__all__ = ["KINDS", "Sinks", "check_target", "open_sinks"]
