"""aorta why: the causes of a long step, from the records of a run or from the traces of its ranks.

aorta.why.causes.rank judges both. Traces also become a graph of the step (aorta.why.replay), whose critical
path is shown, and which --if replays with changes.
"""

import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from aorta.cli.options import (
    PATH,
    comm_rules_option,
    json_option,
    reading_options,
    steps_and_ranks,
    warmup_option,
)
from aorta.cli.report import label_of, trace_reading
from aorta.command_line import OneScreenCommand
from aorta.errors import FINE, ReplayError, ReportError, TraceError
from aorta.processes import no_garbage_collection
from aorta.records.files import STEPS_FILES, TRACE_FOLDER

if TYPE_CHECKING:
    from aorta.account.model import Run
    from aorta.traces.classify import CommRule
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


class Reader(NamedTuple):
    """Reads a run or traces as the options say."""

    load: "Callable[..., Run]"
    """load_run, of their paths and a label."""
    rules: "Sequence[CommRule]"


@click.command("why", cls=OneScreenCommand)
@click.argument("runs", metavar="RUN|TRACE...", nargs=-1, required=True, type=PATH)
@click.option(
    "--if",
    "changes",
    multiple=True,
    metavar="CHANGE",
    help="Replay a traced step with a change: 'all_gather x0.5'.",
)
@click.option("--hazards", "of_hazards", is_flag=True, help="What `aorta check` found in RUN.")
@steps_and_ranks("", "Judge", "", click.option)
@warmup_option
@json_option
@reading_options
@comm_rules_option
def why_command(
    runs: tuple[Path, ...],
    changes: tuple[str, ...],
    of_hazards: bool,
    as_json: bool,
    jobs: int | None,
    dask: str | None,
    comm_rules: Path | None,
    strict: bool,
    **selected: Any,
) -> int:
    """The long form of `aorta report`: why a step of RUN takes its time, and what would help.

    One RUN, the folder of a run, or a TRACE of each of its ranks. At most five causes, the largest first,
    each with milliseconds, evidence, the setting to change and a command that checks it. --if may repeat.
    """
    from aorta.account.load.open import load_run

    if of_hazards:
        return _hazards(runs, as_json)
    selection = Selection(**selected)
    reading = trace_reading(comm_rules, strict=strict)
    reader = Reader(partial(load_run, jobs=jobs, dask=dask, reading=reading), reading.rules)
    is_run = _is_run(runs)
    if is_run and len(runs) > 1:
        raise ReportError(f"aorta why takes one run, got {len(runs)}; aorta compare takes two")
    if not changes:
        return _why(runs, selection, reader, as_json)
    if is_run:
        return _replay_traces_of(runs[0], changes, selection, reader, as_json)
    return _replay_traces(runs, changes, selection, reader, as_json)


def _hazards(runs: tuple[Path, ...], as_json: bool) -> int:
    """Print what the check of a run found; exit code 1 where something is confirmed or wrong."""
    from aorta.cli.check import code_of, print_checked
    from aorta.hazards.findings import read_checked

    if len(runs) > 1:
        raise ReportError(f"aorta why --hazards takes one run, got {len(runs)}")
    all_checked = read_checked(runs[0])
    if not any(checked.steps for checked in all_checked):
        raise ReportError(f"{runs[0]} was not checked: aorta check -- COMMAND records what --hazards shows")
    print_checked(all_checked, as_json, show_all=True)
    return code_of(all_checked, "confirmed")


def _is_run(paths: tuple[Path, ...]) -> bool:
    """True if the first path is a folder with records, or unreadable: the loader says why."""
    path = paths[0]
    try:
        return not path.exists() or (path.is_dir() and any(path.glob(STEPS_FILES)))
    except OSError:
        return True


# ---- causes ----------------------------------------------------------------------------------------


def _why(paths: tuple[Path, ...], selection: Selection, reader: Reader, as_json: bool) -> int:
    """Print why the steps take their time; of traces also the critical path, where they can be replayed."""
    from aorta.account.judge.cells import account_of
    from aorta.account.judge.judged import dataset, judge, selected
    from aorta.account.judge.phases import phases_of
    from aorta.account.judge.profiles import busiest, told_differences
    from aorta.account.judge.sites import sites_of
    from aorta.timeline.types import TRACE_SOURCES
    from aorta.why.causes.rank import causes_of
    from aorta.why.causes.text import MOST_LINES, causes_text

    path = paths[0] if len(paths) == 1 else paths[0].parent
    label = label_of(os.path.basename(os.path.realpath(path)))
    run = reader.load(paths, label)
    if selection.steps is not None or selection.ranks is not None:
        run = selected(run, selection.steps, selection.ranks)
    # Chosen steps are judged from the first one on, unless --warmup says otherwise.
    judged = judge(run, 0 if selection.steps and selection.warmup is None else selection.warmup)
    of_run = dataset(label, [judged])
    causes = causes_of(of_run, str(path) if len(paths) == 1 else "TRACES", replays=False)
    path_lines: list[str] = []
    path_json: dict[str, Any] = {}
    if run.source in TRACE_SOURCES:
        path_lines, path_json = _critical_path(paths, selection, reader, as_json)
    if as_json:
        account = account_of(judged)
        answer = {
            "run": str(path),
            "step_ms": account.mean_step_ms or None,
            "num_steps": judged.num_judged,
            "ranks": judged.ranks,
            "source": of_run.source,
            "causes": causes.listed,
            "unexplained_ms": causes.unexplained_ms,
            "cannot_tell": causes.cannot_tell,
            "no_loss": causes.no_loss,
            "account": account.rows(),
            "phases": phases_of(judged),
            "sites": sites_of(judged),
            "differences": told_differences(judged, causes.late_rank),
            "lines": busiest(judged, MOST_LINES),
            "nothing": None if causes.listed else causes.empty_text,
            "notes": [*judged.story, *judged.notes],
            **path_json,
        }
        click.echo(_json(answer))
    else:
        click.echo("\n".join([causes_text(causes, judged), *path_lines]))
    return FINE


def _critical_path(
    paths: tuple[Path, ...], selection: Selection, reader: Reader, as_json: bool
) -> tuple[list[str], dict[str, Any]]:
    """The critical path of the typical traced step, as text and as JSON; or why there is none."""
    from aorta.why.causes.whatifs import MOST_BYTES, size_bytes
    from aorta.why.replay.load import steps_of
    from aorta.why.replay.path import critical_path, summed
    from aorta.why.replay.run import replay
    from aorta.why.replay.whatif import settled

    try:
        num_bytes = sum(map(size_bytes, paths))
        if num_bytes > MOST_BYTES:
            raise ReplayError(f"{num_bytes >> 20} MiB of traces: aorta why TRACES --if CHANGE does")
        with no_garbage_collection():  # a graph is millions of small objects and no circle of them
            all_steps = steps_of(paths[0] if len(paths) == 1 else list(paths), reader.rules)
            steps = _chosen(all_steps, selection.steps)
            step = _typical(settled(steps))
            replayed = replay(step)
            parts = summed(critical_path(replayed))
    except (ReplayError, TraceError) as error:
        reason = f"Not replayed: {error}"
        return ["", *textwrap.wrap(reason, 100)], {"critical_path": None, "not_replayed": str(error)}
    if as_json:
        graph = {"critical_path": [_part_json(part) for part in parts], "graph": _ground_json(step)}
        return [], graph | {"replayed_step_ms": replayed.slowest_ms, "replayed_step": step.number}
    part = "the whole trace" if step.number is None else f"traced step {step.number}"
    lines = ["", f"critical path of {part}, {replayed.slowest_ms:.2f} ms:"]
    lines += _path_lines(parts, replayed.slowest_ms)
    unseen_ms = sum(part.ms for part in parts if part.subject == BEFORE)
    if unseen_ms >= LEAST_UNSEEN * replayed.slowest_ms:
        lines += [
            "",
            f"{unseen_ms:.2f} ms of it come before the trace begins, in work launched earlier: these traces",
            "cannot show what took that long.",
        ]
    return [*lines, "", *_ground_lines(step)], {}


# ---- replays with a change -----------------------------------------------------------------------


def _replay_traces_of(
    run: Path, changes: tuple[str, ...], selection: Selection, reader: Reader, as_json: bool
) -> int:
    traces = run / TRACE_FOLDER
    if not run.is_dir():
        raise ReportError(f"there is no folder or trace {run}")
    if not traces.is_dir():
        raise ReportError(
            f"--if replays a traced step, and {run} holds no traces (torch_profiler/): trace one with"
            f" 'aorta capture {run}' while it runs, or profiling.enabled=true"
        )
    untraced_ms = _untraced_quartiles_ms(run, selection.warmup, reader)
    return _replay_traces((traces,), changes, replace(selection, warmup=None), reader, as_json, untraced_ms)


def _untraced_quartiles_ms(
    path: Path, warmup: int | None, reader: Reader
) -> tuple[float, float, float] | None:
    """Quartiles of the run's steps that no profiler slowed down, the median in the middle."""
    import numpy as np

    from aorta.account.judge.judged import judge

    judged = judge(reader.load((path,), "run"), warmup)
    step_ms = judged.values("step_ms")
    median_ms = judged.statistics["step_ms"].median
    if median_ms is None or median_ms != median_ms:
        return None
    low, high = np.nanpercentile(step_ms, (25, 75))
    return min(float(low), median_ms), median_ms, max(float(high), median_ms)


def _replay_traces(
    paths: tuple[Path, ...],
    changes: tuple[str, ...],
    selection: Selection,
    reader: Reader,
    as_json: bool,
    untraced_ms: tuple[float, float, float] | None = None,
) -> int:
    """Print what would become of the traced steps with changes.

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
    with no_garbage_collection():  # a graph is millions of small objects and no circle of them
        all_steps = steps_of(paths[0] if len(paths) == 1 else list(paths), reader.rules)
        chosen = _chosen(all_steps, selection.steps)
        low_ms, median_ms, high_ms = untraced_ms or (None, None, None)
        quartiles_ms = None if low_ms is None or high_ms is None else (low_ms, high_ms)
        predicted = predict(chosen, parsed_changes, untraced_ms=median_ms, untraced_quartiles_ms=quartiles_ms)
    click.echo(
        _json(_prediction_json(predicted, all_steps)) if as_json else _prediction_text(predicted, all_steps)
    )
    return FINE


def _chosen(steps: "list[StepGraph]", span: tuple[int, int] | None) -> "list[StepGraph]":
    if span is None:
        return steps
    first, last = span
    if steps[0].number is None:
        if first <= 0 <= last:
            return steps
        raise ReplayError("--steps: the traces mark no steps; the whole trace counts as one")
    chosen = [step for step in steps if step.number is not None and first <= step.number <= last]
    if not chosen:
        numbers = ", ".join(str(step.number) for step in steps)
        raise ReplayError(f"--steps {first}:{last}: the traces hold the steps {numbers}")
    return chosen


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


def _path_lines(parts: "Sequence[PathPart]", step_ms: float, max_parts: int = MOST_PARTS) -> list[str]:
    lines = [
        f"  {part.ms:9.3f} ms {100 * part.ms / step_ms:5.1f} %"
        f"  {part.kind.replace('launch_bound', 'host'):15s}"  # beside which the device may well be busy
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

    from aorta.records.seal import encoded

    return msgspec.json.format(encoded(document), indent=2).decode()
