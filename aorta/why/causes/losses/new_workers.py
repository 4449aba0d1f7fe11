"""What it costs to start a loader's workers anew at each epoch: in its first step and in the one before it.

The process that trains forks them, waits for their first batch, and ends those before them; after a fork it
copies each page of its memory that it writes first. Which of the two steps has which of this differs: Trainer
and accelerate are a batch ahead, Lightning ends workers once the next ones have started. Workers that stay
make no batch of an epoch before it begins: what the first one is waited for stays in part, of which only the
most is known.
"""

from dataclasses import replace

import numpy as np

from aorta.account.judge.occasional import occasions
from aorta.account.model import Run
from aorta.account.rows import positive
from aorta.records.stacks import StackFrame
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.why.causes.code_lines import line_of
from aorta.why.causes.finding import ANY_CELL, WAIT, CauseFinding, steps_with
from aorta.why.causes.losses.parts import Parts
from aorta.why.causes.program import program_of

MOSTLY = 0.5
"""Of what these steps take longer than others, from which on all of that comes with the workers."""
WORTH_SAYING = 0.05
"""Of the loss, from which on it is said what is taken off."""
SAME_STEPS = 0.8
"""Of a loss, that these steps have of it for it to be of them."""
BESIDE: tuple[str, ...] = ("checkpoint", "garbage_collection", "between_steps", "pause")
"""Kinds of what a program does at the end of an epoch, too."""


def with_new_workers(judged: Run, parts: Parts, losses: list[CauseFinding]) -> list[CauseFinding]:
    """The losses, what is lost where an epoch begins as one apart from other loading."""
    data = next((one for one in losses if one.kind == "data_loading" and one.rank is None), None)
    names, of_program = program_of(judged.noted)
    if data is None or "workers_new" not in names:
        return losses
    steps = parts.account.global_step
    slow = occasions(data.ms, steps, data.slow_steps)
    if slow is None:
        return losses
    is_before = np.append(slow.is_slow[1:] & (np.diff(steps) == 1), False)
    is_usual = ~(slow.is_slow | is_before)
    if not is_usual.any():
        return losses

    def beyond(ms: Floats) -> Floats:
        """[step]: that the first steps of epochs, each with the one before it, have more than usual ones."""
        more = np.nan_to_num(ms) - np.median(np.nan_to_num(ms)[is_usual])
        pairs = more + np.append(0.0, np.where(is_before, more, 0.0)[:-1])
        return np.where(slow.is_slow, positive(pairs), 0.0)

    line, own, left = line_of(data, judged), beyond(data.ms), beyond(parts.step_ms.mean(axis=0))
    ended = np.zeros_like(own)
    kept = [one for one in losses if one is not data and not _is_of(one, slow.is_slow | is_before)]
    for other in [one for one in kept if one.kind in BESIDE and one.rank is None]:
        ms = beyond(other.ms)
        at = line_of(other, judged) if other.kind == "between_steps" else None
        if at is None or line is None or (at.file, at.line) != (line.file, line.line):
            left = positive(left - ms)
        elif ms.sum() >= SAME_STEPS * np.nan_to_num(other.ms).sum():
            # Ends of workers that nobody noted, as of a library that lets its iterator go.
            ended, kept = ended + ms, [one for one in kept if one is not other]
    all_ms = float((own + ended).sum())
    left = np.maximum(left if MOSTLY * float(left.sum()) <= all_ms else 0.0, own + ended)
    beside_ms = float(left.sum()) - all_ms
    # Workers that keep up have a batch each in as many steps as they are, and an epoch begins with a stock.
    first = _first_waits_ms(judged, steps[slow.is_slow], steps)
    of_stock = first * slow.is_slow.mean()
    most_ms = int(of_program["num_workers"]) * (np.median(parts.step_ms.mean(axis=0)[is_usual]) + of_stock)
    half = np.minimum(np.minimum(first, most_ms), own) / 2
    left, own = left - half, own - half
    takes = {cells: float(own.sum() / left.sum()) * part for cells, part in data.takes.items()}
    takes[("between_steps", "data", *ANY_CELL)] = float(ended.sum() / left.sum())
    takes[("data", *ANY_CELL, *WAIT, "transfer")] = float((left - own - ended).sum() / left.sum())
    facts = {
        "op": "workers_new",
        "at": line and StackFrame(line.file, line.line, line.function, True),
        "own_ms": all_ms / len(left),
        "first_ms": 2 * half.mean() if half.sum() >= WORTH_SAYING * left.sum() else None,
        "after_forks_ms": beside_ms / len(left) or None,
        "least_part": (own - half + ended).sum() / left.sum(),
    }
    anew = CauseFinding(
        "data_loading",
        left,
        takes,
        facts=facts,
        occasions=replace(slow, excess_ms=left),
        is_sure=True,
        more_ms=float(half.mean()),
    )
    rest = np.where(is_usual, data.ms, np.minimum(data.ms, np.median(data.ms[is_usual])))
    having = steps_with(rest)
    data.facts |= {"in_steps": int((rest > 0).sum()), "part_ms": float(rest[having].mean())}
    data.facts["step_ms"] = float(parts.step_ms[:, having].mean())
    data.ms = rest
    return [anew, *([data] if rest.any() else []), *kept]


def _first_waits_ms(judged: Run, first: Ints, steps: Ints) -> Floats:
    """[step]: how long new workers' first batch was waited for, by the last request for one in the first step
    of an epoch, if other calls of a loader stand before it than one for each step."""
    spans: dict[int, list[float]] = {}
    wanted = {*first.tolist(), *(first - 1).tolist()}
    for record in judged.records(judged.ranks[0]):
        if record.global_step in wanted and record.host_spans is not None:
            of_loader = (span for span in record.host_spans if span.kind == "data")
            spans[record.global_step] = [span.end_ms - span.start_ms for span in of_loader]
    num = {step: len(spans.get(step, ())) + len(spans.get(step - 1, ())) for step in first.tolist()}
    waits = {step: spans[step][-1] for step in num if num[step] > 2 and spans.get(step)}
    return np.array([waits.get(step, 0.0) for step in steps.tolist()])


def _is_of(finding: CauseFinding, steps: Flags) -> bool:
    """Whether it is of slow steps that are these."""
    if finding.facts.get("op") != "slow_steps" or finding.kind != "pause" or finding.occasions is None:
        return False
    is_slow = finding.occasions.is_slow
    return bool((is_slow & steps).sum() >= SAME_STEPS * is_slow.sum())
