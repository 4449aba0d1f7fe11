"""Projected beside measured, row by row: errors, what was used for calibration, and plain baselines."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aorta.errors import ConfigError
from aorta.projection import show
from aorta.projection.hardware import hardware_names
from aorta.projection.model import models
from aorta.projection.pricing import FACTORS, FITTED_ON, FP8_BY_PART, Pricer
from aorta.projection.rows import PUBLISHED, STEPS, Row, read_published, read_steps
from aorta.projection.step import Projection, project

PRIMUS = {
    # Projected tokens/s/GPU that Primus printed for rows of this table, measured on one node and rescaled.
    "source": "Primus docs_deprecated/tech_blogs/projection/projection.md:448-462",
    "p2": 17351.0,
    "p4": 1066.0,
    "p5": 1818.0,
    "p6": 3260.0,
}


def validate(folder: Path) -> dict[str, Any]:
    """Accuracy on every known file below a folder: files.<name> with errors and rows."""
    files: dict[str, Any] = {}
    steps = find(folder, STEPS)
    if steps is not None:
        files[STEPS] = steps_report(list(read_steps(steps)))
    published = find(folder, PUBLISHED)
    if published is not None:
        files[PUBLISHED] = published_report(*read_published(published))
    files |= _kernels(folder)
    if not files:
        raise ConfigError(f"{folder}: has none of the files that are read, such as {STEPS} or {PUBLISHED}")
    return {
        "files": files,
        "calibration": {
            "fitted_on": FITTED_ON,
            "fp8_by_part": FP8_BY_PART,
            "factors": {
                vendor: {name: getattr(factors, name) for name in factors.__struct_fields__}
                for vendor, factors in FACTORS.items()
            },
        },
    }


def steps_report(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors of step time. Host-bound rows are flagged and summed up apart."""
    found = []
    for row in rows:
        projection = _project(row)
        assert row.step_ms is not None
        found.append(
            {
                "name": row.name,
                **row.group,
                "measured_step_ms": row.step_ms,
                "projected_step_ms": projection.step_s * 1e3,
                "interval_ms": [projection.low_s * 1e3, projection.high_s * 1e3],
                "error_pct": (projection.step_s * 1e3 / row.step_ms - 1) * 100,
                "host_bound": projection.host_bound,
                "calibration": is_calibration(row),
            }
        )
    device = [row for row in found if not row["host_bound"]]
    return {
        **_errors(device),
        "within_interval": _share_inside(device),
        "held_out": _errors([row for row in device if not row["calibration"]]),
        "host_bound": _errors([row for row in found if row["host_bound"]]),
        "rows": found,
    }


def is_calibration(row: Row) -> bool:
    """Fit small, test large: runs of one and two GPUs fit, those of more are held out."""
    return int(row.group["world"]) <= 2


def published_report(rows: Sequence[Row], left_out: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of throughput over complete rows; the others as a range over what their source leaves open."""
    complete, ranges = [], []
    for row in rows:
        measured = row.tokens_per_s_per_gpu
        shown: dict[str, Any] = {"name": row.name, **row.group, "measured_tokens_per_s_per_gpu": measured}
        if row.name in PRIMUS:
            shown["primus_tokens_per_s_per_gpu"] = PRIMUS[row.name]
        if row.complete:
            projection = _project(row)
            tokens = projection.tokens_per_s_per_gpu
            shown |= {
                "projected_tokens_per_s_per_gpu": tokens,
                "interval": show.performance(projection)["interval"]["tokens_per_s_per_gpu"],
                "error_pct": (tokens / row.tokens_per_s_per_gpu - 1) * 100,
                "naive_mfu_error_pct": _naive_error(row, rows),
                "host_bound": projection.host_bound,
                "calibration": row.name in FITTED_ON["published"],
                "layout": show.layout(row.plans[0][1]),
            }
            complete.append(shown)
        else:
            shown |= _alternatives(row)
            ranges.append(shown)
    projected = {str(row["model"]) for row in complete + ranges}
    naive = [row["naive_mfu_error_pct"] for row in complete]
    return {
        **_errors(complete),
        "within_interval": _share_inside(complete),
        "held_out": _errors([row for row in complete if not row["calibration"]]),
        "dense": _errors([row for row in complete if row["family"] == "dense"]),
        "moe": _errors([row for row in complete if row["family"] == "moe"]),
        "naive_mfu": _errors([{"error_pct": error} for error in naive if error is not None]),
        "rows": complete,
        "incomplete_rows": ranges,
        "left_out": left_out,
        "unverified_models": [name for name in models() if name not in projected],
        "primus_source": PRIMUS["source"],
    }


def _alternatives(row: Row) -> dict[str, Any]:
    """The range over alternatives, and whether what was measured lies in it."""
    tokens = []
    pricers = None
    for label, plan in row.plans:
        pricers = pricers or Pricer(row.hardware, plan)
        tokens.append((project(row.model, plan, pricers).tokens_per_s_per_gpu, label))
    low, high = min(tokens), max(tokens)
    measured = row.tokens_per_s_per_gpu
    return {
        "projected_range": [low[0], high[0]],
        "assumes": [low[1], high[1]],
        "inside": low[0] <= measured <= high[0],
        "error_range_pct": [(low[0] / measured - 1) * 100, (high[0] / measured - 1) * 100],
    }


def _naive_error(row: Row, rows: Sequence[Row]) -> float | None:
    """Error of 6 ND and attention at the median utilisation of the vendor's other rows of that precision."""

    def precision(other: Row) -> str:
        return str(other.group["precision"])[:3]

    def peak(other: Row) -> float:
        return other.hardware.compute.peak_flops[other.plans[0][1].dtype]

    def flops(other: Row) -> float:
        return other.model.train_flops_per_token(other.plans[0][1].seq_len)

    others = [
        other.tokens_per_s_per_gpu * flops(other) / peak(other)
        for other in rows
        if other is not row
        and other.complete
        and other.hardware.vendor == row.hardware.vendor
        and precision(other) == precision(row)
    ]
    if not others:
        return None
    return (quantile(others, 0.5) * peak(row) / flops(row) / row.tokens_per_s_per_gpu - 1) * 100


def quantile(values: Iterable[float], share: float) -> float:
    """Linear between the order statistics."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _project(row: Row) -> Projection:
    plan = row.plans[0][1]
    return project(row.model, plan, Pricer(row.hardware, plan))


def _errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not rows:
        return {"num_rows": 0, "median_abs_error_pct": None, "p90_abs_error_pct": None}
    errors = [row["error_pct"] for row in rows]
    return {
        "num_rows": len(rows),
        "median_abs_error_pct": quantile(map(abs, errors), 0.5),
        "p90_abs_error_pct": quantile(map(abs, errors), 0.9),
        "median_error_pct": quantile(errors, 0.5),
    }


def _share_inside(rows: Sequence[dict[str, Any]]) -> float | None:
    """Share of rows whose measured value lies in the interval."""
    if not rows:
        return None
    inside = 0
    for row in rows:
        low, high = row.get("interval_ms") or row["interval"]
        measured = row.get("measured_step_ms") or row["measured_tokens_per_s_per_gpu"]
        inside += low <= measured <= high
    return inside / len(rows)


def find(folder: Path, name: str) -> Path | None:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder")
    if (folder / name).exists():
        return folder / name
    return next(iter(sorted(folder.rglob(name))), None)


def _kernels(folder: Path) -> dict[str, Any]:
    """Sheets of single kernels, by the module that knows them."""
    from aorta.projection.kernels_validate import READERS, validate_kernels

    sheet = next((path for name in READERS for path in [find(folder, name)] if path is not None), None)
    if sheet is None:
        return {}
    report = validate_kernels(sheet.parent, _hardware_of(sheet.parent))
    found: dict[str, Any] = msgspec.to_builtins(report.files)
    return found


def _hardware_of(folder: Path) -> str:
    """Sheets lie in a folder named after their GPU; elsewhere they are taken for H200's."""
    return folder.name if folder.name in hardware_names() else "h200"


def text(result: dict[str, Any]) -> str:
    lines: list[str] = []
    for name, found in result["files"].items():
        lines += [name, f"  {_summary(found)}"]
        for part in ("held_out", "dense", "moe", "host_bound", "naive_mfu"):
            if (found.get(part) or {}).get("num_rows"):
                lines.append(f"  {part.replace('_', ' '):12s} {_summary(found[part])}")
        lines.append("")
        if name in (STEPS, PUBLISHED):
            lines += [_row_text(row) for row in found["rows"]]
            lines += [_range_text(row) for row in found.get("incomplete_rows", ())]
            for row in found.get("left_out", ()):
                lines.append(f"  {row['name']:34s} left out: {row['reason']}")
            if found.get("unverified_models"):
                lines.append(f"  no published row: {', '.join(found['unverified_models'])}")
            lines.append("")
    fitted = result["calibration"]["fitted_on"]
    lines.append("fitted on: " + "; ".join(f"{name}: {value}" for name, value in fitted.items()))
    return "\n".join(lines)


def _summary(found: dict[str, Any]) -> str:
    if found.get("median_abs_error_pct") is None:
        return "no rows"
    rows = found.get("num_rows", len(found.get("rows", ())))
    return (
        f"median |error| {found['median_abs_error_pct']:.1f} %   p90 {found['p90_abs_error_pct']:.1f} %   "
        f"{rows} rows"
    )


def _row_text(row: dict[str, Any]) -> str:
    flags = [flag for flag in ("calibration", "host_bound") if row.get(flag)]
    if "measured_step_ms" in row:
        values = f"{row['measured_step_ms']:9.1f} ms {row['projected_step_ms']:9.1f} ms"
        label = row["name"]
    else:
        measured, projected = row["measured_tokens_per_s_per_gpu"], row["projected_tokens_per_s_per_gpu"]
        values = f"{measured:9.1f} {projected:9.1f} tok/s"
        label = f"{row['name']} {row['gpu']} x{row['gpus']} {row['model']} {row['precision']}"
        if row["naive_mfu_error_pct"] is not None:
            flags.append(f"naive MFU {row['naive_mfu_error_pct']:+.0f} %")
    return f"  {label:44s}{values} {row['error_pct']:+7.1f} %  {' '.join(flags)}"


def _range_text(row: dict[str, Any]) -> str:
    low, high = row["projected_range"]
    label = f"{row['name']} {row['gpu']} x{row['gpus']} {row['model']} {row['precision']}"
    where = "inside" if row["inside"] else "OUTSIDE"
    primus = row.get("primus_tokens_per_s_per_gpu")
    beside = f"  Primus {primus:.0f}" if primus else ""
    return (
        f"  {label:44s}{row['measured_tokens_per_s_per_gpu']:9.1f} in {low:.0f}..{high:.0f}: {where} "
        f"({row['error_range_pct'][0]:+.0f}..{row['error_range_pct'][1]:+.0f} %){beside}"
    )
