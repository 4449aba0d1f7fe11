"""What-ifs worth knowing of traced steps: what the critical path suggests, replayed, the best first."""

from collections.abc import Sequence
from pathlib import Path

from aorta.account.model import Dataset, Run, WhatIfLine, WhatIfs
from aorta.account.numbers import quantity
from aorta.errors import ReplayError, TraceError
from aorta.traces.sources import open_source
from aorta.why.replay.changes import parse_change
from aorta.why.replay.graph import StepGraph
from aorta.why.replay.path import PathPart, critical_path, summed
from aorta.why.replay.run import replay
from aorta.why.replay.whatif import Prediction, host_speeds, predict, settled

MOST_SHOWN = 5
LEAST_GAIN = 0.01
"""Of the step."""
LEAST_PART = 0.02
"""Of the critical path, from which on a part suggests a change."""
MOST_BYTES = 64 << 20
"""Of trace files: more take longer to replay than a report should take."""
APART_NS = 5_000_000_000
"""How far a trace of the run may lie outside of its steps."""


def whatifs_of(dataset: Dataset, traces: Path) -> WhatIfs:
    """Of the dataset's first run, from its traces."""
    run = dataset.first
    is_traces = run.source == "kineto"
    command = f"aorta why {run.path} --if CHANGE"
    try:
        num_bytes = size_bytes(traces)
        if num_bytes > MOST_BYTES:
            return WhatIfs([], f"{num_bytes >> 20} MiB of traces are not replayed for a report: {command}")
        from aorta.why.replay.load import steps_of

        median = None if is_traces else dataset.statistics["step_ms"].median
        steps = steps_of(traces, within_unix_ns=None if is_traces else _time_of(run))
        lines = best(steps, None if median is None or median != median else float(median))
    except (TraceError, ReplayError, OSError) as error:
        return WhatIfs([], f"Not replayed: {error}", note=f"no what-ifs: {error}")
    num_traced, num_ranks = len(open_source(traces).files), len(run.ranks)
    note = f"what-ifs are of traces of {num_traced} of {num_ranks} ranks" if num_traced < num_ranks else ""
    empty_text = f"No change that the critical path suggests would save {100 * LEAST_GAIN:.0f} %: {command}"
    return WhatIfs(lines, "" if lines else empty_text, command, note)


def _time_of(run: Run) -> tuple[int, int]:
    """When the run's steps began, and when the last one did; as far as clocks of machines are apart, and as a
    trace begins before its first step."""
    start_ns = run.start_unix_ns
    return int(start_ns.min()) - APART_NS, int(start_ns.max()) + APART_NS


def best(steps: Sequence[StepGraph], untraced_ms: float | None = None) -> list[WhatIfLine]:
    """At most MOST_SHOWN predictions, the shortest step first; of changes with one outcome the first."""
    speeds = None if untraced_ms is None else host_speeds(settled(steps), untraced_ms)
    lines: dict[float, WhatIfLine] = {}
    for text in suggested(steps):
        try:
            predicted = predict(steps, [parse_change(text)], untraced_ms=untraced_ms, speeds=speeds)
        except ReplayError:
            continue
        if predicted.predicted_ms <= (1 - LEAST_GAIN) * predicted.base_ms:
            lines.setdefault(round(predicted.predicted_ms, 3), _line(text, predicted))
    return [lines[ms] for ms in sorted(lines)][:MOST_SHOWN]


def suggested(steps: Sequence[StepGraph]) -> list[str]:
    """Changes in the words of --if, by what the critical path consists of."""
    step = settled(steps)[-1]
    parts = summed(critical_path(replay(step)))
    total_ms = sum(part.ms for part in parts)
    texts: list[str] = []
    for part in parts:
        if part.ms >= LEAST_PART * total_ms:
            texts += _suggested_by(part)
    return list(dict.fromkeys(texts))


def _suggested_by(part: PathPart) -> list[str]:
    match part.kind:
        case "transfer":
            op = part.subject.partition(" (")[0]
            more = {
                "all_gather": ["prefetch +1", "no reshard"],
                "all_reduce": ["buckets x0.25", "buckets x4"],
            }
            return [*more.get(op, []), f"{op} x0.5"]
        case "late_rank" | "bubble":
            return [f"rank {part.subject.removeprefix('rank ')} on time"]
        case "launch_bound":
            return ["graphs", "host x0.5"]
        case "synchronisation":
            return ["no sync"]
        case "data_loading":
            return ["no loader delay"]
        case "contention":
            return ["no contention"]
        case "compute" if part.subject != "gaps between kernels":
            return [f"{part.subject} x0.8"]
        case _:
            return []


def _line(text: str, predicted: Prediction) -> WhatIfLine:
    first = predicted.next_parts[0] if predicted.next_parts else None
    return WhatIfLine(
        change=text,
        step_ms=predicted.base_ms,
        predicted_ms=predicted.predicted_ms,
        interval_ms=predicted.interval_ms,
        next_text="the host needs that long for a step"
        if predicted.is_host_bound
        else ""
        if first is None
        else f"{first.kind}: {first.subject}, {quantity(first.ms, 'ms')}",
    )


def size_bytes(traces: Path) -> int:
    paths = {path for file in open_source(traces).files.values() for path in file.paths}
    return sum(Path(path).stat().st_size for path in paths)
