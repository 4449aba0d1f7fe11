"""aorta why, for traces: the critical path over ranks, causes, and what-ifs."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aorta.errors import ReplayError
from aorta.exit_codes import FINE

if TYPE_CHECKING:
    from aorta.causes.cause import Cause
    from aorta.replay.graph import StepGraph
    from aorta.replay.path import PathPart
    from aorta.replay.whatif import Prediction

MOST_PARTS = 12
BEFORE = "before the trace"
LEAST_UNSEEN = 0.03
"""Of the step."""


def why_traces(
    paths: tuple[Path, ...],
    changes: tuple[str, ...],
    steps: str | None,
    ranks: str | None,
    as_json: bool,
    untraced_ms: tuple[float, float, float] | None = None,
) -> int:
    """Prints why the traced steps are as long as they are; with changes, what would become of them.

    untraced_ms: quartiles of the run's steps without a profiler, where records tell; the second is the
        median.
    """
    from aorta.replay.changes import parse_changes
    from aorta.replay.load import steps_of
    from aorta.replay.whatif import predict

    parsed_changes = parse_changes(changes)  # a misspelt change must not cost the reading of traces
    if ranks is not None:
        raise ReplayError("--ranks: a replay needs all ranks that were traced, leave the option out")
    gc.disable()  # a graph is millions of small objects and no circle of them
    all_steps = steps_of(paths[0] if len(paths) == 1 else list(paths))
    chosen = _chosen(all_steps, steps)
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
    from aorta.causes.from_path import causes_of_steps

    label = str(paths[0]) if len(paths) == 1 else f"{paths[0].parent} ({len(paths)} traces)"
    causes = causes_of_steps(chosen, str(paths[0]) if len(paths) == 1 else "TRACES")
    click.echo(_json(_causes_json(causes, chosen, label)) if as_json else _causes_text(causes, chosen, label))
    return FINE


def _chosen(steps: "list[StepGraph]", text: str | None) -> "list[StepGraph]":
    if text is None:
        return steps
    first, colon, last = text.partition(":")
    if not first.strip().isdigit() or (colon and not last.strip().isdigit()):
        raise ReplayError(f"--steps {text} is not FIRST:LAST, as in 10:40")
    span = range(int(first), int(last if colon else first) + 1)
    chosen = [step for step in steps if step.number in span]
    if not chosen:
        numbers = ", ".join(str(step.number) for step in steps)
        raise ReplayError(f"--steps {text}: the traces hold the steps {numbers}")
    return chosen


def _causes_text(causes: "Sequence[Cause]", steps: "Sequence[StepGraph]", label: str) -> str:
    from aorta.causes.text import cause_lines
    from aorta.replay.path import critical_path, summed
    from aorta.replay.run import replay
    from aorta.replay.whatif import settled

    step = _typical(settled(steps))
    replayed = replay(step)
    lines = [_title(label, step, replayed.slowest_ms, len(steps)), ""]
    parts = summed(critical_path(replayed))
    lines += _path_lines(parts, replayed.slowest_ms)
    unseen_ms = sum(part.ms for part in parts if part.subject == BEFORE)
    if unseen_ms >= LEAST_UNSEEN * replayed.slowest_ms:
        lines += [
            "",
            f"{unseen_ms:.2f} ms of it lie before the trace begins, in work that was launched earlier:",
            "what took that long cannot be known from these traces.",
        ]
    if not causes:
        lines += [
            "",
            "Nothing worth changing: no stretch of the critical path but compute is 3 % of the step.",
        ]
    lines += cause_lines(causes)
    return "\n".join([*lines, "", *_ground_lines(step)])


def _prediction_text(predicted: "Prediction", steps: "Sequence[StepGraph]") -> str:
    from aorta.causes.text import wrapped

    low, high = predicted.interval_ms
    change = predicted.change_ms / predicted.base_ms
    lines = [
        f"if {' and '.join(predicted.changes)}:",
        f"  step {predicted.base_ms:.2f} ms -> {predicted.predicted_ms:.2f} ms"
        f" [{low:.2f}, {high:.2f}], {100 * change:+.1f} %",
        "  then the critical path is",
        *_path_lines(predicted.next_parts, sum(part.ms for part in predicted.next_parts), 6),
    ]
    lines += [line for note in predicted.notes for line in wrapped(note)]
    return "\n".join([*lines, "", *_ground_lines(steps[-1])])


def _title(label: str, step: "StepGraph", step_ms: float, num_steps: int) -> str:
    return (
        f"{label}: a step takes {step_ms:.2f} ms ({num_steps} traced, {len(step.ranks)}"
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
    from aorta.causes.text import wrapped

    """What the graph rests on."""
    graph = step.trace
    text = (
        f"graph: {len(graph.nodes):,} calls, kernels and copies; {graph.num_recorded_edges} waits between"
        f" streams recorded, {graph.num_inferred_edges} inferred from times; unexplained delays"
        f" {sum(graph.unexplained.values()) / 1e6:.2f} ms of device work in all"
    )
    notes = list(dict.fromkeys(graph.notes))
    return [line for paragraph in (text, *notes) for line in wrapped(paragraph)]


def _typical(steps: "Sequence[StepGraph]") -> "StepGraph":
    """The one in the middle by length."""
    return sorted(steps, key=lambda step: max(step.measured_ms(end.rank) for end in step.ends))[
        len(steps) // 2
    ]


def _causes_json(causes: "Sequence[Cause]", steps: "Sequence[StepGraph]", label: str) -> dict[str, Any]:
    from aorta.replay.path import critical_path, summed
    from aorta.replay.run import replay
    from aorta.replay.whatif import settled

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
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
