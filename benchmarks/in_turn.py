"""Variants of one measurement, each in every round, so that a drift of the machine meets all of them."""

from collections.abc import Callable, Mapping

import numpy as np


def us_in_turn(variants: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Measure each variant in each round, leave out a first round, print medians in µs a kernel."""
    us: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(num_rounds + 1):
        for name, measure in variants.items():
            us[name].append(measure())
    for name, values in us.items():
        del values[0]
        print(f"{name:36} {np.median(values):6.3f} us a kernel   [{min(values):.3f}, {max(values):.3f}]")
    return us
