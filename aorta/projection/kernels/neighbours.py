"""Interpolation between measurements of nearby sizes, in logarithms.

What is interpolated is the logarithm of measured / model time, which is flat where time is not: the model
carries the size, the neighbours carry what it does not know.
"""

import numpy as np
from numpy.typing import NDArray

from aorta.hardware import RatioInterval

NUM_NEIGHBOURS = 6
LONE_INTERVAL = RatioInterval(low=0.5, high=2.0)
"""Around one or two measurements, or outside of all of them."""
QUANTILES = (0.1, 0.9)


class Neighbours:
    """log(measured / model) over points of log size. reach: distance at which a point says nothing."""

    def __init__(self, points: NDArray[np.float64], log_ratios: NDArray[np.float64], reach: float) -> None:
        assert len(points) == len(log_ratios) > 0
        self.points, self.log_ratios, self.reach = points, log_ratios, reach
        self.interval = self._leave_one_out()

    def log_ratio(self, point: NDArray[np.float64]) -> tuple[float, RatioInterval] | None:
        """Interpolated log(measured / model) and the factors of its range; None outside the measurements."""
        low, high = self.points.min(axis=0), self.points.max(axis=0)
        distance = np.sqrt(((self.points - point) ** 2).sum(axis=1))
        inside = bool(np.all(point >= low - 1e-9) and np.all(point <= high + 1e-9))
        if not inside or distance.min() > self.reach:
            return None
        return self._average(distance), self.interval

    def _average(self, distance: NDArray[np.float64]) -> float:
        if distance.min() < 1e-9:
            return float(self.log_ratios[distance < 1e-9].mean())
        nearest = np.argsort(distance)[:NUM_NEIGHBOURS]
        weight = distance[nearest] ** -2.0
        return float((weight * self.log_ratios[nearest]).sum() / weight.sum())

    def _leave_one_out(self) -> RatioInterval:
        """Each measurement predicted from the others."""
        if len(self.points) < 3:
            return LONE_INTERVAL
        residuals = []
        for index in range(len(self.points)):
            distance = np.sqrt(((self.points - self.points[index]) ** 2).sum(axis=1))
            distance[index] = np.inf
            residuals.append(self.log_ratios[index] - self._average(distance))
        low, high = np.exp(np.quantile(residuals, QUANTILES))
        return RatioInterval(low=min(1.0, float(low)), high=max(1.0, float(high)))
