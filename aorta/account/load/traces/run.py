"""The run that summaries of traces make."""

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from aorta.account.load.run import RunFiles, assemble
from aorta.account.load.traces.reduce import RankSummary, records_of
from aorta.account.load.traces.steps import NOT_IN_TRACE, OF_KIND
from aorta.account.metrics import of_operation
from aorta.account.model import Run
from aorta.errors import TraceError
from aorta.records.schema import RunRecord
from aorta.traces.sources import Reading, Source


def run_of_summaries(source: Source, label: str, summaries: Sequence[RankSummary], reading: Reading) -> Run:
    """The steps of the ranks side by side; waits are not known yet."""
    if not summaries:
        raise TraceError(f"{source.path} holds no rank")
    world_size = source.world_size or len(source.ranks)
    largest_group = max(summary.world_size or 1 for summary in summaries)
    run = assemble(
        RunFiles(
            source.path,
            label,
            [summary.columns for summary in summaries],
            _run_record(summaries, max(world_size, largest_group)),
            records=partial(records_of, source, world_size, reading),
            totals={summary.rank: _totals(summary) for summary in summaries},
        ),
        [],
    )
    return _without_unknown_sizes(run, summaries)


def _totals(summary: RankSummary) -> dict[str, float | int | None]:
    totals: dict[str, float | int | None] = msgspec.structs.asdict(summary.sums)
    return totals | dict.fromkeys((name for kind in summary.untimed for name in OF_KIND[kind]), None)


def _run_record(summaries: Sequence[RankSummary], world_size: int) -> RunRecord:
    """Facts that traces give about a run: devices and versions, and no configuration."""
    missing = (
        "command",
        "config",
        "model",
        "layout",
        "environment",
        "clock_anchors",
        "coverage",
        "placement",
    )
    return RunRecord(
        started_unix_ns=min(summary.facts.start_unix_ns for summary in summaries),
        finished_unix_ns=max(summary.facts.end_unix_ns for summary in summaries),
        world_size=world_size,
        command=[],
        config=None,
        model=None,
        layout=None,
        versions=dict(summaries[0].versions),
        devices=[
            {"name": summary.device, "host": summary.host}
            for summary in summaries
            if summary.device is not None
        ],
        environment={},
        clock_anchors=[],
        coverage={},
        placement=None,
        not_measured=dict.fromkeys(missing, NOT_IN_TRACE),
    )


def _without_unknown_sizes(run: Run, summaries: Sequence[RankSummary]) -> Run:
    """Bytes and bandwidth are not known where any collective of the operation has no size."""
    unknown = {
        op
        for summary in summaries
        for op, size in zip(summary.calls.op, summary.calls.size_bytes, strict=True)
        if size is None
    }
    for op in unknown:
        for name in (of_operation("bytes", op), of_operation("busbw_gb_s", op)):
            if name in run.metrics:
                run.metrics[name][:] = np.nan
    alone = {
        op
        for summary in summaries
        for op, key in zip(summary.calls.op, summary.calls.group, strict=True)
        if key.ranks is None
    }
    for op in alone:
        if (name := of_operation("busbw_gb_s", op)) in run.metrics:
            run.metrics[name][:] = np.nan
    return run
