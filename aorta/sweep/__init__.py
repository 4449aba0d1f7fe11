"""Sweeps of training runs: a process per trial, over settings and environment variables."""

from aorta.sweep.run import run_sweep
from aorta.sweep.spec import SweepSpec, load_spec

__all__ = ["SweepSpec", "load_spec", "run_sweep"]
