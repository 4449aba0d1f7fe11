"""Kernel traces taken by the run itself."""

from aorta.profiling.window import ProfilerWindow

__all__ = ["ProfilerWindow"]
