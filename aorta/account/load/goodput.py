"""Goodput: how much of a run's time went into steps that counted, and where the rest went, per attempt.

From the lines of its lowest rank, its attempts and its endings. docs/definitions.md defines the parts.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec

from aorta.account.model import Goodput
from aorta.errors import NOT_JSON, RecordError
from aorta.records.files import STEPS_FILE, steps_name
from aorta.records.lines import single_lines
from aorta.records.rotation import read_dropped
from aorta.records.schema import AttemptRecord, Ending, RunRecord
from aorta.timeline.types import OWN_SOURCES

MOST_LINES = 300_000
"""Lines of a rank up to which goodput is worked out, in 100 MB."""
MOST_BYTES = 1 << 25
"""Of a rank's lines that a look at a running job reads, in a third of a second."""
MOST_NAMED = 4
"""Attempts in a line."""
_TOGETHER_S = 0.05
"""Shortest time between two windows that counts as time outside of steps."""


class _Line(msgspec.Struct, gc=False):
    global_step: int
    source: str
    start_unix_ns: int
    step_ms: float | None
    attempt: int = 0
    rollbacks: int = 0
    host_spans: list[Any] | None = None

    @property
    def pass_number(self) -> tuple[int, int]:
        return self.attempt, self.rollbacks

    @property
    def end_ns(self) -> float:
        return self.start_unix_ns + (self.step_ms or 0.0) * 1e6

    def spent_ms(self, kind: str) -> float:
        """Host time of a kind in the step's window, behind its body too."""
        return float(sum(span[2] - span[1] for span in self.host_spans or () if span[0] == kind))


def goodput(path: Path, run: RunRecord, ending: Ending | None) -> list[Goodput]:
    """Of all attempts together, then of each; nothing where no line can be read, and beyond MOST_LINES.

    path: the lines of the lowest rank. ending: of the last attempt.
    """
    lines = list(islice(_own_lines(path), MOST_LINES + 1))
    if not lines or not run.attempts or len(lines) > MOST_LINES:
        return []
    last_pass: dict[int, tuple[int, int]] = {}
    for line in lines:
        last_pass[line.global_step] = max(line.pass_number, last_pass.get(line.global_step, (0, 0)))
    dropped_s = read_dropped(path).sums.get("step_ms", 0.0) / 1e3
    parts = []
    for attempt, following in pairwise([*run.attempts, None]):
        assert attempt is not None
        of_attempt = [line for line in lines if line.attempt == attempt.attempt]
        is_first = attempt is run.attempts[0]
        attempt_end = ending if following is None and ending is not None else attempt.ending
        parts.append(
            _of_attempt(attempt, of_attempt, following, attempt_end, last_pass, dropped_s * is_first)
        )
    return [_sum(parts), *parts]


def _own_lines(path: Path) -> Iterator[_Line]:
    """One line a step and pass, of the run's own sources; damaged ones are left to the reader of records."""
    decoder = msgspec.json.Decoder(_Line)
    seen: set[tuple[int, int, int]] = set()
    try:
        for data in single_lines(path):
            try:
                line = decoder.decode(data)
            except NOT_JSON:
                continue
            key = (*line.pass_number, line.global_step)
            if line.source in OWN_SOURCES and key not in seen:
                seen.add(key)
                yield line
    except RecordError:
        return


def _of_attempt(
    attempt: AttemptRecord,
    lines: Sequence[_Line],
    following: AttemptRecord | None,
    ending: Ending | None,
    last_pass: dict[int, tuple[int, int]],
    dropped_s: float,
) -> Goodput:
    start_ns = float(attempt.started_unix_ns)
    first_ns = lines[0].start_unix_ns if lines else start_ns
    last_ns = max((line.end_ns for line in lines), default=first_ns)
    end_ns = max(last_ns, float(ending.unix_ns) if ending is not None and ending.unix_ns else last_ns)
    next_ns = end_ns if following is None else max(end_ns, float(following.started_unix_ns))
    kept = [line.pass_number == last_pass[line.global_step] for line in lines]
    apart_ms = [line.spent_ms("checkpoint") + line.spent_ms("pause") for line in lines]
    net_s = [((line.step_ms or 0.0) - apart) / 1e3 for line, apart in zip(lines, apart_ms, strict=True)]
    between_s = sum(
        gap for a, b in pairwise(lines) if (gap := (b.start_unix_ns - a.end_ns) / 1e9) > _TOGETHER_S
    )
    counted_s = sum(s for s, keeps in zip(net_s, kept, strict=True) if keeps) + dropped_s
    redone_s = sum(s for s, keeps in zip(net_s, kept, strict=True) if not keeps)
    checkpoint_s = sum(line.spent_ms("checkpoint") for line in lines) / 1e3
    evaluation_s = between_s + sum(line.spent_ms("pause") for line in lines) / 1e3
    tail_s = (end_ns - last_ns) / 1e9
    hung = ending is not None and ending.kind == "hung"
    elapsed_s = (next_ns - start_ns) / 1e9
    restart_s = (next_ns - end_ns) / 1e9
    known_s = counted_s + redone_s + checkpoint_s + evaluation_s + tail_s + restart_s
    start_up_s = max(0.0, elapsed_s - known_s)  # the first step's start, less what was dropped of the lines
    return Goodput(
        attempt=attempt.attempt,
        elapsed_s=elapsed_s,
        counted_s=counted_s,
        redone_s=redone_s,
        start_up_s=start_up_s,
        checkpoint_s=checkpoint_s,
        evaluation_s=evaluation_s,
        hang_s=tail_s if hung else 0.0,
        restart_s=restart_s,
        other_s=0.0 if hung else tail_s,
        num_counted=sum(kept),
        num_redone=len(kept) - sum(kept),
    )


def goodput_of_folder(folder: Path, run: RunRecord | None) -> list[Goodput]:
    """Of a run of several attempts that may go on, for a quick look: nothing where its lines take more than
    MOST_BYTES, and what the ranks' states say of its end is not read."""
    if run is None or len(run.attempts) < 2:
        return []
    numbers = [int(name[1]) for path in folder.iterdir() if (name := STEPS_FILE.fullmatch(path.name))]
    path = folder / steps_name(min(numbers, default=0))
    if not path.exists() or path.stat().st_size > MOST_BYTES:
        return []
    return goodput(path, run, run.attempts[-1].ending)


def _sum(parts: Iterable[Goodput]) -> Goodput:
    parts = list(parts)
    names = [name for name in Goodput.__struct_fields__ if name != "attempt"]
    return Goodput(attempt=None, **{name: sum(getattr(part, name) for part in parts) for name in names})


def goodput_text(parts: Sequence[Goodput]) -> str:
    """The whole run in a line: what counted, what went elsewhere, largest first; and attempts.

    parts: as from goodput.
    """
    whole, *attempts = parts
    elapsed = whole.elapsed_s
    names = ("redone", "start_up", "checkpoint", "evaluation", "hang", "restart", "other")
    rest = sorted(((getattr(whole, f"{name}_s"), name) for name in names), reverse=True)
    shares = [
        f"{name.replace('_', '-')} {100 * s / elapsed:.0f} %"
        for s, name in rest
        if elapsed and s >= 0.005 * elapsed
    ]
    redone = f", {whole.num_redone} steps done again" if whole.num_redone else ""
    each = [f"{one.attempt}: {_share(one)}" for one in attempts[-MOST_NAMED:]] if len(attempts) > 1 else []
    return (
        f"goodput {_share(whole)}{redone}"
        + (f": {', '.join(shares)}" if shares else "")
        + (f" (attempt {', '.join(each)})" if each else "")
    )


def _share(part: Goodput) -> str:
    counted = part.counted_s / part.elapsed_s if part.elapsed_s else 0.0
    return f"{100 * counted:.0f} % of {_duration(part.elapsed_s)}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
