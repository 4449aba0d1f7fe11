"""Errors of projections against measurements, in the same figures everywhere."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the order statistics."""
    return float(np.quantile(values, share))


def error_summary(errors_pct: Sequence[float]) -> dict[str, Any]:
    """Number, median and 90 % quantile of the errors' sizes, and the median error with its sign.

    Without errors the sizes are None.
    """
    if not len(errors_pct):
        return {"num_rows": 0, "median_abs_error_pct": None, "p90_abs_error_pct": None}
    sizes = [abs(error) for error in errors_pct]
    return {
        "num_rows": len(errors_pct),
        "median_abs_error_pct": quantile(sizes, 0.5),
        "p90_abs_error_pct": quantile(sizes, 0.9),
        "median_error_pct": quantile(errors_pct, 0.5),
    }
