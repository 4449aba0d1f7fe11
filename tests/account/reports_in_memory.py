"""Makes Reports in memory from step records, without the loader; the statistics are plain medians."""

from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np

from aorta.account.model import (
    CollectiveRow,
    Comparison,
    ConfidenceInterval,
    Dataset,
    Decomposition,
    MetricComparison,
    Part,
    Report,
    Run,
    SettingDifference,
    Statistic,
)
from aorta.records.schema import CollectiveRecord
from tests.records.run_folders import run_record, step_record, step_timeline

METRICS = ("comm_ms", "compute_ms", "hidden_ms", "exposed_ms", "idle_ms", "exposed_copy_ms", "overlap_ratio")


def records_of(
    num_steps=12, num_ranks=2, slowdown=1.0, seed=0, num_collectives=2, source="events", **changes
):
    """By rank, the steps of an invented run: noise, a slow first step, rank 1 a little late."""
    rng = np.random.default_rng(seed)
    by_rank = defaultdict(list)
    for step in range(num_steps):
        compute = 34 * slowdown * rng.normal(1, 0.01) + (40 if step == 0 else 0)
        for rank in range(num_ranks):
            line = step_timeline(
                compute=compute, gather=12.0, exposed=max(0.5, rng.normal(4 + 0.3 * rank, 0.4)),
                idle=max(0.2, rng.normal(2, 0.2)), rank=rank, step=step, source=source,
            )  # fmt: skip
            by_rank[rank].append(
                step_record(
                    line, num_ranks, collectives=_collectives(line, num_ranks, num_collectives), **changes
                )
            )
    return dict(by_rank)


def _collectives(line, num_ranks, num_collectives):
    """The step's two collectives, each cut into equal pieces one after the other."""
    each = max(1, num_collectives // 2)
    rows = []
    for op, lo, hi, size in (
        ("reduce_scatter", 1.0, 2.5, 1 << 24),
        ("all_gather", line.end_ms[2] - 12.0, line.end_ms[2], 1 << 26),
    ):
        edges = np.linspace(lo, hi, each + 1).tolist()
        for seq, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
            rows.append(
                CollectiveRecord(
                    op=op,
                    stream={"all_gather": "allgather"}.get(op, "reducescatter"),
                    group="dp",
                    ranks=list(range(num_ranks)),
                    bytes=size,
                    dtype="bfloat16",
                    seq=seq,
                    start_ms=start,
                    end_ms=end,
                    algbw_gb_s=size / (end - start) / 1e6,
                    busbw_gb_s=size / (end - start) / 1e6 / 2,
                )  # fmt: skip
            )
    return rows


def statistic(values):
    if np.isnan(values).all():
        return Statistic(None, None, None, None)
    medians = np.nanmedian(values, axis=1)
    p95 = float(np.median(np.nanpercentile(values, 95, axis=1)))
    return Statistic(float(np.median(medians)), p95, float(medians.min()), float(medians.max()))


def dataset_of(label, by_rank, num_warmup=1, run=None, path=None, notes=(), not_measured=None):
    ranks = sorted(by_rank)
    steps = [record.global_step for record in by_rank[ranks[0]]]

    def table(value):
        rows = [[value(record) for record in by_rank[rank]] for rank in ranks]
        return np.array(rows, dtype=np.float64)

    metrics = {name: table(lambda r, name=name: getattr(r.overlap, name)) for name in METRICS}
    metrics |= {name: table(lambda r, name=name: getattr(r, name)) for name in ("step_ms", "host_ms")}
    ops = sorted({op for rows in by_rank.values() for record in rows for op in record.overlap.hidden_by_op})
    for op in ops:
        metrics[f"exposed_ms.{op}"] = table(lambda r, op=op: r.overlap.exposed_by_op.get(op, 0.0))
        metrics[f"comm_ms.{op}"] = metrics[f"exposed_ms.{op}"] + table(
            lambda r, op=op: r.overlap.hidden_by_op.get(op, 0.0)
        )
        metrics[f"wait_ms.{op}"] = metrics[f"exposed_ms.{op}"] / 4
        metrics[f"busbw_gb_s.{op}"] = 300 - metrics[f"comm_ms.{op}"]
    sums = {name: values.sum(axis=1) for name, values in metrics.items()}
    run = Run(
        label=label,
        path=Path(path or f"runs/{label}"),
        source=by_rank[ranks[0]][0].source,
        ranks=ranks,
        global_step=np.array(steps),
        start_unix_ns=np.array([[r.start_unix_ns for r in by_rank[rank]] for rank in ranks]),
        metrics=metrics,
        num_collectives=np.full((len(ranks), len(steps)), 2),
        host_bound=np.full((len(ranks), len(steps)), np.nan),
        has_details=np.array(
            [all(by_rank[rank][i].active_segments is not None for rank in ranks) for i in range(len(steps))]
        ),
        left_out=np.zeros(len(steps), dtype=bool),
        has_collectives=np.array(
            [all(by_rank[rank][i].active_segments is not None for rank in ranks) for i in range(len(steps))]
        ),
        totals={
            rank: {
                "span_ms": sums["step_ms"][i], "comm_ms": sums["comm_ms"][i],
                "compute_ms": sums["compute_ms"][i], "hidden_ms": sums["hidden_ms"][i],
                "exposed_ms": sums["exposed_ms"][i], "idle_ms": sums["idle_ms"][i], "num_kernels": None,
                "num_collectives": 2 * len(steps),
            }
            for i, rank in enumerate(ranks)
        },
        collectives=[],
        records=lambda rank: iter(by_rank[rank]),
        record=run_record(len(ranks)) if run is None else run,
        not_measured=not_measured or {"exposed_copy_ms": "events do not see copies"},
        notes=list(notes),
    )  # fmt: skip
    statistics = {name: statistic(values[:, num_warmup:]) for name, values in metrics.items()}
    collectives = [
        CollectiveRow("all_gather", 1 << 26, "bfloat16", len(ranks), "allgather", 1.0,
                      12.0, 11.5, 12.5, 1.5, 10.5, 160.1),
        CollectiveRow("reduce_scatter", 1 << 24, "bfloat16", len(ranks), "reducescatter", 1.0,
                      1.5, 1.5, 1.5, None, None, None),
    ]  # fmt: skip
    judged = msgspec.structs.replace(
        run,
        num_warmup=num_warmup,
        warmup_rule="the first step, as this test has it",
        statistics=statistics,
        collective_rows=collectives,
    )
    return Dataset(label, [judged], statistics)


def report_of(*datasets, comparison=False):
    by_label = {dataset.label: dataset for dataset in datasets}
    return Report(by_label, comparison_of(*datasets) if comparison else None, {})


def comparison_of(reference, candidate, differences=()):
    metrics = {}
    for name, higher in (
        ("step_ms", False),
        ("comm_ms", False),
        ("exposed_ms", False),
        ("overlap_ratio", True),
    ):
        a, b = reference.statistics[name].median, candidate.statistics[name].median
        worse = b < a if higher else b > a
        metrics[name] = MetricComparison(
            name=name, unit="ms" if name.endswith("_ms") else "", direction="higher" if higher else "lower",
            reference=a, candidate=b, ratio=b / a,
            interval=ConfidenceInterval(b / a * 0.98, b / a * 1.02), difference=b - a,
            difference_interval=ConfidenceInterval(b - a - 0.2, b - a + 0.2), p_value=0.001,
            p_adjusted=0.004, verdict="worse" if worse else "better", reason="",
        )  # fmt: skip
    a, b = (
        {
            name: float(d.first.values(name).mean())
            for name in ("step_ms", "compute_ms", "exposed_ms", "idle_ms")
        }
        for d in (reference, candidate)
    )
    cells = {"exposed_ms": "communication"}
    parts = [
        Part(cells.get(name, name.removesuffix("_ms")), a[name], b[name], b[name] - a[name],
             ConfidenceInterval(b[name] - a[name] - 0.2, b[name] - a[name] + 0.2))
        for name in a
    ]  # fmt: skip
    return Comparison(
        reference=reference.label,
        candidate=candidate.label,
        headline=f"{candidate.label} takes longer than {reference.label}: as invented by a test",
        scope="about these two runs only",
        differences=list(differences) or [SettingDifference("environment", "NCCL_ALGO", "Ring", None)],
        metrics=metrics,
        num_judged=len(metrics),
        decomposition=Decomposition(parts[0], parts[1:], "means over steps, then over ranks", []),
        notes=["one run per side"],
    )
