"""Errors of groups of rows under factors fitted on all other groups.

The fitted factors act nearly as powers on the step time, so each row is projected once as it is and once with
each factor moved; a fit on any part of the rows is then least squares on plain numbers. A factor that no row
outside a group can tell falls back to its prior.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from projection.fitted import FITTED, prior_shift, slope_of
from projection.measured_steps import Row, pricer_of

from aorta.hardware.part import RatioInterval
from aorta.projection.interval import WIDTHS, Widening, width_of
from aorta.projection.prices import Factors, factors_of
from aorta.projection.step import Projection, project

MOVED = 1.08
MOST_CHANGE = math.log(2.0)
"""No factor moves further than this from where it stands."""
ITERATIONS = 25
PRIOR_WEIGHT = 0.02
"""Weight of a factor's prior against one row that determines it alone."""
STEP_FACTORS = ("gemm", "contention_compute", "dtensor_launch_s")
"""Factors that `calibrate` fits to steps."""


class Sensitivity(NamedTuple):
    """One row: log(projected / measured) as it stands, its change per log of each factor, and how far the
    prior of each factor lies from where it stands."""

    row: Row
    residual: float
    slopes: tuple[float, ...]
    priors: tuple[float, ...]


def step_sensitivity(row: Row) -> Sensitivity:
    """Sensitivity to the factors that `calibrate` fits to steps."""
    plan, factors = row.plans[0][1], factors_of(row.hardware)
    log_step_s = _log_s(row, plan, factors)
    slopes = []
    for name in STEP_FACTORS:
        moved = msgspec.structs.replace(factors, **{name: getattr(factors, name) * MOVED})
        slopes.append((_log_s(row, plan, moved) - log_step_s) / math.log(MOVED))
    return Sensitivity(row, log_step_s - _log_measured(row), tuple(slopes), (0.0,) * len(slopes))


def published_sensitivity(row: Row, projection: Projection) -> Sensitivity:
    """Sensitivity to every factor that was fitted to published runs."""
    plan, factors = row.plans[0][1], factors_of(row.hardware)
    slopes, priors = [], []
    for factor in FITTED:
        acts = factor.acts_on(row, plan)
        slopes.append(slope_of(factor, projection.breakdown_s) if acts else 0.0)
        priors.append(prior_shift(factor, plan, factors) if acts else 0.0)
    residual = math.log(projection.step_s) - _log_measured(row)
    return Sensitivity(row, residual, tuple(slopes), tuple(priors))


def _log_s(row: Row, plan: Any, factors: Factors) -> float:
    return math.log(project(row.model, plan, pricer_of(row, factors)).step_s)


def _log_measured(row: Row) -> float:
    plan = row.plans[0][1]
    return math.log(plan.global_batch_size * plan.seq_len / row.tokens_per_s_per_gpu / plan.world_size)


def left_out_residuals(
    rows: Sequence[Sensitivity], group_of: Callable[[Row], object]
) -> list[tuple[Sensitivity, float, bool]]:
    """Every row with its log error under factors fitted outside of its group, and whether any row outside
    shares a factor with it."""
    groups: dict[str, list[Sensitivity]] = {}
    for member in rows:
        groups.setdefault(str(group_of(member.row)), []).append(member)
    judged = []
    for name, members in groups.items():
        outside = [outsider for outsider in rows if str(group_of(outsider.row)) != name]
        change = fit(outside, members)
        shared = np.abs([outsider.slopes for outsider in outside]).sum(axis=0) if outside else np.zeros(1)
        for member in members:
            is_refitted = bool(np.any((np.abs(member.slopes) > 0) & (shared > 0)))
            judged.append((member, member.residual + float(np.dot(member.slopes, change)), is_refitted))
    return judged


def hold_out_at_random(
    rows: Sequence[Sensitivity],
    group_of: Callable[[Row], object],
    reasons_of: Callable[[Row], list[Widening]],
    widening_of: Mapping[str, Widening],
    share: float = 0.3,
    times: int = 40,
) -> dict[str, Any]:
    """Errors of a share of the groups under factors fitted to the others, drawn again and again.

    widening_of: by key of a row's group, what widens its interval where no row outside shares its value.
    worst_draw: median and 90 % quantile of the draw in ten that does worst by its 90 % quantile.
    """
    names = sorted({str(group_of(member.row)) for member in rows})
    generator = np.random.default_rng(0)
    residuals: list[float] = []
    inside: list[bool] = []
    draws: list[dict[str, Any]] = []
    for _ in range(times):
        held_out = set(generator.choice(names, max(1, round(share * len(names))), replace=False))
        members = [member for member in rows if str(group_of(member.row)) in held_out]
        outside = [member for member in rows if str(group_of(member.row)) not in held_out]
        change = fit(outside, members)
        measured = {key: {member.row.group.get(key) for member in outside} for key in widening_of}
        errors = [member.residual + float(np.dot(member.slopes, change)) for member in members]
        residuals += errors
        for member, error in zip(members, errors, strict=True):
            group = member.row.group
            unmeasured = [widening_of[key] for key in widening_of if group.get(key) not in measured[key]]
            inside.append(covers([*reasons_of(member.row), *unmeasured], error))
        draws.append(_errors(errors))
    draws.sort(key=lambda draw: float(draw["p90_abs_error_pct"]))
    return {
        **_errors(residuals),
        "within_interval": sum(inside) / len(inside),
        "num_groups": len(names),
        "num_draws": times,
        "worst_draw": draws[int(0.9 * times)],
    }


def leave_groups_out(
    rows: Sequence[Sensitivity],
    group_of: Callable[[Row], object],
    reasons_of: Callable[[Row], list[Widening]] | None = None,
) -> dict[str, Any]:
    """Errors of each group under factors fitted to the rows outside of it.

    A group whose factors no other row shares is predicted by their priors, and says so. reasons_of: why the
    interval of a row is as wide as it is, were its group never measured; adds the share inside.
    """
    judged = left_out_residuals(rows, group_of)
    groups: dict[str, list[tuple[Row, float, bool]]] = {}
    for sensitivity, residual, is_refitted in judged:
        groups.setdefault(str(group_of(sensitivity.row)), []).append((sensitivity.row, residual, is_refitted))

    def summary(members: Sequence[tuple[Row, float, bool]]) -> dict[str, Any]:
        errors = _errors([residual for _, residual, _ in members])
        if reasons_of is not None and members:
            inside = [covers(reasons_of(row), residual) for row, residual, _ in members]
            errors["within_interval"] = sum(inside) / len(inside)
        return errors

    all_members = [member for members in groups.values() for member in members]
    return {
        "groups": {
            name: summary(members) | {"refitted": any(is_refitted for _, _, is_refitted in members)}
            for name, members in groups.items()
        },
        **summary(all_members),
    }


def fit(rows: Sequence[Sensitivity], predicted_rows: Sequence[Sensitivity] = ()) -> NDArray[np.float64]:
    """Changes of the log factors with the least sum of |log error|, by reweighted least squares.

    others: rows that are predicted; their factors' priors hold where `rows` do not tell them.
    """
    all_rows = [*rows, *predicted_rows]
    priors = np.zeros(len(all_rows[0].slopes))
    for row in all_rows:
        priors = np.where(np.array(row.slopes) != 0, row.priors, priors)
    if not rows:
        return np.asarray(priors, dtype=np.float64)
    slopes = np.array([row.slopes for row in rows], dtype=np.float64)
    residuals = np.array([row.residual for row in rows], dtype=np.float64)
    ridge = PRIOR_WEIGHT * np.eye(slopes.shape[1])
    change: NDArray[np.float64] = np.zeros(slopes.shape[1])
    for _ in range(ITERATIONS):
        weights = 1.0 / np.maximum(0.02, np.abs(residuals + slopes @ change))
        weights /= 50.0
        normal = slopes.T @ (slopes * weights[:, None]) + ridge
        solved = np.linalg.solve(normal, ridge @ priors - slopes.T @ (weights * residuals))
        change = np.asarray(np.clip(solved, -MOST_CHANGE, MOST_CHANGE), dtype=np.float64)
    return change


def residual_interval(rows: Sequence[Sensitivity]) -> RatioInterval | None:
    """10 % and 90 % quantiles of measured / projected, each row left out of the fit that predicts it."""
    if len(rows) < 3:
        return None
    left_out = []
    for number, row in enumerate(rows):
        change = fit([*rows[:number], *rows[number + 1 :]], [row])
        left_out.append(-(row.residual + float(np.dot(row.slopes, change))))
    low, high = np.exp(np.quantile(left_out, (0.1, 0.9)))
    return RatioInterval(low=float(low), high=float(high))


def _errors(log_residuals: Sequence[float]) -> dict[str, Any]:
    """Errors of throughput: too fast is positive."""
    return error_summary([float(error) for error in np.expm1(-np.array(log_residuals)) * 100])


def error_summary(errors_pct: Sequence[float]) -> dict[str, Any]:
    """Number, median and 90 % quantile of the errors' sizes, and the median error with its sign.

    Without errors the sizes are None.
    """
    if not len(errors_pct):
        return {"num_rows": 0, "median_abs_error_pct": None, "p90_abs_error_pct": None}
    sizes = [abs(error) for error in errors_pct]
    return {
        "num_rows": len(errors_pct),
        "median_abs_error_pct": float(np.quantile(sizes, 0.5)),
        "p90_abs_error_pct": float(np.quantile(sizes, 0.9)),
        "median_error_pct": float(np.quantile(errors_pct, 0.5)),
    }


def covers(reasons: list[Widening], log_error: float) -> bool:
    """True if an interval holds the measurement; log_error is of projected over measured step time."""
    width = width_of(reasons)
    return -WIDTHS.skew_low * width <= -log_error <= WIDTHS.skew_high * width
