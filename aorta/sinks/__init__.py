"""Sends the numbers of steps on (--to KIND=TARGET), on a thread of its own, and never blocks the training.

sink     opens sinks by kind and feeds them; a new kind is a row of KINDS and a file
scalars  the numbers that are sent, under one set of names
prometheus, tensorboard, opentelemetry, wandb, mlflow
         the kinds, one file each

A sink gets StepRecords some steps late. One that fails says so once and gets nothing more.
"""

from aorta.sinks.sink import KINDS, Sinks, check_target, open_sinks

__all__ = ["KINDS", "Sinks", "check_target", "open_sinks"]
