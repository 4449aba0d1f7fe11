"""Sweeps of training runs: a process per trial, over settings and environment variables."""

from aorta.sweep.spec import SweepSpec, load_spec
from aorta.sweep.trials import run_sweep

__all__ = ["SweepSpec", "load_spec", "run_sweep"]
