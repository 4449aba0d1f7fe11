"""What `aorta hang` prints: the rank and the collective that the others wait for."""

from pathlib import Path
from typing import Any

import msgspec

from aorta.errors import AortaError, RecordError, printable
from aorta.hang.find import HangFinding, find, sentence
from aorta.hang.last_calls import with_last_calls
from aorta.hang.report import NO_REPORT, HangReport, NoReport, read_reports
from aorta.records.endings import attempt_ending, ending_text
from aorta.records.launches import read_notes
from aorta.records.schema import Ending
from aorta.records.state import RankState, read_states

MOST_ROWS = 64
"""Ranks in the table."""
MOST_STACKS, MOST_FRAMES = 3, 6
"""Stacks that are printed, of ranks and of a rank; and frames of each."""
LIBRARIES = ("/torch/", "/aorta/record/", "/aorta/attach/")
"""Folders whose frames are left out: the program's own ones tell more."""


def show(folder: Path, as_json: bool) -> None:
    """Print what the reports tell, or how the run ended without one; AortaError where there is neither."""
    ending = ending_of(folder)
    ending_lines = endings(folder, ending)
    try:
        finding = find(with_last_calls(folder, read_reports(folder)))
    except AortaError as error:
        if isinstance(error, NoReport) and ending is not None and ending.kind != "hung":
            print(json_text(ending_lines, None) if as_json else printable(without_report(ending)))
            return
        if ending_lines:
            print(printable("\n".join(ending_lines)))  # the run ended, so it does not hang
        raise RecordError(printable(str(error))) from error
    if as_json:
        print(json_text(ending_lines, finding))
        return
    rows = [*ending_lines, sentence(finding), *without_reports(finding), "", *table(finding)]
    rows += stacks(finding)
    print(*map(printable, rows), sep="\n")


def ending_of(folder: Path) -> Ending | None:
    """How the run ended, from the states of its ranks; None where it goes on or nothing tells."""
    states = _states(folder)
    return attempt_ending(states, states[0].process.world_size, notes=read_notes(folder)) if states else None


def without_report(ending: Ending) -> str:
    """What is said of a run that has ended and left no report."""
    if ending.kind == "finished":
        return f"the run finished; {NO_REPORT}"
    return f"the run ended: {ending_text(ending)}; {NO_REPORT} (aorta run --hang turns the watchdog on)"


def _states(folder: Path) -> list[RankState]:
    return list((read_states(folder) or read_states(folder.parent)).values())


def endings(folder: Path, ending: Ending | None) -> list[str]:
    """The line that says how the run ended, from the states of its ranks; [] if there are none."""
    states = _states(folder)
    if not states:
        return []
    if ending is None:
        return [
            "the run is still going on"
            if any(state.is_alive for state in states)
            else "nothing tells how the run ended"
        ]
    return [ending_text(ending)]


def json_text(ending_lines: list[str], finding: HangFinding | None) -> str:
    """One JSON object: how the run ended, which ranks are waited for, and the reports of all ranks."""
    document: dict[str, Any] = {
        "ending": ending_lines[0] if ending_lines else None,
        "sentence": NO_REPORT if finding is None else sentence(finding),
        "ranks": [] if finding is None else sorted(finding.ranks),
        "reports": [] if finding is None else list(finding.reports),
    }
    if finding is not None and (notes := without_reports(finding)):
        document["notes"] = notes
    return msgspec.json.encode(document).decode()


def without_reports(finding: HangFinding) -> list[str]:
    """A line on ranks of which there is no report: they are dead, or their files are lost."""
    size = max((report.world_size for report in finding.reports), default=0)
    absent = sorted(set(range(size)) - {report.rank for report in finding.reports})
    return [f"{len(absent)} of {size} ranks left no report, rank {absent[0]} first"] if absent else []


def table(finding: HangFinding) -> list[str]:
    """A row per rank: those that are waited for first."""
    named = set(finding.ranks)
    reports = sorted(finding.reports, key=lambda report: (report.rank not in named, report.rank))
    rows = [("rank", "step", "still for", "in", "main thread")]
    rows += [_row(report) for report in reports[:MOST_ROWS]]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
    if len(reports) > MOST_ROWS:
        lines.append(f"... and {len(reports) - MOST_ROWS} more ranks")
    return lines


def stacks(finding: HangFinding) -> list[str]:
    """Python stacks of the ranks that are waited for, and of one rank that waits."""
    named = [report for report in finding.reports if report.rank in finding.ranks]
    waiting = [report for report in finding.reports if report.rank not in finding.ranks and report.stacks]
    rows: list[str] = []
    for report in [*named[:MOST_STACKS], *waiting[:1]]:
        call_stacks = report.stacks[:MOST_STACKS]
        if not call_stacks and report.main_thread:
            rows += ["", f"rank {report.rank}, main thread:", *_frame_lines(report.main_thread)]
        for stack in call_stacks:
            where = "launched at" if stack.thread == "launch" else f"{stack.thread} in it"
            name = next((g.name for g in report.groups or () if g.key == stack.group), stack.group)
            rows += ["", f"rank {report.rank}, {stack.op} #{stack.seq} of {name}, {where}:"]
            rows += _frame_lines(stack.frames)
    return rows


def _frame_lines(frames: list[str]) -> list[str]:
    return [f"    {frame}" for frame in _user_frames(frames)[:MOST_FRAMES]]


def _user_frames(frames: list[str]) -> list[str]:
    """Frames that are neither torch's nor aorta's own; all of them where no other is there."""
    user_frames = [frame for frame in frames if not any(folder in frame for folder in LIBRARIES)]
    return user_frames or frames


def _row(report: HangReport) -> tuple[str, str, str, str, str]:
    pending = [
        f"{call.op} #{call.seq} of {group.name}"
        for group in report.groups or ()
        for call in group.calls
        if call.finished is False and call.started is not False
    ]
    inside = ("not recorded" if report.groups is None else "-") if not pending else pending[0]
    return (
        str(report.rank),
        "-" if report.step is None else str(report.step),
        f"{report.since_s:.0f} s",
        inside,
        _place(report.main_thread),
    )


def _place(frames: list[str]) -> str:
    """The innermost function of the program, with the end of its path."""
    function, opening, place = (_user_frames(frames) or ["?"])[0].partition(" (")
    return function + opening + "/".join(place.split("/")[-3:])
