"""The timeline's steps: a few of a few ranks, not the run, span by span; timeline.js draws them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aorta.account.judge.ranks import Shown, telling_ranks
from aorta.account.model import Arrivals, Causes, NamedSpan, Report, Run
from aorta.records.perfetto import COMPUTE, EXPOSED, HIDDEN, IDLE, states
from aorta.records.reader import OP_OF_STREAM
from aorta.records.schema import CollectiveRecord, StepRecord
from aorta.timeline.collective import stream_of
from aorta.timeline.intervals import Intervals, intervals, length_within, subtract_normalised
from aorta.timeline.overlap import unions
from aorta.timeline.types import COPY, TRACE_SOURCES
from aorta.timeline.waits import exposed_waiting

MAX_MARKS = 80_000
"""Spans and stretches in the page, all runs together: about 0.9 MB."""
STATE_INDEX = {COMPUTE: 0, HIDDEN: 1, EXPOSED: 2, IDLE: 3}
WAITING = 4
"""Exposed, and nothing moves because a rank has not arrived."""
MAX_FURTHER = 24
"""Steps besides the telling ones that a click leads to."""
MAX_FURTHER_MARKS = 12_000
"""Their marks in the page, all runs together."""
FAR_APART = 2
"""Windows between the starts of a step on two ranks, above which their clocks are not those of one run."""

Call = tuple[int, str, int]
"""A collective on one rank: rank, op, start in ns on the rank's clock."""


@dataclass(slots=True)
class Steps:
    """Steps that the timeline of one run shows."""

    label: str
    source: str
    ranks: list[int]
    chosen: dict[str, int]
    """'first', 'median', 'slowest', 'last', 'cause 1' and so on, and the global step of each; further
    ones as 'step 7'."""
    records: dict[int, dict[int, StepRecord]] = field(default_factory=dict)
    """Records by global step and rank."""
    waits: dict[Call, float] = field(default_factory=dict)
    """ms that a rank's collective waited for its last rank; those that were matched on all ranks."""
    offset_ns: dict[int, int] = field(default_factory=dict)
    """Offsets added to the ranks' times to align their clocks; empty where times are as recorded."""
    residual_us: float | None = None
    """Largest disagreement of the clocks after alignment; None if they were not aligned."""
    why_empty: str = ""
    late_rank: int | None = None
    """Rank that costs the others most; shown first."""
    kernels: dict[int, dict[int, list[NamedSpan]]] = field(default_factory=dict)
    """Kernels by global step and rank, where the source names kernels."""


def steps_to_show(report: Report, shown: Shown | None = None) -> list[Steps]:
    """The steps of each label's first run that the timeline shows, read again from disk record by record."""
    return [
        _steps(
            dataset.first,
            report.causes.get(label),
            shown or Shown(),
            MAX_FURTHER_MARKS // len(report.datasets),
        )
        for label, dataset in report.datasets.items()
    ]


def timeline_data(steps_shown: list[Steps]) -> dict[str, Any]:
    """Data that page.js draws; times in ms since the earliest rank's start of the step."""
    num = sum(
        len(steps.records.get(step, ()))
        for steps in steps_shown
        for step in {step for name, step in steps.chosen.items() if not name.startswith("step ")}
    )
    per_rank = max(200, MAX_MARKS // max(1, num))
    words = _Words()
    runs = [
        {
            "label": steps.label,
            "source": steps.source,
            "why_empty": steps.why_empty,
            "chosen": steps.chosen,
            "steps": {
                str(step): _step(by_rank, steps, words, per_rank, steps.kernels.get(step, {}))
                for step, by_rank in steps.records.items()
            },
            "residual_us": steps.residual_us
            if steps.source in TRACE_SOURCES or any(steps.offset_ns.values())
            else None,
            "moved": any(steps.offset_ns.values()),
            "late": steps.late_rank,
        }
        for steps in steps_shown
    ]
    return {"runs": runs, "words": words.list}


def packed(data: dict[str, Any]) -> dict[str, Any]:
    """timeline_data for the page: instead of its start and end a span has, in units of 0.1 us, its distance
    from the end of the one before and its length, half as many digits. The script adds them up."""

    def short(spans: list[list[Any]]) -> list[list[Any]]:
        ends = [0, *(round(span[1] * 1e4) for span in spans)]
        starts = [round(span[0] * 1e4) for span in spans]
        return [
            [start - before, end - start, *span[2:]]
            for span, start, end, before in zip(spans, starts, ends[1:], ends, strict=False)
        ]

    def of_rank(rank: dict[str, Any]) -> dict[str, Any]:
        rows = [row | {"lanes": [short(lane) for lane in row["lanes"]]} for row in rank["rows"]]
        return rank | {"states": short(rank["states"]), "rows": rows}

    def of_run(run: dict[str, Any]) -> dict[str, Any]:
        steps = {
            number: step | {"ranks": [of_rank(rank) for rank in step["ranks"]]}
            for number, step in run["steps"].items()
        }
        return run | {"steps": steps}

    return data | {"runs": [of_run(run) for run in data["runs"]]}


def exposed_collectives(
    steps: Steps, step: int, num: int
) -> list[tuple[int, CollectiveRecord, float, float | None]]:
    """Rank, collective, its exposed ms and its wait ms: those that were exposed longest."""
    rows = []
    for rank, record in steps.records[step].items():
        timed = [
            row for row in record.collectives or () if row.start_ms is not None and row.end_ms is not None
        ]
        if record.active_segments is None or not timed:
            continue
        spans = np.array([(row.start_ms, row.end_ms) for row in timed])
        exposed = _exposed(_stretches(record, _window_ms(record), {}))
        for row, exposed_ms in zip(timed, length_within(exposed, *spans.T).tolist(), strict=True):
            rows.append((rank, row, exposed_ms, steps.waits.get(_call(record, row))))
    return sorted(rows, key=lambda row: -row[2])[:num]


def _steps(run: Run, causes: Causes | None, shown: Shown, further_marks: int) -> Steps:
    chosen = _chosen(run, shown)
    if chosen:
        detailed_steps = set(run.global_step[run.has_details & shown.columns(run)].tolist())
        for place, cause in enumerate(causes.listed if causes is not None else (), start=1):
            if cause.global_step is not None and cause.global_step in detailed_steps:
                chosen[f"cause {place}"] = cause.global_step
    steps = Steps(run.label, run.source, telling_ranks(run, shown), chosen)
    if not chosen:
        which = "no step" if shown.steps is None else f"none of steps {shown.steps[0]} to {shown.steps[1]}"
        steps.why_empty = f"{which} has its details from every rank"
        return steps
    global_steps = set(chosen.values())
    further = _further(run, shown, global_steps)
    steps.offset_ns, steps.residual_us = dict(run.clock_offset_ns), run.clock_residual_us
    for rank in steps.ranks:
        for record in _read(run, rank, global_steps.union(further)):
            steps.records.setdefault(record.global_step, {})[rank] = record
        if further and rank == steps.ranks[0]:
            further_steps = _fitting(steps, rank, further, further_marks)
            chosen |= {f"step {step}": step for step in further_steps}
            steps.records = {step: r for step, r in steps.records.items() if step in chosen.values()}
            global_steps.update(further_steps)
            further = []
        for step, kernels in run.kernels(rank) if run.kernels is not None else ():
            if step in global_steps:
                steps.kernels.setdefault(step, {})[rank] = kernels
    if run.arrivals is not None:
        steps.waits = _waits(steps, run.arrivals)
        steps.late_rank = None if causes is None else causes.late_rank
    return steps


def _chosen(run: Run, shown: Shown) -> dict[str, int]:
    """Steps chosen by the slowest rank's time, among the judged steps whose details were kept."""
    detailed = np.flatnonzero(run.has_details & shown.columns(run))
    judged_and_kept = detailed[detailed >= run.num_warmup]
    columns = judged_and_kept if len(judged_and_kept) else detailed
    if len(columns) == 0:
        return {}
    step_ms = np.nan_to_num(run.metrics["step_ms"][:, columns]).max(axis=0)
    order = np.argsort(step_ms, kind="stable")
    columns_by_name = {
        "median": order[(len(order) - 1) // 2],
        "slowest": order[-1],
        "first": 0,
        "last": len(columns) - 1,
    }
    return {name: int(run.global_step[columns[i]]) for name, i in columns_by_name.items()}


def _further(run: Run, shown: Shown, telling: set[int]) -> list[int]:
    """Judged steps with details, spread evenly."""
    columns = np.flatnonzero(run.has_details & shown.columns(run))
    columns = columns[columns >= run.num_warmup]
    if not len(columns):
        return []
    places = np.unique(np.linspace(0, len(columns) - 1, MAX_FURTHER).round().astype(int))
    return [step for step in run.global_step[columns[places]].tolist() if step not in telling]


def _fitting(steps: Steps, rank: int, further: list[int], most_marks: int) -> list[int]:
    """As many of the further steps as fit, as far as one rank tells."""
    records = [steps.records[step][rank] for step in further if step in steps.records]
    marks = [
        len(r.active_segments or ()) + len(r.collectives or ()) + len(r.host_spans or ()) for r in records
    ]
    mean = max(1.0, float(np.mean(marks))) if marks else 1.0
    num = min(len(records), int(most_marks / (mean * len(steps.ranks))))
    places = np.linspace(0, len(records) - 1, num).round().astype(int).tolist()
    return [records[place].global_step for place in places]


def _read(run: Run, rank: int, global_steps: set[int]) -> Iterator[StepRecord]:
    left = set(global_steps)
    for record in run.records(rank):
        if record.global_step in left:
            left.remove(record.global_step)
            yield record
        if not left:
            return


def _waits(steps: Steps, arrivals: Arrivals) -> dict[Call, float]:
    """Waits of the collectives that are shown and were matched on all ranks."""
    waits = {}
    for by_rank in steps.records.values():
        for rank, record in by_rank.items():
            rank_waits = arrivals.waits.get(rank)
            for row in record.collectives or ():
                if rank_waits is not None and row.start_ms is not None and row.end_ms is not None:
                    call = _call(record, row)
                    wait_ms = rank_waits.wait_ms_of(call[2])
                    if wait_ms is not None:
                        waits[call] = wait_ms
    return waits


def _call(record: StepRecord, row: CollectiveRecord) -> Call:
    return record.rank, row.op, record.start_unix_ns + round((row.start_ms or 0.0) * 1e6)


class _Words:
    """Texts by number, each in the page once."""

    def __init__(self) -> None:
        self.list: list[str] = []
        self._index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.list)
            self.list.append(text)
        return self._index[text]


def _step(
    by_rank: dict[int, StepRecord],
    steps: Steps,
    words: _Words,
    per_rank: int,
    kernels: dict[int, list[NamedSpan]],
) -> dict[str, Any]:
    start_ns = {rank: record.start_unix_ns + steps.offset_ns.get(rank, 0) for rank, record in by_rank.items()}
    origin_ns = min(start_ns.values())
    window_ms = {rank: _window_ms(record) for rank, record in by_rank.items()}
    is_apart = max(start_ns.values()) - origin_ns > FAR_APART * max(window_ms.values()) * 1e6
    ranks = []
    apart_us = steps.residual_us or 0.0 if len(by_rank) > 1 and steps.source not in TRACE_SOURCES else 0.0
    for rank, record in sorted(by_rank.items()):
        at_ms = 0.0 if is_apart else (start_ns[rank] - origin_ns) / 1e6
        stretches = _stretches(record, window_ms[rank], steps.waits)
        cut_ms = None
        if len(stretches) > per_rank:
            stretches = stretches[:per_rank]
            cut_ms = _ms(at_ms + stretches[-1][1])
        until_ms = stretches[-1][1] if stretches else window_ms[rank]
        ranks.append(
            {
                "rank": rank,
                "window": [_ms(at_ms), _ms(at_ms + window_ms[rank])],
                "clock_error_us": None if is_apart else max(record.clock_error_us or 0.0, apart_us) or None,
                "cut": cut_ms,
                "states": [[_ms(at_ms + a), _ms(at_ms + b), state] for a, b, state in stretches],
                "rows": _rows(record, at_ms, until_ms, steps.waits, words, per_rank, kernels.get(rank, [])),
            }
        )
    return {"ranks": ranks, "apart": is_apart}


def _window_ms(record: StepRecord) -> float:
    if record.step_ms is not None:
        return record.step_ms
    return max((segment.end_ms for segment in record.active_segments or ()), default=0.0)


def _stretches(
    record: StepRecord, window_ms: float, waits: dict[Call, float]
) -> list[tuple[float, float, int]]:
    """The step in order and without gaps: start, end, and which of STATE_INDEX or WAITING."""
    stretches = [
        (start, end, STATE_INDEX[name])
        for start, end, name in states(record.active_segments or [], 0.0, window_ms)
    ]
    spans = [
        (row.start_ms, row.start_ms + waits.get(_call(record, row), 0.0), row.end_ms)
        for row in record.collectives or ()
        if row.start_ms is not None and row.end_ms is not None
    ]
    if not any(arrived > start for start, arrived, _ in spans):
        return stretches
    exposed = _exposed(stretches)
    start, arrived, end = np.array(spans).T
    waiting = exposed_waiting(start, arrived, end, exposed)
    split = [stretch for stretch in stretches if stretch[2] != STATE_INDEX[EXPOSED]]
    split += [(a, b, WAITING) for a, b in waiting.tolist()]
    split += [(a, b, STATE_INDEX[EXPOSED]) for a, b in subtract_normalised(exposed, waiting).tolist()]
    return sorted(split)


def _exposed(stretches: Sequence[tuple[float, float, int]]) -> Intervals:
    return intervals([stretch[:2] for stretch in stretches if stretch[2] == STATE_INDEX[EXPOSED]])


def _rows(
    record: StepRecord,
    at_ms: float,
    until_ms: float,
    waits: dict[Call, float],
    words: _Words,
    per_rank: int,
    kernels: list[NamedSpan],
) -> list[dict[str, Any]]:
    """A row per stream; spans that overlap within one go to further lanes of it."""
    by_stream: dict[str, list[list[Any]]] = {}
    named = unions(record.active_segments) if record.active_segments is not None else {}
    for row in record.collectives or ():
        if row.start_ms is None or row.end_ms is None or row.start_ms > until_ms:
            continue
        wait_ms = waits.get(_call(record, row))
        by_stream.setdefault(_stream(row), []).append(
            [
                _ms(at_ms + row.start_ms), _ms(at_ms + row.end_ms), words(record.name_of(row)),
                words(row.group), len(row.ranks) or None, row.bytes or None, words(row.dtype), row.seq,
                _short(row.busbw_gb_s if row.bytes else None),
                None if wait_ms is None else _ms(wait_ms), int(row.is_async), words(row.phase or ""),
            ]
        )  # fmt: skip
    if not by_stream:  # a source that keeps the unions alone
        for stream, spans in named.items():
            if stream not in ("compute", COPY):
                by_stream[stream] = [
                    [_ms(at_ms + a), _ms(at_ms + b), words(OP_OF_STREAM.get(stream, stream))]
                    for a, b in spans.tolist()
                    if a <= until_ms
                ]
    lanes: list[Any] = [_pieces(named.get("compute"), at_ms, until_ms)]
    if 0 < len(kernels) <= per_rank:  # else the stretches in which any ran
        lanes = _lanes(
            [_ms(at_ms + a), _ms(at_ms + b), words(name)] for a, b, name in kernels if a <= until_ms
        )
    host = [
        [
            _ms(at_ms + span.start_ms),
            _ms(at_ms + span.end_ms),
            words(span.kind.replace("_", " ")),
            words(span.where),
        ]
        for span in (record.host_spans or ())[:per_rank]
        if span.start_ms <= until_ms
    ]
    rows = [
        {"name": "host", "kind": "host", "lanes": _lanes(host)},
        {"name": "compute", "kind": "compute", "lanes": lanes},
    ]
    for stream, stream_spans in sorted(by_stream.items()):
        rows.append({"name": stream, "kind": "comm", "lanes": _lanes(stream_spans[:per_rank])})
    copies = named.get(COPY)
    if copies is not None and len(copies):
        rows.append({"name": "copies", "kind": "copy", "lanes": [_pieces(copies, at_ms, until_ms)]})
    return [row for row in rows if any(row["lanes"])]


def _stream(row: CollectiveRecord) -> str:
    """The stream as recorded; where that does not tell the work apart, with the kind of work."""
    return row.stream if row.stream == stream_of(row.op) else f"{row.stream}: {stream_of(row.op)}"


def _pieces(spans: Any, at_ms: float, until_ms: float) -> list[list[float]]:
    return (
        [] if spans is None else [[_ms(at_ms + a), _ms(at_ms + b)] for a, b in spans.tolist() if a < until_ms]
    )


def _lanes(spans: Iterable[list[Any]]) -> list[list[list[Any]]]:
    lanes: list[list[list[Any]]] = []
    for span in sorted(spans, key=lambda span: (span[0], span[1])):
        for lane in lanes:
            if lane[-1][1] <= span[0]:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


def _ms(value: float) -> float:
    """Rounds to 0.1 µs."""
    return round(value, 4)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
