"""The steps that the page shows span by span: a few steps of a few ranks, not the run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.records.perfetto import COMPUTE, EXPOSED, HIDDEN, IDLE, states
from aorta.records.reader import OP_OF_STREAM
from aorta.records.schema import CollectiveRecord, StepRecord
from aorta.report.model import JudgedRun, Report, Run
from aorta.timeline.collective import stream_of
from aorta.timeline.overlap import unions
from aorta.timeline.types import COPY

MAX_RANKS = 8
MAX_MARKS = 80_000
"""Spans and stretches in the page, all runs together: about 2 MB."""
MAX_RANKS_MATCHED = 64
"""Up to this every rank is read to find out who waits for whom."""
SYMMETRIC = frozenset(("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier"))
"""Operations in which every rank waits for the last one."""
STATE_INDEX = {COMPUTE: 0, HIDDEN: 1, EXPOSED: 2, IDLE: 3}

Key = tuple[str, str, int, int, tuple[int, ...]]


@dataclass(slots=True)
class Steps:
    """What the timeline of one run shows."""

    label: str
    source: str
    ranks: list[int]
    chosen: dict[str, int]
    """'first', 'median', 'slowest' and 'last' and the global step of each."""
    records: dict[int, dict[int, StepRecord]] = field(default_factory=dict)
    """By global step and rank."""
    arrival_ns: dict[int, dict[Key, int]] = field(default_factory=dict)
    """By global step: when the last rank of a collective arrived; those that every rank was seen in."""
    why_empty: str = ""


def steps_to_show(report: Report) -> list[Steps]:
    """Read again from disk, one record at a time; a label's first run."""
    return [_steps(dataset.first) for dataset in report.datasets.values()]


def timeline_data(shown: list[Steps], group_names: dict[str, str] | None = None) -> dict[str, Any]:
    """What page.js draws; times in ms since the earliest rank's start of the step."""
    num = sum(len(by_rank) for steps in shown for by_rank in steps.records.values())
    per_rank = max(200, MAX_MARKS // max(1, num))
    words = _Words()
    runs = [
        {
            "label": steps.label,
            "source": steps.source,
            "why_empty": steps.why_empty,
            "chosen": steps.chosen,
            "steps": {
                str(step): _step(by_rank, steps.arrival_ns.get(step, {}), words, per_rank)
                for step, by_rank in steps.records.items()
            },
        }
        for steps in shown
    ]
    return {"runs": runs, "words": words.list}


def exposed_collectives(
    by_rank: dict[int, StepRecord], arrival_ns: dict[Key, int], num: int
) -> list[tuple[int, CollectiveRecord, float, float | None]]:
    """Rank, collective, its exposed ms and its wait ms: those that were exposed longest."""
    rows = []
    for rank, record in by_rank.items():
        if record.active_segments is None:
            continue
        compute = unions(record.active_segments)["compute"]
        for row in record.collectives or ():
            if row.start_ms is not None and row.end_ms is not None:
                covered = np.minimum(compute[:, 1], row.end_ms) - np.maximum(compute[:, 0], row.start_ms)
                exposed_ms = row.end_ms - row.start_ms - float(np.maximum(covered, 0.0).sum())
                rows.append((rank, row, max(0.0, exposed_ms), _wait_ms(record, row, arrival_ns)))
    return sorted(rows, key=lambda row: -row[2])[:num]


def _steps(judged: JudgedRun) -> Steps:
    run = judged.run
    chosen = _chosen(judged)
    steps = Steps(run.label, run.source, _ranks(judged), chosen)
    if not chosen:
        steps.why_empty = "no step was recorded with its details by every rank (recording.detail_every)"
        return steps
    wanted = set(chosen.values())
    matched = run.ranks if len(run.ranks) <= MAX_RANKS_MATCHED else steps.ranks
    arrivals: dict[int, dict[Key, tuple[int, int]]] = {step: {} for step in wanted}
    for rank in matched:
        for record in _read(run, rank, wanted):
            _arrive(arrivals[record.global_step], record)
            if rank in steps.ranks:
                steps.records.setdefault(record.global_step, {})[rank] = record
    for step, found in arrivals.items():
        steps.arrival_ns[step] = {key: at for key, (at, num) in found.items() if num == len(key[4]) > 1}
    return steps


def _chosen(judged: JudgedRun) -> dict[str, int]:
    """By the slowest rank's time, among the judged steps whose details were kept."""
    run = judged.run
    kept = np.flatnonzero(run.has_details)
    judged_and_kept = kept[kept >= judged.num_warmup]
    columns = judged_and_kept if len(judged_and_kept) else kept
    if len(columns) == 0:
        return {}
    step_ms = np.nan_to_num(run.metrics["step_ms"][:, columns]).max(axis=0)
    order = np.argsort(step_ms, kind="stable")
    at = {"median": order[(len(order) - 1) // 2], "slowest": order[-1], "first": 0, "last": len(columns) - 1}
    return {name: int(run.global_step[columns[i]]) for name, i in at.items()}


def _ranks(judged: JudgedRun) -> list[int]:
    """All of few; of many those spread evenly from the least to the most exposed."""
    run = judged.run
    if len(run.ranks) <= MAX_RANKS:
        return list(run.ranks)
    exposed_ms = np.nan_to_num(judged.values("exposed_ms")).mean(axis=1)
    order = np.argsort(exposed_ms, kind="stable")
    at: NDArray[np.int64] = np.linspace(0, len(order) - 1, MAX_RANKS).round().astype(np.int64)
    return sorted(run.ranks[i] for i in order[at].tolist())


def _read(run: Run, rank: int, wanted: set[int]) -> Iterator[StepRecord]:
    left = set(wanted)
    for record in run.records(rank):
        if record.global_step in left:
            left.remove(record.global_step)
            yield record
        if not left:
            return


def _key(row: CollectiveRecord) -> Key:
    return row.group, row.op, row.seq, row.bytes, tuple(row.ranks)


def _arrive(arrivals: dict[Key, tuple[int, int]], record: StepRecord) -> None:
    for row in record.collectives or ():
        if row.op in SYMMETRIC and row.start_ms is not None:
            at = record.start_unix_ns + round(row.start_ms * 1e6)
            before, num = arrivals.get(_key(row), (at, 0))
            arrivals[_key(row)] = max(at, before), num + 1


def _wait_ms(record: StepRecord, row: CollectiveRecord, arrival_ns: dict[Key, int]) -> float | None:
    last_ns = arrival_ns.get(_key(row))
    if last_ns is None or row.start_ms is None or row.end_ms is None:
        return None
    wait_ms = (last_ns - record.start_unix_ns) / 1e6 - row.start_ms
    return min(max(0.0, wait_ms), row.end_ms - row.start_ms)


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
    by_rank: dict[int, StepRecord], arrival_ns: dict[Key, int], words: _Words, per_rank: int
) -> dict[str, Any]:
    origin_ns = min(record.start_unix_ns for record in by_rank.values())
    ranks = []
    for rank, record in sorted(by_rank.items()):
        at_ms = (record.start_unix_ns - origin_ns) / 1e6
        window_ms = record.step_ms
        if window_ms is None:
            window_ms = max((segment.end_ms for segment in record.active_segments or ()), default=0.0)
        stretches = list(states(record.active_segments or [], 0.0, window_ms))
        cut_ms = None
        if len(stretches) > per_rank:
            stretches = stretches[:per_rank]
            cut_ms = _ms(at_ms + stretches[-1][1])
        until = stretches[-1][1] if stretches else window_ms
        ranks.append(
            {
                "rank": rank,
                "window": [_ms(at_ms), _ms(at_ms + window_ms)],
                "clock_error_us": record.clock_error_us,
                "cut": cut_ms,
                "states": [[_ms(at_ms + a), _ms(at_ms + b), STATE_INDEX[name]] for a, b, name in stretches],
                "rows": _rows(record, at_ms, until, arrival_ns, words, per_rank),
            }
        )
    return {"ranks": ranks}


def _rows(
    record: StepRecord, at_ms: float, until: float, arrival_ns: dict[Key, int], words: _Words, per_rank: int
) -> list[dict[str, Any]]:
    """A row per stream; spans that overlap within one go to further lanes of it."""
    by_stream: dict[str, list[list[Any]]] = {}
    named = unions(record.active_segments) if record.active_segments is not None else {}
    for row in record.collectives or ():
        if row.start_ms is None or row.end_ms is None or row.start_ms > until:
            continue
        wait_ms = _wait_ms(record, row, arrival_ns)
        by_stream.setdefault(_stream(row), []).append(
            [
                _ms(at_ms + row.start_ms), _ms(at_ms + row.end_ms), words(row.op), words(row.group),
                len(row.ranks), row.bytes, words(row.dtype), row.seq, _short(row.busbw_gb_s),
                None if wait_ms is None else _ms(wait_ms), int(row.is_async),
            ]
        )  # fmt: skip
    if not by_stream:  # a source that keeps the unions alone
        for stream, spans in named.items():
            if stream not in ("compute", COPY):
                by_stream[stream] = [
                    [_ms(at_ms + a), _ms(at_ms + b), words(OP_OF_STREAM.get(stream, stream))]
                    for a, b in spans.tolist()
                    if a <= until
                ]
    rows = [{"name": "compute", "kind": "compute", "lanes": [_pieces(named.get("compute"), at_ms, until)]}]
    for stream, found in sorted(by_stream.items()):
        rows.append({"name": stream, "kind": "comm", "lanes": _lanes(found[:per_rank])})
    copies = named.get(COPY)
    if copies is not None and len(copies):
        rows.append({"name": "copies", "kind": "copy", "lanes": [_pieces(copies, at_ms, until)]})
    return [row for row in rows if any(row["lanes"])]


def _stream(row: CollectiveRecord) -> str:
    """The stream as recorded; where that does not tell the work apart, with the kind of work."""
    return row.stream if row.stream == stream_of(row.op) else f"{row.stream}: {stream_of(row.op)}"


def _pieces(spans: Any, at_ms: float, until: float) -> list[list[float]]:
    return [] if spans is None else [[_ms(at_ms + a), _ms(at_ms + b)] for a, b in spans.tolist() if a < until]


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
    """To 0.1 µs."""
    return round(value, 4)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
