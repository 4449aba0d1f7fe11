"""What `aorta merge RUN` does: add what kernel traces beside a run's records say to the records.

RUN is the folder of a run (run.json, rank_<n>_metrics.jsonl) with traces in rank<n>/ (rocprofv3, Nsight
Systems) or torch_profiler/rank<n>/. Each step that a trace has whole becomes a line of the trace's source in
the rank's file, in the window that the run's own line has; run.json gets coverage. Doing it again adds
nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from aorta.errors import AortaError, RecordError, TraceError
from aorta.merge.lines import (
    RankLines,
    append_lines,
    coverage_of,
    kernel_lines,
    read_lines,
    shift_by_steps,
    shifted,
    whole_steps,
)
from aorta.merge.windows import (
    WindowCheck,
    add_to_run,
    window_check,
)
from aorta.records.files import STEPS_FILE
from aorta.records.reader import read_run
from aorta.records.schema import RunRecord
from aorta.traces.classify import COMM_RULES, CommRule
from aorta.traces.model import NS_PER_MS, RankTrace
from aorta.traces.rocprof import BOOT_CLOCK
from aorta.traces.sources import open_source

_APART_NS = 5_000_000
"""Distance of a trace's steps from the records above which the trace is moved onto them.

The anchors of run.json are of rank 0's machine; a trace of another machine may have another clock."""
_SUFFIXES = (".db", ".sqlite", ".sqlite3", ".json", ".json.gz")


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The result of one trace."""

    rank: int
    check: WindowCheck
    source: str
    num_added: int
    notes: list[str]


def merge(
    run_dir: Path | str, faults: list[str] | None = None, rules: Sequence[CommRule] = COMM_RULES
) -> list[Merged]:
    """Read every trace beside the records of a run; AortaError where none of them could be used.

    faults: one line for each trace that could not be read.
    """
    folder = Path(run_dir)
    faults = [] if faults is None else faults
    run = read_run(folder)
    ranks = _ranks(folder)
    absent = sorted(set(range(run.world_size)) - set(ranks))
    if absent:
        faults.append(
            f"{len(absent)} of {run.world_size} ranks have no lines in {folder}, rank {absent[0]} first"
        )
    merged = [result for rank in ranks for result in _merge_rank(folder, run, rank, faults, rules)]
    bare = sorted(set(ranks) - {result.rank for result in merged})
    if merged and bare:
        faults.append(
            f"{len(bare)} of {run.world_size} ranks have no trace that was used, rank {bare[0]} first"
        )
    if not any(result.check.steps for result in merged):
        reason = f": {faults[0]}" if faults else ""
        raise TraceError(
            f"no trace beside the records of {folder} holds a step of the run; looked in rank<n>/ and "
            f"torch_profiler/rank<n>/{reason}"
        )
    if of_first := [result.check for result in merged if result.rank == 0]:
        add_to_run(folder, of_first)
    return merged


def _ranks(folder: Path) -> list[int]:
    names = (STEPS_FILE.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in names if match)


def _merge_rank(
    folder: Path, run: RunRecord, rank: int, faults: list[str], rules: Sequence[CommRule]
) -> Iterator[Merged]:
    try:
        lines = read_lines(folder, rank, faults)
    except RecordError as error:
        faults.append(f"rank {rank} is left out: {error}")
        return
    for name, trace in _traces(folder, rank, faults, rules):
        notes: list[str] = []
        trace = _on_the_records_clock(trace, run, lines, notes)
        chosen = whole_steps(trace, lines.steps)
        coverage = coverage_of(trace, chosen)
        if not chosen:
            faults.append(f"rank {rank}: {name} holds no whole step of the run ({_spans(trace, lines)})")
            continue
        yield Merged(
            rank=rank,
            check=window_check(name, trace, chosen, coverage),
            source=trace.source,
            num_added=append_lines(lines, kernel_lines(trace, chosen, coverage)),
            notes=notes,
        )


def _traces(
    folder: Path, rank: int, faults: list[str], rules: Sequence[CommRule]
) -> Iterator[tuple[str, RankTrace]]:
    """Name and content of every trace of a rank."""
    captured = list(_captured(folder / f"rank{rank}", rank, faults, rules))
    if captured:
        # Processes that the rank started left files too; the rank's own has most activities.
        name, trace = max(captured, key=lambda capture: len(capture[1].timeline))
        yield name, trace
    windows = folder / "torch_profiler" / f"rank{rank}"
    for path in sorted(windows.glob("*.pt.trace.json*")):
        try:
            (trace,) = _read(path, rules)
        except (AortaError, ValueError) as error:
            faults.append(f"rank {rank}: {path.name}: {error}")
            continue
        yield path.name, trace


def _captured(
    folder: Path, rank: int, faults: list[str], rules: Sequence[CommRule]
) -> Iterator[tuple[str, RankTrace]]:
    if not folder.is_dir():
        return
    paths = sorted(p for p in folder.rglob("*") if p.name.endswith(_SUFFIXES) and p.is_file())
    for path in paths or sorted(folder.rglob("*kernel_trace.csv*")):
        try:
            yield from ((path.name, trace) for trace in _read(path, rules))
        except AortaError as error:
            faults.append(f"rank {rank}: {path.name}: {error}")


def _read(path: Path, rules: Sequence[CommRule]) -> Iterator[RankTrace]:
    source = open_source(path)
    for number in source.ranks:
        yield source.read(number, rules=rules)


# ---- clocks ------------------------------------------------------------------------------------


def _on_the_records_clock(trace: RankTrace, run: RunRecord, lines: RankLines, notes: list[str]) -> RankTrace:
    """The trace moved onto the clock of the records; each move is a line in notes."""
    if BOOT_CLOCK in trace.quality.notes and run.clock_anchors:
        try:
            boot = [anchor["unix_ns"] - anchor["boottime_ns"] for anchor in run.clock_anchors]
        except KeyError as error:
            raise TraceError(f"run.json: a clock anchor lacks {error}") from None
        trace = shifted(trace, median_low(boot))
        notes.append("boot clock brought to Unix time by the anchors of run.json")
    apart_ns = shift_by_steps(trace, lines.steps)
    if apart_ns is not None and abs(apart_ns) > _APART_NS:
        trace = shifted(trace, apart_ns)
        notes.append(f"moved by {apart_ns / NS_PER_MS:.3f} ms onto the steps of the records")
    return trace


def _spans(trace: RankTrace, lines: RankLines) -> str:
    """Times of the trace and of the records in Unix seconds, for a message that they do not meet."""
    origin_ns = trace.timeline.origin_unix_ns
    first, last = ((origin_ns + ms * NS_PER_MS) / 1e9 for ms in trace.timeline.window_ms)
    starts = [row.start_unix_ns / 1e9 for row in lines.steps.values()]
    if not starts:
        return "the records hold no step"
    return f"it spans {first:.3f} to {last:.3f} s, steps begin at {min(starts):.3f} to {max(starts):.3f} s"


def table(merged: list[Merged]) -> list[str]:
    """The printed table: a line per trace, then notes and what was left over."""
    rows = [
        ("rank", "source", "steps", "lines added", "collectives", "without kernel", "without record", "trace")
    ]
    for result in merged:
        check = result.check
        rows.append(
            (
                str(result.rank), result.source, str(len(check.steps)), str(result.num_added),
                str(check.num_matched), str(check.num_records_without_kernel),
                str(check.num_kernels_without_record), check.trace,
            )
        )  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [
        "  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    for result in merged:
        lines += [f"rank {result.rank}: {note}" for note in result.notes]
        lines += [f"rank {result.rank}: {left}" for left in result.check.leftovers]
    return lines
