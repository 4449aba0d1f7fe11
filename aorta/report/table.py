"""The terminal table: the answer first, aligned, a unit beside each number, the spread beside the middle."""

from collections.abc import Iterable, Sequence
from typing import Any

from aorta.report.load import Dataset
from aorta.report.summary import WARMUP_RULE, WARMUP_SHORT, Judged, Statistic, host_bound_steps, missing

ROWS = (
    ("step", "step_ms"),
    ("compute", "compute_ms"),
    ("comm", "comm_ms"),
    ("hidden", "hidden_ms"),
    ("exposed", "exposed_ms"),
    ("idle", "idle_ms"),
)
ALWAYS_EXPECTED = {metric for _, metric in ROWS}
WIDE_SPREAD = 1.2
"""p95 / median above which the table warns that the middle says little."""
DEFINITIONS = (
    "hidden: comm under compute; exposed: the rest of comm; idle: neither comm nor compute;"
    " medians over steps, then over ranks"
)
COMPUTE_OF_SOURCE = {
    "events": "compute: compute stream not stalled and in no collective; gaps with nothing queued count",
    "host": "compute: host time outside collectives",
}
"""What compute means; for kernel sources the union of all kernels that are not communication."""
ALL_KERNELS = "compute: union of all kernels that are not communication"


def dataset_table(judged: Judged) -> str:
    lines = [_title(judged), ""]
    lines += _aligned(
        [("", "median", "p95", "of step", "")]
        + [_row(judged, name, metric) for name, metric in ROWS]
        + [
            _row(judged, f"{name}, calibrated", f"calibrated.{metric}")
            for name, metric in ROWS
            if f"calibrated.{metric}" in judged.statistics
        ]
    )
    lines += ["", *_remarks(judged)]
    return "\n".join(lines)


def comparison_table(rows: dict[str, dict[str, Any]], reference: str, candidate: str) -> str:
    """Medians and their ratio; rows as summary.comparison gives them."""
    body = [("", reference, candidate, "ratio", "")]
    for name, metric in (*ROWS, ("overlap_ratio", "overlap_ratio")):
        row = rows.get(metric)
        if row is None:
            continue
        text = _ratio_text if metric == "overlap_ratio" else _ms
        ratio = "n/a" if row["ratio"] is None else f"{row['ratio']:.3f}"
        body.append((name, text(row["reference"]), text(row["candidate"]), ratio, ""))
    reason = next(iter(rows.values()))["reason"]
    return "\n".join([f"{candidate} against {reference}", "", *_aligned(body), "", f"not judged: {reason}"])


def device_text(dataset: Dataset) -> str:
    """'2 x NVIDIA H200', or the number of ranks alone where the device is not known."""
    names = dict.fromkeys(
        str(row["name"]) for row in (dataset.run.devices if dataset.run else ()) if row.get("name")
    )
    num = len(dataset.ranks)
    return f"{num} x {' / '.join(names)}" if names else f"{num} rank{'s' if num != 1 else ''}"


def _title(judged: Judged) -> str:
    dataset = judged.dataset
    steps = f"{judged.num_steps} step{'s' if judged.num_steps != 1 else ''}"
    parts = [dataset.label, device_text(dataset), _precision(dataset), steps, f"source: {dataset.source}"]
    return "   ".join(part for part in parts if part)


def _precision(dataset: Dataset) -> str:
    config = (dataset.run.config if dataset.run else None) or {}
    training = config.get("training")
    value = training.get("precision") if isinstance(training, dict) else None
    return value if isinstance(value, str) else ""


def _row(judged: Judged, name: str, metric: str) -> tuple[str, ...]:
    found = judged.statistics.get(metric)
    step = judged.statistics["step_ms"].median
    if found is None or found.median is None:
        return (name, "n/a", "", "", "")
    share = f"{100 * found.median / step:.0f} %" if step and metric != "step_ms" else ""
    return (name, _ms(found.median), _ms(found.p95), share, _beside(judged, metric, found))


def _beside(judged: Judged, metric: str, found: Statistic) -> str:
    if metric == "comm_ms":
        return _by_op(judged, "comm_ms.")
    if metric == "exposed_ms":
        comm = judged.statistics["comm_ms"].median
        if not comm or found.median is None:
            return "no communication" if comm == 0 else ""
        share = f"{100 * found.median / comm:.0f} % of comm is not hidden"
        ops = _by_op(judged, "exposed_ms.")
        return share if ops == _by_op(judged, "comm_ms.") else f"{share}   {ops}".rstrip()
    if metric == "idle_ms":
        copies = judged.statistics["exposed_copy_ms"].median
        return f"of it copies alone {_number(copies)}" if copies else ""
    return ""


def _by_op(judged: Judged, prefix: str) -> str:
    ops = [
        (values.median, name.removeprefix(prefix))
        for name, values in judged.statistics.items()
        if name.startswith(prefix) and values.median
    ]
    return "   ".join(f"{op} {_number(median)}" for median, op in sorted(ops, reverse=True))


def _remarks(judged: Judged) -> Iterable[str]:
    dataset = judged.dataset
    step = judged.statistics["step_ms"]
    if step.median and step.p95 and step.p95 > WIDE_SPREAD * step.median:
        yield (
            f"warning: the spread is wide, p95 of step is {step.p95 / step.median:.2f} x the median:"
            " differences of this size are noise"
        )
    if judged.num_steps < 10:
        yield f"warning: {judged.num_steps} steps are few; p95 is close to their largest"
    exposed = judged.statistics["exposed_ms"]
    if len(dataset.ranks) > 1 and step.min and step.max:
        text = f"ranks: step {_number(step.min)} to {_ms(step.max)}"
        if exposed.min is not None and exposed.max is not None:
            text += f", exposed {_number(exposed.min)} to {_ms(exposed.max)}"
        yield text
    host_bound = host_bound_steps(judged)
    if host_bound:
        yield (
            f"host-bound: {host_bound} of {judged.num_steps} steps; there compute, and with it hidden,"
            " is an upper bound"
        )
    if judged.num_warmup:
        rule = WARMUP_SHORT if judged.warmup_rule == WARMUP_RULE else judged.warmup_rule
        yield f"warm-up: first {judged.num_warmup} of {dataset.num_steps} steps left out ({rule})"
    reasons: dict[str, list[str]] = {}
    for name, reason in missing(judged).items():
        if name in ALWAYS_EXPECTED or name in dataset.not_measured:
            reasons.setdefault(reason, []).append(name.removesuffix("_ms"))
    for reason, names in reasons.items():
        yield f"not measured: {', '.join(names)} ({reason})"
    for source, other in dataset.other_sources.items():
        yield f"{source}: {other.num_steps} steps kept apart, see other_sources in summary.json"
    for note in dataset.notes:
        yield f"note: {note}"
    yield COMPUTE_OF_SOURCE.get(dataset.source, ALL_KERNELS)
    yield DEFINITIONS


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Names to the left, numbers to the right, remarks last and free."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)]
        lines.append("   ".join([*cells, row[-1]]).rstrip())
    return lines


def _ms(value: float | None) -> str:
    return "n/a" if value is None else f"{_number(value)} ms"


def _number(value: float) -> str:
    """Three digits and more where they mean something: 41.2, 4.31, 0.052."""
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 or value == 0 else f"{value:.3f}"


def _ratio_text(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
