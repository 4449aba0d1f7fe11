"""aorta why: the causes of a long step, from the records of a run or from the traces of its ranks.

Records are judged by aorta.why.causes.rank. Traces become a graph of the step (aorta.why.replay): its
critical path tells the causes, and --if replays it with changes.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aorta.cli.options import PATH, json_option, reading_options, steps_and_ranks, warmup_option
from aorta.command_line import OneScreenCommand
from aorta.errors import FINE, ReplayError, ReportError
from aorta.records.files import STEPS_FILES

if TYPE_CHECKING:
    from aorta.account.model import Run
    from aorta.why.causes.cause import Cause
    from aorta.why.replay.graph import StepGraph
    from aorta.why.replay.path import PathPart
    from aorta.why.replay.whatif import Prediction

MOST_PARTS = 12
BEFORE = "before the trace"
LEAST_UNSEEN = 0.03
"""Share of the step before the trace began from which on the text says so."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The steps and ranks that were asked for."""

    steps: tuple[int, int] | None
    ranks: set[int] | None
    warmup: int | None


@dataclass(frozen=True, kw_only=True)
class RecordsReading:
    """Settings for reading the records of a run: processes, Dask's address, the cache of columns."""

    jobs: int | None
    dask: str | None
    cache: bool

    def load(self, path: Path, label: str) -> "Run":
        from aorta.account.load.open import load_run
        from aorta.traces.cache import Reading

        return load_run(path, label, jobs=self.jobs, dask=self.dask, reading=Reading(cache=self.cache))


@click.command("why", cls=OneScreenCommand)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@click.option(
    "--if",
    "changes",
    multiple=True,
    metavar="CHANGE",
    help="Replay a traced step with a change: 'all_gather x0.5'.",
)
@steps_and_ranks("Judge", "", click.option)
@warmup_option
@json_option
@reading_options
def why_command(
    runs: tuple[Path, ...],
    changes: tuple[str, ...],
    as_json: bool,
    jobs: int | None,
    dask: str | None,
    cache: bool,
    **selected: Any,
) -> int:
    """The long form of `aorta report`: why a step of RUN takes its time, and what would help.

    RUN is the folder of a run, or traces of all its ranks. At most five causes, the largest first, each with
    milliseconds, evidence, the setting to change and a command that checks it. --if may repeat.
    """
    selection, reading = Selection(**selected), RecordsReading(jobs=jobs, dask=dask, cache=cache)
    if not _is_run(runs):
        return _why_traces(runs, changes, selection, as_json)
    if len(runs) > 1:
        raise ReportError(f"aorta why takes one run, got {len(runs)}; aorta compare takes two")
    if changes:
        return _replay_traces_of(runs[0], changes, selection, reading, as_json)
    return _why_records(runs[0], selection, reading, as_json)


def _is_run(paths: tuple[Path, ...]) -> bool:
    """True if the first path is a folder with records, or unreadable: the loader says why."""
    path = paths[0]
    try:
        return not path.exists() or (path.is_dir() and any(path.glob(STEPS_FILES)))
    except OSError:
        return True


# ---- records of a run ----------------------------------------------------------------------------


def _why_records(path: Path, selection: Selection, reading: RecordsReading, as_json: bool) -> int:
    from aorta.account.judge.judged import dataset, judge
    from aorta.account.judge.leading import settled
    from aorta.why.causes.rank import causes_of
    from aorta.why.causes.run_text import causes_text, nothing_text
    from aorta.why.causes.selection import selected

    label = path.resolve().name or "run"
    run = reading.load(path, label)
    if selection.steps is not None or selection.ranks is not None:
        run = selected(run, selection.steps, selection.ranks)
    # Chosen steps are judged from the first one on, unless --warmup says otherwise.
    judged = judge(run, 0 if selection.steps and selection.warmup is None else selection.warmup)
    settled_dataset = settled({label: dataset(label, [judged])})[label]
    causes = causes_of(settled_dataset, str(path))
    if as_json:
        answer = {
            "run": str(path),
            "step_ms": settled_dataset.statistics["step_ms"].median,
            "num_steps": judged.num_steps,
            "ranks": judged.run.ranks,
            "source": settled_dataset.source,
            "causes": causes,
            "nothing": None if causes else nothing_text(settled_dataset),
            "notes": judged.run.notes,
        }
        click.echo(_json(answer))
    else:
        click.echo(causes_text(causes, settled_dataset))
    return FINE


def _replay_traces_of(
    run: Path, changes: tuple[str, ...], selection: Selection, reading: RecordsReading, as_json: bool
) -> int:
    traces = run / "torch_profiler"
    if not traces.is_dir():
        raise ReportError(
            f"--if replays a traced step, and {run} holds no traces (torch_profiler/): trace one with"
            f" 'aorta capture {run}' while it runs, or profiling.enabled=true"
        )
    untraced_ms = _untraced_quartiles_ms(run, selection.warmup, reading)
    return _why_traces((traces,), changes, replace(selection, warmup=None), as_json, untraced_ms)


def _untraced_quartiles_ms(
    path: Path, warmup: int | None, reading: RecordsReading
) -> tuple[float, float, float] | None:
    """Quartiles of the run's steps that no profiler slowed down, the median in the middle."""
    import numpy as np

    from aorta.account.judge.judged import judge

    judged = judge(reading.load(path, "run"), warmup)
    step_ms = judged.run.metrics["step_ms"][:, judged.num_warmup :]
    median_ms = judged.statistics["step_ms"].median
    if median_ms is None or median_ms != median_ms:
        return None
    low, high = np.nanpercentile(step_ms, (25, 75))
    return min(float(low), median_ms), median_ms, max(float(high), median_ms)


# ---- traces --------------------------------------------------------------------------------------


def _why_traces(
    paths: tuple[Path, ...],
    changes: tuple[str, ...],
    selection: Selection,
    as_json: bool,
    untraced_ms: tuple[float, float, float] | None = None,
) -> int:
    """Print why the traced steps take their time; with changes, what would become of them.

    untraced_ms: quartiles of the run's steps without a profiler, if records tell them; the second is the
        median.
    """
    from aorta.why.replay.changes import parse_changes
    from aorta.why.replay.load import steps_of
    from aorta.why.replay.whatif import predict

    parsed_changes = parse_changes(changes)  # a misspelt change must not cost the reading of traces
    if selection.ranks is not None:
        raise ReplayError("--ranks: a replay needs all ranks that were traced, leave the option out")
    if selection.warmup is not None:
        raise ReplayError("--warmup is for records: of traced steps, --steps chooses")
    gc.disable()  # a graph is millions of small objects and no circle of them
    all_steps = steps_of(paths[0] if len(paths) == 1 else list(paths))
    chosen = _chosen(all_steps, selection.steps)
    if parsed_changes:
        low_ms, median_ms, high_ms = untraced_ms or (None, None, None)
        quartiles_ms = None if low_ms is None or high_ms is None else (low_ms, high_ms)
        predicted = predict(chosen, parsed_changes, untraced_ms=median_ms, untraced_quartiles_ms=quartiles_ms)
        click.echo(
            _json(_prediction_json(predicted, all_steps))
            if as_json
            else _prediction_text(predicted, all_steps)
        )
        return FINE
    from aorta.why.causes.from_path import causes_of_steps

    label = str(paths[0]) if len(paths) == 1 else f"{paths[0].parent} ({len(paths)} traces)"
    causes = causes_of_steps(chosen, str(paths[0]) if len(paths) == 1 else "TRACES")
    click.echo(_json(_causes_json(causes, chosen, label)) if as_json else _causes_text(causes, chosen, label))
    return FINE


def _chosen(steps: "list[StepGraph]", span: tuple[int, int] | None) -> "list[StepGraph]":
    if span is None:
        return steps
    first, last = span
    chosen = [step for step in steps if step.number is not None and first <= step.number <= last]
    if not chosen:
        numbers = ", ".join(str(step.number) for step in steps)
        raise ReplayError(f"--steps {first}:{last}: the traces hold the steps {numbers}")
    return chosen


def _causes_text(causes: "Sequence[Cause]", steps: "Sequence[StepGraph]", label: str) -> str:
    from aorta.why.causes.text import cause_lines
    from aorta.why.replay.path import critical_path, summed
    from aorta.why.replay.run import replay
    from aorta.why.replay.whatif import settled

    step = _typical(settled(steps))
    replayed = replay(step)
    lines = [_title(label, step, replayed.slowest_ms, len(steps)), ""]
    parts = summed(critical_path(replayed))
    lines += _path_lines(parts, replayed.slowest_ms)
    unseen_ms = sum(part.ms for part in parts if part.subject == BEFORE)
    if unseen_ms >= LEAST_UNSEEN * replayed.slowest_ms:
        lines += [
            "",
            f"{unseen_ms:.2f} ms of it come before the trace begins, in work launched earlier: these traces",
            "cannot show what took that long.",
        ]
    if not causes:
        lines += [
            "",
            "Nothing worth changing: apart from compute, no part of the critical path is 3 % of the step.",
        ]
    lines += cause_lines(causes)
    return "\n".join([*lines, "", *_ground_lines(step)])


def _prediction_text(predicted: "Prediction", steps: "Sequence[StepGraph]") -> str:
    from aorta.why.causes.text import wrapped

    low, high = predicted.interval_ms
    change = predicted.change_ms / predicted.base_ms
    lines = [
        f"if {' and '.join(predicted.changes)}:",
        f"  step {predicted.base_ms:.2f} ms -> {predicted.predicted_ms:.2f} ms"
        f" [{low:.2f}, {high:.2f}], {100 * change:+.1f} %",
        "  critical path after the change:",
        *_path_lines(predicted.next_parts, sum(part.ms for part in predicted.next_parts), 6),
    ]
    lines += [line for note in predicted.notes for line in wrapped(note)]
    return "\n".join([*lines, "", *_ground_lines(steps[-1])])


def _title(label: str, step: "StepGraph", step_ms: float, num_steps: int) -> str:
    return (
        f"{label}: a step takes {step_ms:.2f} ms ({num_steps} traced steps, {len(step.ranks)}"
        f" rank{'s' if len(step.ranks) > 1 else ''}; step {step.number} is shown)"
    )


def _path_lines(parts: "Sequence[PathPart]", step_ms: float, max_parts: int = MOST_PARTS) -> list[str]:
    lines = [
        f"  {part.ms:9.3f} ms {100 * part.ms / step_ms:5.1f} %  {part.kind:15s}"
        f" {part.subject[:58]}{f' (rank {part.rank})' if part.rank >= 0 else ''}"
        for part in parts[:max_parts]
    ]
    other_ms = sum(part.ms for part in parts[max_parts:])
    if other_ms > 0:
        lines.append(
            f"  {other_ms:9.3f} ms {100 * other_ms / step_ms:5.1f} %  {len(parts) - max_parts} smaller parts"
        )
    return lines


def _ground_lines(step: "StepGraph") -> list[str]:
    """Lines on how many calls and waits the graph holds, and its notes."""
    from aorta.why.causes.text import wrapped

    graph = step.trace
    text = (
        f"graph: {len(graph.nodes):,} calls, kernels and copies; {graph.num_recorded_edges} waits between"
        f" streams recorded, {graph.num_inferred_edges} inferred from times; unexplained delays"
        f" of device work: {sum(graph.unexplained.values()) / 1e6:.2f} ms in total"
    )
    notes = list(dict.fromkeys(graph.notes))
    return [line for paragraph in (text, *notes) for line in wrapped(paragraph)]


def _typical(steps: "Sequence[StepGraph]") -> "StepGraph":
    """The step of median length."""
    return sorted(steps, key=lambda step: max(step.measured_ms(end.rank) for end in step.ends))[
        len(steps) // 2
    ]


def _causes_json(causes: "Sequence[Cause]", steps: "Sequence[StepGraph]", label: str) -> dict[str, Any]:
    from aorta.why.replay.path import critical_path, summed
    from aorta.why.replay.run import replay
    from aorta.why.replay.whatif import settled

    step = _typical(settled(steps))
    replayed = replay(step)
    return {
        "run": label,
        "source": "trace",
        "step_ms": replayed.slowest_ms,
        "num_steps": len(steps),
        "ranks": list(step.ranks),
        "causes": list(causes),
        "critical_path": [_part_json(part) for part in summed(critical_path(replayed))],
        "graph": _ground_json(step),
    }


def _prediction_json(predicted: "Prediction", steps: "Sequence[StepGraph]") -> dict[str, Any]:
    return {
        "changes": list(predicted.changes),
        "step_ms": predicted.base_ms,
        "predicted_ms": predicted.predicted_ms,
        "interval_ms": list(predicted.interval_ms),
        "critical_path": [_part_json(part) for part in predicted.next_parts],
        "notes": list(predicted.notes),
        "graph": _ground_json(steps[-1]),
    }


def _part_json(part: "PathPart") -> dict[str, Any]:
    return {
        "kind": part.kind, "subject": part.subject, "ms": part.ms,
        "rank": part.rank if part.rank >= 0 else None, "evidence": part.evidence,
    }  # fmt: skip


def _ground_json(step: "StepGraph") -> dict[str, Any]:
    graph = step.trace
    return {
        "recorded_waits": graph.num_recorded_edges,
        "inferred_waits": graph.num_inferred_edges,
        "unexplained_ms": sum(graph.unexplained.values()) / 1e6,
        "notes": list(dict.fromkeys(graph.notes)),
    }


def _json(document: dict[str, Any]) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
