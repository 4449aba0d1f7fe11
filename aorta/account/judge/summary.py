"""From the numbers of every step to summary.json: what was seen, over steps and over ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from aorta.account.judge.answer import dataset_answer, losses, statistics_beside_step
from aorta.account.judge.cells import account_of
from aorta.account.judge.judged import is_unlike, judge, missing, why_missing
from aorta.account.judge.phases import phases_of
from aorta.account.judge.profiles import told_differences
from aorta.account.judge.ranks import judged_ranks
from aorta.account.judge.sites import sites_of
from aorta.account.judge.timed_steps import host_bound_steps
from aorta.account.model import (
    Causes,
    Comparison,
    Dataset,
    Run,
)

SCHEMA = 1


def summary(
    datasets: Sequence[Dataset], comparison: Comparison | None, causes: Mapping[str, Causes] | None = None
) -> dict[str, Any]:
    """summary.json. causes: by label, {} where nobody looked for any; None leaves all out that is worked out
    of the steps: answer, account, phases, ranks."""
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "datasets": {entry.label: _dataset_summary(entry) for entry in datasets},
        "reference": comparison.reference if comparison else None,
        "candidate": comparison.candidate if comparison else None,
        "comparison": {},
    }
    if causes is not None:
        for entry in datasets:
            _add_observed(result["datasets"][entry.label], entry, causes.get(entry.label))
    if comparison is not None:
        result["comparison"] = {name: _plain(metric, "name") for name, metric in comparison.metrics.items()}
        result["headline"] = comparison.headline
        result["main"] = comparison.main
        work = comparison.work
        result["work"] = None if work is None else _plain(work) | {"ratio": work.ratio}
        result["scope"] = comparison.scope
        result["matters"] = comparison.matters
        result["num_judged"] = comparison.num_judged
        result["differences"] = comparison.differences
        result["decomposition"] = _decomposition(comparison)
        result["comparison_notes"] = comparison.notes
    return result


def _add_observed(summary: dict[str, Any], dataset: Dataset, causes: Causes | None) -> None:
    """Answer, account, losses and causes; of ranks who came last, and what telemetry and the allocator said.
    Of the first run, where there are several."""
    account = account_of(dataset.first)
    rows = account.rows()
    by_rank = {row.name: account.by_rank_ms(row.name).tolist() for row in rows}
    summary["answer"] = dataset_answer(dataset, causes)
    summary["losses"] = [{"name": loss.name, "ms": loss.ms, "share": loss.share} for loss in losses(dataset)]
    summary["account"] = {
        "step_ms": account.mean_step_ms if account.mean_step_ms > 0 else None,
        "recorded_ms": account.recorded_ms if account.mean_step_ms > 0 else None,
        "num_steps": account.step_ms.shape[1],
        "cells": {row.name: {"ms": row.mean_ms, "share": row.share} for row in rows},
        "ranks": {
            str(rank): {name: ms[i] for name, ms in by_rank.items()} for i, rank in enumerate(account.ranks)
        },
        "wall_ms": account.outside or None,
        "not_measured": account.reasons,
    }
    summary["straggler"] = late = None if causes is None else causes.late_rank
    summary["sites"] = [msgspec.to_builtins(row) for row in sites_of(dataset.first)]
    summary["phases"] = [msgspec.to_builtins(row) for row in phases_of(dataset.first)]
    summary["differences"] = [asdict(entry) for entry in told_differences(dataset.first, late)]
    for row in judged_ranks(dataset.first):
        fields = asdict(row)
        del fields["rank"]
        summary["ranks"][str(row.rank)]["judged_steps"] = fields
    if causes is not None:
        summary["causes"] = msgspec.to_builtins(causes.listed)
    if causes is not None and causes.whatifs is not None:
        summary["whatifs"] = msgspec.to_builtins(causes.whatifs.lines)
        summary["notes"] = [*summary["notes"], *filter(None, [causes.whatifs.note])]


def _dataset_summary(dataset: Dataset) -> dict[str, Any]:
    result = _run_summary(dataset.runs[0]) | {"leading": "raw"}
    if len(dataset.runs) > 1:
        runs = [_run_summary(run) | {"path": str(run.path)} for run in dataset.runs]
        for run in runs:
            del run["ranks"], run["collectives"]
        host_bound_counts = [run["host_bound_steps"] for run in runs]
        unlike = {
            name: why_missing(dataset, name) for name in dataset.statistics if is_unlike(dataset.runs, name)
        }
        result["not_measured"] |= unlike
        result |= {
            "ranks": {str(rank): {"total": _sum_of_totals(dataset, rank)} for rank in dataset.first.ranks},
            "steps": statistics_beside_step(dataset),
            "num_steps": sum(run.num_judged for run in dataset.runs),
            "warmup": {
                "num_steps": sum(run.num_warmup for run in dataset.runs),
                "rule": dataset.first.warmup_rule + ", in each run",
            },
            "host_bound_steps": None if None in host_bound_counts else sum(host_bound_counts),
            "notes": [f"run {i}: {note}" for i, run in enumerate(dataset.runs) for note in run.notes],
            "num_runs": len(runs),
            "runs": runs,
        }
    return result


def _run_summary(run: Run) -> dict[str, Any]:
    result: dict[str, Any] = {
        "source": run.source,
        "ranks": {str(rank): {"total": total} for rank, total in run.totals.items()},
        "steps": statistics_beside_step(Dataset(run.label, [run], run.statistics)),
        "num_steps": run.num_judged,
        "warmup": {"num_steps": run.num_warmup, "rule": run.warmup_rule},
        "host_bound_steps": host_bound_steps(run),
        "collectives": run.collective_rows,
        "not_measured": missing(run),
        "attempts": run.noted.attempts,
        "goodput": run.goodput,
        "story": run.story,
        "notes": run.notes,
    }
    if run.other_sources:
        result["other_sources"] = {
            source: _run_summary(judge(other_run, 0)) for source, other_run in run.other_sources.items()
        }
    return result


def _sum_of_totals(dataset: Dataset, rank: int) -> dict[str, float | int | None]:
    totals = [judged.totals[rank] for judged in dataset.runs if rank in judged.totals]
    sums: dict[str, float | int | None] = {}
    for name in totals[0]:
        values = [total[name] for total in totals]
        measured = [value for value in values if value is not None]
        sums[name] = sum(measured) if len(measured) == len(values) else None
    return sums


def _decomposition(comparison: Comparison) -> dict[str, Any] | None:
    decomposition = comparison.decomposition
    if decomposition is None:
        return None
    phases = {row.part.name: _plain(row.part, "name") | {"line": row.line} for row in decomposition.phases}
    return _plain(decomposition) | {
        "step": _plain(decomposition.step, "name"),
        "parts": {part.name: _plain(part, "name") for part in decomposition.parts},
        "phases": phases,
    }


def _plain(struct: msgspec.Struct, but: str = "") -> dict[str, Any]:
    """A struct for a document, without this field."""
    fields: dict[str, Any] = msgspec.to_builtins(struct)
    return {name: value for name, value in fields.items() if name != but}
