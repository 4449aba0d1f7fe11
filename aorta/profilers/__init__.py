"""Kernel traces taken by the run itself."""

from aorta.profilers.window import ProfilerWindow

__all__ = ["ProfilerWindow"]
