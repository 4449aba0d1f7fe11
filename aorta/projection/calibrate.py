"""Factors above the kernels, fitted to measured steps, and how well they do on steps not used."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aorta.config.yaml_files import near
from aorta.errors import NOT_JSON, ConfigError
from aorta.hardware import Hardware
from aorta.projection.measured_runs import STEPS, LeftOut, Row, find, read_runs, read_steps
from aorta.projection.prices import Factors, Pricer, factors_of
from aorta.projection.step import project

FITTED = {
    "gemm": (0.8, 1.2),
    "contention_compute": (1.0, 1.6),
    "dtensor_launch_s": (20e-6, 150e-6),
}
"""Factors that steps can tell, with their bounds."""
RULE = "runs of one and two GPUs calibrate, larger ones are held out"
_PRICERS: dict[int, Pricer] = {}
"""One pricer for each part, by the id of the hardware that it keeps alive: rows of one part share what its
kernels cost, which is most of a projection."""


def calibrate(folder: Path, all_rows: bool = False) -> dict[str, Any]:
    """Factors that bring the calibration rows closest, one after the other until none moves."""
    path, rows = _measured(folder)
    chosen = rows if all_rows else [row for row in rows if is_calibration(row)]
    held_out = [] if all_rows else [row for row in rows if not is_calibration(row)]
    if not chosen:
        raise ConfigError(f"{path}: has no runs of one or two GPUs; --all-rows fits on all")
    start = factors_of(rows[0].hardware)
    fitted = _descend(chosen, start)
    return {
        "file": str(path),
        "gpu": rows[0].hardware.name,
        "rule": "all rows" if all_rows else RULE,
        "before": {name: getattr(start, name) for name in FITTED},
        "after": {name: getattr(fitted, name) for name in FITTED},
        "calibration": _errors(chosen, fitted),
        "held_out": _errors(held_out, fitted) if held_out else None,
        "interval": interval(chosen, fitted),
    }


def _measured(folder: Path) -> tuple[Path, list[Row]]:
    """Measured rows of steps.jsonl, else of the run folders at or below the folder."""
    path = find(folder, STEPS)
    if path is not None:
        return path, read_steps(path)[0]
    rows, left_out = read_runs(folder)
    if not rows:
        raise ConfigError(f"{folder}: {_no_rows(left_out)}")
    parts = sorted({row.hardware.name for row in rows})
    if len(parts) > 1:
        raise ConfigError(f"{folder}: has runs on {' and '.join(parts)}; give a folder with runs on one GPU")
    return folder, rows


def _no_rows(left_out: list[LeftOut]) -> str:
    if not left_out:
        return f"has neither {STEPS} nor folders of runs to calibrate on"
    return f"no run can be projected; {left_out[0].name}: {left_out[0].reason}"


def is_calibration(row: Row) -> bool:
    """True for runs of one and two GPUs, which the fit uses; larger ones are held out."""
    return int(row.group["world"]) <= 2


def pricer_of(row: Row, factors: Factors | None = None) -> Pricer:
    """A pricer for the row's first plan; factors: those of the part where None."""
    hardware = row.hardware
    if id(hardware) not in _PRICERS:
        _PRICERS[id(hardware)] = Pricer(hardware, row.plans[0][1])
    return _PRICERS[id(hardware)].with_plan(row.plans[0][1]).with_factors(factors or factors_of(hardware))


def _descend(rows: list[Row], factors: Factors) -> Factors:
    """Coordinate descent with shrinking steps on the mean |log error|."""
    best = _loss(rows, factors)
    step = 0.08
    while step > 0.004:
        moved = False
        for name, (low, high) in FITTED.items():
            for direction in (1 + step, 1 - step):
                value = min(high, max(low, getattr(factors, name) * direction))
                candidate = msgspec.structs.replace(factors, **{name: value})
                loss = _loss(rows, candidate)
                if loss < best - 1e-6:
                    factors, best, moved = candidate, loss, True
        if not moved:
            step /= 2
    return factors


def interval(rows: list[Row], factors: Factors) -> list[float]:
    """10 % and 90 % quantiles of measured / projected."""
    ratios = [1 / (1 + error) for error in _signed(rows, factors)]
    return [quantile(ratios, 0.1), quantile(ratios, 0.9)]


def _loss(rows: list[Row], factors: Factors) -> float:
    return sum(abs(error) for error in _signed(rows, factors)) / len(rows)


def _signed(rows: list[Row], factors: Factors) -> list[float]:
    errors = []
    for row in rows:
        plan = row.plans[0][1]
        assert row.step_ms is not None
        step_s = project(row.model, plan, pricer_of(row, factors)).step_s
        errors.append(step_s * 1e3 / row.step_ms - 1)
    return errors


def _errors(rows: list[Row], factors: Factors) -> dict[str, Any]:
    errors = [abs(error) * 100 for error in _signed(rows, factors)]
    return {
        "num_rows": len(rows),
        "median_abs_error_pct": quantile(errors, 0.5),
        "p90_abs_error_pct": quantile(errors, 0.9),
    }


def quantile(values: list[float], share: float) -> float:
    """The quantile, linear between the order statistics."""
    return float(np.quantile(values, share))


def write(path: Path, calibration: dict[str, Any]) -> None:
    """The fitted factors as a file that --calibration reads."""
    document = {"schema": 1, "gpu": calibration["gpu"], "factors": calibration["after"]}
    document |= {
        "fitted_on": calibration["file"],
        "rule": calibration["rule"],
        "interval": calibration["interval"],
    }
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from None


def read_calibration(path: Path, hardware: Hardware) -> Factors:
    """Factors that `calibrate --output` wrote, over those of the part."""
    try:
        plain = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--calibration {path}: cannot be read: {error.strerror}") from None
    except NOT_JSON as error:
        raise ConfigError(f"--calibration {path}: not valid JSON: {error}") from None
    if not isinstance(plain, dict) or not isinstance(plain.get("factors"), dict) or plain.get("schema") != 1:
        raise ConfigError(f"--calibration {path}: is no file that `calibrate --output` writes")
    if plain.get("gpu") != hardware.name:
        raise ConfigError(f"--calibration {path}: was fitted on {plain.get('gpu')}, not on {hardware.name}")
    defaults = msgspec.to_builtins(factors_of(hardware))
    for name, value in plain["factors"].items():
        if name not in defaults:
            raise ConfigError(f"--calibration {path}: {name} is no factor{near(name, defaults)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e3:
            raise ConfigError(f"--calibration {path}: {name} must be a number above 0, got {value!r}")
    return msgspec.convert(defaults | plain["factors"], Factors)


def text(calibration: dict[str, Any]) -> str:
    lines = [f"{calibration['file']}: {calibration['rule']}", ""]
    for name, fitted in calibration["after"].items():
        lines.append(f"{name:24s}{calibration['before'][name]:12.4g} -> {fitted:.4g}")
    lines.append("")
    for part in ("calibration", "held_out"):
        if calibration[part]:
            errors = calibration[part]
            lines.append(
                f"{part.replace('_', ' '):24s}median |error| {errors['median_abs_error_pct']:.1f} %   "
                f"p90 {errors['p90_abs_error_pct']:.1f} %   {errors['num_rows']} rows"
            )
    low, high = calibration["interval"]
    lines.append(f"{'interval':24s}measured / projected {low:.3f} to {high:.3f} (10 % and 90 %)")
    return "\n".join(lines)
