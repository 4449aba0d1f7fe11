"""How well groups of rows are predicted by factors fitted on all other groups.

The fitted factors above the kernels act nearly as powers on the step time, so each row is projected once as
it is and once with each factor moved; a fit on any part of the rows is then least squares on plain numbers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.hardware import Interval, vendor_step
from aorta.projection.accuracy import error_summary
from aorta.projection.pricing import Factors, Pricer, factors_of
from aorta.projection.rows import Row
from aorta.projection.step import project

MOVED = 1.08
MOST_CHANGE = math.log(2.0)
"""Neither factor moves further than this from where it stands."""
ITERATIONS = 25


class Sensitivity(NamedTuple):
    """One row: log(projected / measured) under the vendor's factors, its change per log of each factor."""

    row: Row
    residual: float
    slopes: tuple[float, ...]


def step_sensitivity(row: Row) -> Sensitivity:
    """To the factors that `calibrate` fits to steps."""
    return _sensitivity(row, factors_of(row.hardware), ("gemm", "contention_compute", "dtensor_launch_s"))


def published_sensitivity(row: Row) -> Sensitivity:
    """To fp8_gemm of the vendor and to what the part's own differs from it.

    The residual is the one under the vendor's factor: a part's own is what its rows told, so that it is gone
    where they are left out.
    """
    own = factors_of(row.hardware)
    vendor = msgspec.structs.replace(own, fp8_gemm=vendor_step(row.hardware.vendor).fp8_gemm)
    found = _sensitivity(row, vendor, ("fp8_gemm",))
    apart = own.fp8_gemm != vendor.fp8_gemm
    return found._replace(slopes=(found.slopes[0], found.slopes[0] if apart else 0.0))


def _sensitivity(row: Row, factors: Factors, names: Sequence[str]) -> Sensitivity:
    plan = row.plans[0][1]
    measured_s = plan.global_batch_size * plan.seq_len / row.tokens_per_s_per_gpu / plan.world_size

    def log_s(with_factors: Factors) -> float:
        return math.log(project(row.model, plan, Pricer(row.hardware, plan, factors=with_factors)).step_s)

    at = log_s(factors)
    slopes = []
    for name in names:
        moved = msgspec.structs.replace(factors, **{name: getattr(factors, name) * MOVED})
        slopes.append((log_s(moved) - at) / math.log(MOVED))
    return Sensitivity(row, at - math.log(measured_s), tuple(slopes))


def leave_groups_out(
    rows: Sequence[Sensitivity],
    group_of: Callable[[Row], object],
    sharing_of: Callable[[Row], str],
) -> dict[str, Any]:
    """Errors of each group under factors fitted to the rows outside of it.

    Rows of one sharing_of share factors: those of one vendor. A group whose factors no other row shares is
    predicted as it stands, and says so.
    """
    groups: dict[str, list[Sensitivity]] = {}
    for one in rows:
        groups.setdefault(str(group_of(one.row)), []).append(one)
    found: dict[str, Any] = {}
    pooled: list[float] = []
    for name, members in groups.items():
        outside: dict[str, list[Sensitivity]] = {sharing_of(one.row): [] for one in members}
        for other in rows:
            if str(group_of(other.row)) != name and sharing_of(other.row) in outside:
                outside[sharing_of(other.row)].append(other)
        changes = {shared: fit(others) for shared, others in outside.items() if others}
        errors = []
        for one in members:
            change = changes.get(sharing_of(one.row))
            errors.append(one.residual + (0.0 if change is None else float(np.dot(one.slopes, change))))
        pooled += errors
        found[name] = _errors(errors) | {"refitted": bool(changes)}
    return {"groups": found, **_errors(pooled)}


def fit(rows: Sequence[Sensitivity]) -> NDArray[np.float64]:
    """Changes of the log factors with the least sum of |log error|, by reweighted least squares."""
    slopes = np.array([one.slopes for one in rows], dtype=np.float64)
    residuals = np.array([one.residual for one in rows], dtype=np.float64)
    change: NDArray[np.float64] = np.zeros(slopes.shape[1])
    for _ in range(ITERATIONS):
        weights = 1.0 / np.maximum(1e-3, np.abs(residuals + slopes @ change))
        normal = slopes.T @ (slopes * weights[:, None]) + 1e-6 * np.eye(len(change))
        solved = np.linalg.solve(normal, -slopes.T @ (weights * residuals))
        change = np.asarray(np.clip(solved, -MOST_CHANGE, MOST_CHANGE), dtype=np.float64)
    return change


def residual_interval(rows: Sequence[Sensitivity]) -> Interval | None:
    """10 % and 90 % quantiles of measured / projected, each row left out of the fit that predicts it."""
    if len(rows) < 3:
        return None
    left_out = []
    for number, one in enumerate(rows):
        change = fit([*rows[:number], *rows[number + 1 :]])
        left_out.append(-(one.residual + float(np.dot(one.slopes, change))))
    low, high = np.exp(np.quantile(left_out, (0.1, 0.9)))
    return Interval(low=float(low), high=float(high))


def _errors(log_residuals: Sequence[float]) -> dict[str, Any]:
    return error_summary([float(error) for error in np.expm1(log_residuals) * 100])
