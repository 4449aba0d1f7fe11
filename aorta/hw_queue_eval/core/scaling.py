"""A workload over its stream counts."""

from collections.abc import Sequence

from aorta.hw_queue_eval.core.results import Point, Scaling


def scalings(points: Sequence[Point]) -> list[Scaling]:
    """One for each workload and configuration with at least two measured stream counts."""
    return []
