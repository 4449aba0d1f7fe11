"""Runs and traces as pandas frames, for notebooks: aorta.load(path), aorta.compare(a, b)."""

from aorta.notebook.comparison import RunComparison, compare
from aorta.notebook.run import LoadedRun, load

__all__ = ["LoadedRun", "RunComparison", "compare", "load"]
