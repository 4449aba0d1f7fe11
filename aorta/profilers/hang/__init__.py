"""Hangs: a watchdog per rank writes where the rank stands; together the ranks' reports say who is missing."""

from aorta.profilers.hang.watchdog import Watchdog

__all__ = ["Watchdog"]
