"""Projected beside measured, row by row: errors, what was used for calibration, and plain baselines.

    python benchmarks/projection/validate.py --data DIR [--json]

The folder may hold any of the known files, at any depth: steps.jsonl, measured_throughput*.csv, sheets of
kernels. A row that cannot be projected is listed with the reason. Where --data is not given,
the environment variable AORTA_DATA names the folder.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

sys.path.append(str(Path(__file__).resolve().parents[1]))

from projection import text as pages
from projection.fitted import FITTED_ON
from projection.kernel_sheets import file_report, sheet_names
from projection.leave_out import (
    Sensitivity,
    error_summary,
    hold_out_at_random,
    leave_groups_out,
    published_sensitivity,
    residual_interval,
    step_sensitivity,
)
from projection.measured_steps import (
    STEPS,
    LeftOut,
    Row,
    files_below,
    find,
    folders_below,
    hardware_of_folder,
    is_calibration,
    pricer_of,
    quantile,
    read_steps,
)
from projection.published import PUBLISHED, read_published

from aorta.errors import AortaError, ConfigError
from aorta.hardware.part import load_hardware, sustained_flops, vendor_step
from aorta.projection.interval import NOT_IN_VIEW, WIDTHS, Widening, bounds
from aorta.projection.memory import memory
from aorta.projection.model import models
from aorta.projection.plan import layout_text
from aorta.projection.prices import step_factors
from aorta.projection.step import Projection, project


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("AORTA_DATA") or None, help="Default: AORTA_DATA."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object with every row.")
    options = parser.parse_args()
    if options.data is None:
        print("error: name the folder of measurements by --data or AORTA_DATA", file=sys.stderr)
        return 2
    try:
        result = validate(Path(options.data))
    except AortaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(result).decode() if options.json else pages.text(result))
    return 0


def validate(folder: Path) -> dict[str, Any]:
    """Accuracy on every known file at or below a folder: files.<name> with errors and rows."""
    files: dict[str, Any] = {}
    steps = find(folder, STEPS)
    if steps is not None:
        files[STEPS] = steps_report(*read_steps(steps))
    tables = [read_published(path) for path in published_tables(folder)]
    judged_tables = [judge(*table) for table in tables]
    together = [row for judged in judged_tables for row in judged.rows]
    for path, judged in zip(published_tables(folder), judged_tables, strict=True):
        files[path.name] = published_report(judged, together)
    files |= _kernels(folder)
    if not files:
        raise ConfigError(f"{folder}: has none of the files that are read, such as {STEPS} or {PUBLISHED}")
    return {
        "files": files,
        "published": record(judged_tables, together) if any(row.complete for row in together) else None,
        "calibration": {
            "fitted_on": FITTED_ON,
            "factors": {
                vendor: msgspec.structs.asdict(step_factors(vendor, vendor_step(vendor)))
                for vendor in ("nvidia", "amd")
            },
        },
    }


Judged = list[tuple[Row, Projection]]


def with_projections(rows: Sequence[Row], left_out: Sequence[LeftOut]) -> tuple[Judged, list[LeftOut]]:
    """Rows with their (first) projection; those that have no price on their part join what is left out."""
    judged: Judged = []
    unjudged = list(left_out)
    for row in rows:
        try:
            for _, plan in row.plans:
                sustained_flops(row.hardware, plan.dtype)
            judged.append((row, _project(row)))
        except AortaError as error:
            unjudged.append(LeftOut(row.name, str(error)))
    return judged, unjudged


def steps_report(rows: Sequence[Row], left_out: Sequence[LeftOut] = ()) -> dict[str, Any]:
    """Errors of step time. Host-bound rows are flagged and summed up apart."""
    judged, left_out = with_projections(rows, left_out)
    step_rows, device_rows = [], []
    for row, projection in judged:
        step_rows.append(_step_row(row, projection))
        if not projection.host_bound:
            device_rows.append(step_sensitivity(row))
    device = [row for row in step_rows if not row["host_bound"]]
    interval = residual_interval(device_rows)
    return {
        **_errors(device),
        "within_interval": _share_inside(device),
        "held_out": _errors([row for row in device if not row["calibration"]]),
        "host_bound": _errors([row for row in step_rows if row["host_bound"]]),
        "leave_one_out_interval": None if interval is None else [interval.low, interval.high],
        "leave_one_group_out": _groups_left_out(device_rows, ("family", "form", "world", "stack")),
        "peak_memory": _memory_errors(step_rows),
        "rows": step_rows,
        "left_out": msgspec.to_builtins(left_out),
    }


def _step_row(row: Row, projection: Projection) -> dict[str, Any]:
    assert row.step_ms is not None
    result = {
        "name": row.name,
        **row.group,
        "measured_step_ms": row.step_ms,
        "projected_step_ms": projection.step_s * 1e3,
        "interval_ms": [projection.low_s * 1e3, projection.high_s * 1e3],
        "error_pct": (projection.step_s * 1e3 / row.step_ms - 1) * 100,
        "host_bound": projection.host_bound,
        "calibration": is_calibration(row),
    }
    if row.peak_gib:
        memory_estimate = memory(row.model, row.plans[0][1], row.hardware.memory.hbm_bytes)
        peak_gib = memory_estimate.allocated_bytes / 2**30
        result |= {
            "measured_peak_gib": row.peak_gib,
            "projected_peak_gib": peak_gib,
            "peak_error_pct": (peak_gib / row.peak_gib - 1) * 100,
        }
    return result


def _memory_errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of peak allocated memory; runs of one GPU apart, see README.md for the others."""

    def errors_of(chosen: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return _errors([{"error_pct": row["peak_error_pct"]} for row in chosen if "peak_error_pct" in row])

    return {
        **errors_of(rows),
        "one_gpu": errors_of(row for row in rows if row["world"] == 1),
        "several_gpus": errors_of(row for row in rows if row["world"] > 1),
    }


class Table(NamedTuple):
    """Judged rows of one table."""

    rows: list[Row]
    """All that can be projected."""
    projections: dict[int, Projection]
    """Projections by id() of the row: names need not be unique."""
    left_out: list[LeftOut]
    slopes: list[Sensitivity]
    """Sensitivities of the complete rows."""


def judge(rows: Sequence[Row], left_out: Sequence[LeftOut]) -> Table:
    """Projections of a table's rows, and how they depend on what was fitted."""
    judged, unjudged = with_projections(rows, left_out)
    slopes = [published_sensitivity(row, projection) for row, projection in judged if row.complete]
    return Table(
        [row for row, _ in judged], {id(row): projection for row, projection in judged}, unjudged, slopes
    )


def published_report(table: Table, together: Sequence[Row]) -> dict[str, Any]:
    """Errors of throughput over complete rows; the others as a range over what their source leaves open.

    together: rows of all tables, for the plain baseline.
    """
    rows = table.rows
    complete = [_complete_row(row, table.projections[id(row)], together) for row in rows if row.complete]
    ranges = [_measured_row(row) | _alternatives(row) for row in rows if not row.complete]
    projected = {str(row["model"]) for row in complete + ranges}
    return {
        **_errors(complete),
        "within_interval": _share_inside(complete),
        "held_out": _errors([row for row in complete if not row["calibration"]]),
        "dense": _errors([row for row in complete if row["family"] == "dense"]),
        "moe": _errors([row for row in complete if row["family"] == "moe"]),
        "leave_one_out_interval": _by_kind(table.slopes),
        "naive_mfu": _naive(complete),
        "leave_one_group_out": _published_groups(table.slopes, table.projections),
        "rows": complete,
        "incomplete_rows": ranges,
        "left_out": msgspec.to_builtins(table.left_out),
        "unverified_models": [name for name in models() if name not in projected],
    }


FAMILIES = ("gpu", "precision", "family", "framework", "scale")
"""Keys by which the page of record groups published rows."""


def record(tables: Sequence[Table], together: Sequence[Row]) -> dict[str, Any]:
    """All published rows by family, beside plain utilisation, and left out in groups."""
    complete = [
        _complete_row(row, table.projections[id(row)], together)
        for table in tables
        for row in table.rows
        if row.complete
    ]
    slopes = [sensitivity for table in tables for sensitivity in table.slopes]
    projections = {name: projection for table in tables for name, projection in table.projections.items()}
    return {
        **_judged(complete),
        "by": {
            name: {
                str(value): _judged([row for row in complete if row[name] == value])
                for value in sorted({row[name] for row in complete}, key=str)
            }
            for name in FAMILIES
        },
        "leave_one_group_out": _published_groups(slopes, projections),
        "sources_held_out": _at_random(slopes, projections),
    }


def _judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {**_errors(rows), "within_interval": _share_inside(rows), "naive_mfu": _naive(rows)}


def _naive(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    naive = [row["naive_mfu_error_pct"] for row in rows]
    return _errors([{"error_pct": error} for error in naive if error is not None])


UNMEASURED = {
    "gpu": Widening("part", WIDTHS.other_part, False),
    "framework": Widening("stack", WIDTHS.other_stack, False),
    "precision": Widening("data type", WIDTHS.other_dtype, False),
    "family": Widening("dense or mixture", WIDTHS.other_family, False),
}
"""Widening for a row whose group was never measured."""


def _published_groups(slopes: Sequence[Sensitivity], projections: Mapping[int, Projection]) -> dict[str, Any]:
    """Groups left out of the fit, with the intervals as if the group had never been measured."""

    def value(name: str) -> Callable[[Row], object]:
        return lambda row: row.group.get(name)

    def reasons(name: str) -> Callable[[Row], list[Widening]]:
        further = [UNMEASURED[name]] if name in UNMEASURED else []
        return lambda row: [*projections[id(row)].widenings, *further]

    if not slopes:
        return {}
    groupings = ("family", "gpu", "scale", "model", "framework", "precision", "source", "model and part")
    return {name: leave_groups_out(slopes, value(name), reasons(name)) for name in groupings}


def _at_random(slopes: Sequence[Sensitivity], projections: Mapping[int, Projection]) -> dict[str, Any] | None:
    """Sources held out at random, thirty in a hundred."""
    if not slopes:
        return None

    def reasons(row: Row) -> list[Widening]:
        return list(projections[id(row)].widenings)

    return hold_out_at_random(slopes, lambda row: row.group.get("source"), reasons, UNMEASURED)


def _by_kind(slopes: Sequence[Sensitivity]) -> dict[str, Any]:
    """Intervals of measured over projected step time, by vendor and family, each row left out of its fit."""
    kinds: dict[str, list[Sensitivity]] = {}
    for sensitivity in slopes:
        kinds.setdefault(f"{sensitivity.row.hardware.vendor} {sensitivity.row.group['family']}", []).append(
            sensitivity
        )
    intervals: dict[str, Any] = {}
    for kind, alike in kinds.items():
        interval = residual_interval(alike)
        intervals[kind] = None if interval is None else [interval.low, interval.high]
    return intervals


def _measured_row(row: Row) -> dict[str, Any]:
    return {"name": row.name, **row.group, "measured_tokens_per_s_per_gpu": row.tokens_per_s_per_gpu}


def of_rows_in_view(reasons: Iterable[Widening]) -> list[Widening]:
    """Reasons of a row that was in view when the model was made."""
    return [reason for reason in reasons if reason.reason != NOT_IN_VIEW]


def row_widenings(row: Row, projection: Projection) -> list[Widening]:
    """Reasons for the width of a row's interval."""
    in_view = row.name in FITTED_ON["published"]
    return of_rows_in_view(projection.widenings) if in_view else list(projection.widenings)


def _complete_row(row: Row, projection: Projection, rows: Sequence[Row]) -> dict[str, Any]:
    tokens = projection.tokens_per_s_per_gpu
    reasons = row_widenings(row, projection)
    fast_s, slow_s = bounds(projection.step_s, reasons)
    return _measured_row(row) | {
        "projected_tokens_per_s_per_gpu": tokens,
        "interval": [tokens * projection.step_s / slow_s, tokens * projection.step_s / fast_s],
        "error_pct": (tokens / row.tokens_per_s_per_gpu - 1) * 100,
        "naive_mfu_error_pct": _naive_error(row, rows),
        "host_bound": projection.host_bound,
        "calibration": row.name in FITTED_ON["published"],
        "widened_by": [reason.reason for reason in reasons[1:]],
        "layout": layout_text(row.plans[0][1]),
    }


def _groups_left_out(rows: Sequence[Sensitivity], groupings: Sequence[str]) -> dict[str, Any]:
    """The fitted factors without each group in turn, and how they do on it."""

    def value(name: str) -> Callable[[Row], object]:
        return lambda row: row.group.get(name)

    return {name: leave_groups_out(rows, value(name)) for name in groupings}


def _alternatives(row: Row) -> dict[str, Any]:
    """The range over alternatives, and whether what was measured lies in it."""
    tokens = []
    pricer = pricer_of(row)
    for label, plan in row.plans:
        tokens.append((project(row.model, plan, pricer).tokens_per_s_per_gpu, label))
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

    def precision(peer: Row) -> str:
        return str(peer.group["precision"])[:3]

    def peak(peer: Row) -> float:
        return peer.hardware.compute.peak_flops[peer.plans[0][1].dtype]

    def flops(peer: Row) -> float:
        return peer.model.train_flops_per_token(peer.plans[0][1].seq_len)

    utilisations = [
        peer.tokens_per_s_per_gpu * flops(peer) / peak(peer)
        for peer in rows
        if peer is not row
        and peer.complete
        and peer.hardware.vendor == row.hardware.vendor
        and precision(peer) == precision(row)
    ]
    if not utilisations:
        return None
    return (quantile(utilisations, 0.5) * peak(row) / flops(row) / row.tokens_per_s_per_gpu - 1) * 100


def _errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return error_summary([row["error_pct"] for row in rows])


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


def published_tables(folder: Path) -> list[Path]:
    """Tables of published throughput at or below a folder, each name once."""
    paths = files_below(folder, PUBLISHED)
    tables: dict[str, Path] = {}
    for path in sorted(paths, key=lambda path: path.parent != folder):  # those of the folder itself first
        tables.setdefault(path.name, path)
    return [tables[name] for name in sorted(tables)]


def _kernels(folder: Path) -> dict[str, Any]:
    """Sheets of single kernels, by the module that knows them; each from the first folder that has it."""
    reports: dict[str, Any] = {}
    for place in folders_below(folder):
        for name in sheet_names(place):
            if name not in reports:
                report = file_report(place / name, load_hardware(hardware_of_folder(place)))
                reports[name] = msgspec.to_builtins(report)
    return reports


def _project(row: Row) -> Projection:
    plan = row.plans[0][1]
    return project(row.model, plan, pricer_of(row))


if __name__ == "__main__":
    sys.exit(main())
