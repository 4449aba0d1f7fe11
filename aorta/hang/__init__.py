"""Hangs: a watchdog per rank writes where the rank stands; together the ranks' reports say who is missing."""

from aorta.hang.watchdog import Watchdog

__all__ = ["Watchdog"]
