"""The report of `validate` as text."""

from fnmatch import fnmatch
from typing import Any

from projection.measured_steps import STEPS
from projection.published import PUBLISHED


def text(result: dict[str, Any]) -> str:
    """One block per file: its errors, then its rows, misses and what was not judged among them."""
    lines: list[str] = []
    for name, report in result["files"].items():
        lines += [name, f"  {_summary(report)}"]
        for part in ("held_out", "dense", "moe", "host_bound", "naive_mfu"):
            if (report.get(part) or {}).get("num_rows"):
                lines.append(f"  {part.replace('_', ' '):12s} {_summary(report[part])}")
        lines += _memory_text(report.get("peak_memory") or {})
        lines += _left_out_text(report.get("leave_one_group_out") or {})
        lines.append("")
        if name == STEPS or fnmatch(name, PUBLISHED):
            lines += [_row_text(row) for row in report["rows"]]
            lines += [_range_text(row) for row in report.get("incomplete_rows", ())]
        lines += [f"  {row['name']:34s} not judged: {row['reason']}" for row in report.get("left_out", ())]
        if report.get("unverified_models"):
            lines.append(f"  no row of {len(report['unverified_models'])} of the packaged models")
        lines.append("")
    if result.get("published"):
        lines += [*_record_text(result["published"]), ""]
    fitted = result["calibration"]["fitted_on"]
    fitted_texts = {
        name: " ".join(value) if isinstance(value, tuple | list) else value for name, value in fitted.items()
    }
    lines.append("fitted on: " + "; ".join(f"{name}: {value}" for name, value in fitted_texts.items()))
    return "\n".join(lines)


def _record_text(published: dict[str, Any]) -> list[str]:
    """The page of record: all published rows by family, beside plain utilisation."""
    lines = ["page of record: published rows of all tables", "", f"  {_RECORD_HEAD}"]
    lines.append(_record_row("all", published))
    for grouping, families in published["by"].items():
        lines += [_record_row(f"{grouping} {name}", family) for name, family in families.items()]
    lines += ["", "  leaving groups out"]
    lines += [
        _record_row(f"each {grouping}", pooled)
        for grouping, pooled in published["leave_one_group_out"].items()
    ]
    held_out = published.get("sources_held_out")
    if held_out:
        lines.append(_record_row("three in ten sources, 40 draws", held_out))
    return lines


_RECORD_HEAD = f"{'':34s}{'rows':>6s}{'median':>9s}{'p90':>9s}{'bias':>9s}{'inside':>9s}{'plain MFU':>12s}"


def _record_row(name: str, errors: dict[str, Any]) -> str:
    inside = errors.get("within_interval")
    naive = (errors.get("naive_mfu") or {}).get("median_abs_error_pct")
    return (
        f"  {name:34s}{errors['num_rows']:6d}"
        f"{errors['median_abs_error_pct']:8.1f}%{errors['p90_abs_error_pct']:8.1f}%"
        f"{errors['median_error_pct']:+8.1f}%{'' if inside is None else f'{inside:9.0%}'}"
        f"{'' if naive is None else f'{naive:11.1f}%'}"
    )


def _memory_text(errors: dict[str, Any]) -> list[str]:
    if not errors.get("num_rows"):
        return []
    parts = [("all", errors), ("one GPU", errors["one_gpu"]), ("several", errors["several_gpus"])]
    texts = [
        f"{name} {part['median_abs_error_pct']:.1f} / {part['p90_abs_error_pct']:.1f} %"
        for name, part in parts
        if part.get("num_rows")
    ]
    return [f"  peak memory, median / p90 |error|: {', '.join(texts)}"]


def _left_out_text(groupings: dict[str, Any]) -> list[str]:
    """Groups predicted by factors that were fitted without them."""
    lines = []
    for grouping, pooled in groupings.items():
        lines.append(f"  leaving out one {grouping} each: {_summary(pooled)}")
        for name, group in pooled["groups"].items():
            alone = "" if group["refitted"] else "   (no other row shares its factors: as they stand)"
            lines.append(
                f"    {name:30s}{group['median_abs_error_pct']:6.1f} % / {group['p90_abs_error_pct']:.1f} %"
                f"   bias {group['median_error_pct']:+.1f} %   {group['num_rows']} rows{alone}"
            )
    return lines


def _summary(errors: dict[str, Any]) -> str:
    if errors.get("median_abs_error_pct") is None:
        return "no rows"
    rows = errors.get("num_rows", len(errors.get("rows", ())))
    return (
        f"median |error| {errors['median_abs_error_pct']:.1f} %   p90 {errors['p90_abs_error_pct']:.1f} %   "
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
    verdict = "inside" if row["inside"] else "OUTSIDE"
    return (
        f"  {label:44s}{row['measured_tokens_per_s_per_gpu']:9.1f} in {low:.0f}..{high:.0f}: {verdict} "
        f"({row['error_range_pct'][0]:+.0f}..{row['error_range_pct'][1]:+.0f} %)"
    )
