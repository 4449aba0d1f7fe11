"""Sends the numbers of steps on (--to KIND=TARGET), beside the training, which never waits for it.

sink     opens sinks by kind and feeds them; a new kind is a row of KINDS and a file
scalars  the numbers that are sent, under one set of names
prometheus, tensorboard, opentelemetry, wandb, mlflow
         the kinds, one file each
exporter the process of prometheus, which reads the lines of a machine's ranks

The other sinks get StepRecords some steps late. One that fails says so once and gets nothing more.
"""

from aorta.sinks.sink import KINDS, Place, Sinks, check_target

__all__ = ["KINDS", "Place", "Sinks", "check_target"]
