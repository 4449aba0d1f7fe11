"""Sampled stacks of the judged steps, and the line of the program in which most of some samples are."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

import numpy as np

from aorta.account.cause import CodeLine
from aorta.account.judge.occasional import occasions
from aorta.account.load.rank.phases import PREFIX
from aorta.account.model import Run, once_of_run
from aorta.records.stacks import (
    DOING,
    PLACES,
    STACK_PHASES,
    Doing,
    Function,
    Place,
    StackFrame,
    StackPhase,
    Stacks,
)
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.types import TRACE_SOURCES

MOST = 0.5
"""Of a loss, from which on it is in one function."""
OF_A_FUNCTION = 0.3
"""Of it, from which on what is in libraries tells what it calls."""
OF_A_LINE = 0.2
"""Of what is in a function, that a line beside the one with most has to be told."""
CALLED_OF_TORCH = ("Tensor.", "torch.", "F.", "nn.", "dist.")
"""Beginnings of names of what has no frame."""
LOSS_FUNCTIONS = ("loss", "cross_entropy", "log_softmax")
READS = ("item", "tolist", "cpu")
"""Methods of a tensor that hand its values to the host, and wait for the device that computes them."""
FEWEST = 3
"""Samples that tell how long a function takes, and show what is named."""
TIMED: tuple[StackPhase, ...] = ("backward", "optimizer")
"""Phases of which the host's spans tell how long the thread is in them."""
SMALL = 0.02
"""Of a step, below which a phase may have no samples."""
ZERO_GRAD = "Optimizer.zero_grad"
LATE = 0.2
"""Of what is sampled in a line, from which on libraries beside torch and Python's own are what it calls."""
MOST_RANKS = 8
"""Whose samples stand for those of all ranks."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Of one rank in the judged steps. Arrays are [sample]."""

    stacks: Stacks
    column: Ints
    """Place of the step among the judged ones; -1 of what is in no step, or in one that is not judged."""
    ms: Floats
    """Those of judged steps add up to the mean step; outside on the same scale."""
    rows: Ints
    """[sample, field of StackSample]"""

    @property
    def is_judged(self) -> Flags:
        return self.column >= 0

    def path(self, row: int) -> list[StackFrame]:
        """Frames of a sample, the outermost first."""
        return self.stacks.path(int(self.rows[row, 5]))

    def in_phase(self, *names: StackPhase) -> Flags:
        return np.isin(self.rows[:, 2], [STACK_PHASES.index(name) for name in names])

    def at(self, place: Place) -> Flags:
        result: Flags = self.rows[:, 1] == PLACES.index(place)
        return result

    def that(self, *doing: Doing) -> Flags:
        return np.isin(self.rows[:, 3], [DOING.index(one) for one in doing])

    @property
    def is_behind(self) -> Flags:
        """A backward pass of the step had ended."""
        return self.rows[:, 4].astype(bool)

    def leaf_in(self, *packages: str) -> Flags:
        """The innermost frame is a library's of these; '' for the program's own."""
        return self.leaf_is(lambda frame: ("" if frame.is_program else frame.file) in packages)

    def that_call(self, name: str) -> Flags:
        """The innermost frame is a function of torch's whose name ends with this: those of synchronize wait
        for all that a device has queued."""
        return self.leaf_is(lambda leaf: leaf.file == "torch" and leaf.function.endswith(name))

    def leaf_is(self, test: Callable[[StackFrame], bool]) -> Flags:
        of_node = np.array([test(self.stacks.frames[frame]) for _, frame in self.stacks.nodes], dtype=bool)
        return of_node[self.rows[:, 5]] if len(self.rows) else np.zeros(0, dtype=bool)

    def chosen(self, which: Flags | list[int], factor: float = 1.0) -> "list[WeightedStack]":
        """The samples that are meant, by a mask or their rows, as stacks with ms of a step."""
        return [
            WeightedStack(self.stacks.path(int(row[5])), float(ms) * factor, DOING[int(row[3])])
            for row, ms in zip(self.rows[which], self.ms[which], strict=True)
        ]


def innermost(frames: list[StackFrame]) -> StackFrame | None:
    """Line of the program; None where all are libraries'."""
    return next((frame for frame in reversed(frames) if frame.is_program), None)


def is_of_torch(frame: StackFrame) -> bool:
    """A function of torch's, or a tensor's method."""
    return frame.file == "torch" or (not frame.file and frame.function.startswith(CALLED_OF_TORCH))


def is_a_loss(frame: StackFrame) -> bool:
    """A loss function of torch's, which belongs to the model's pass."""
    return is_of_torch(frame) and any(name in frame.function.lower() for name in LOSS_FUNCTIONS)


def is_a_wait(calls: str) -> bool:
    """Of a library's function as lines name it: it waits for what a device has queued."""
    return calls.removesuffix(" of torch").rpartition(".")[2] in (*READS, "synchronize")


@dataclass(frozen=True, slots=True)
class WeightedStack:
    """frames: the outermost first. ms: below 0 of what is compared against."""

    frames: list[StackFrame]
    ms: float
    doing: Doing


@once_of_run
def samples_of(run: Run, rank: int) -> Samples | None:
    """None where no stacks were sampled in judged steps."""
    if run.stacks is None or run.source in TRACE_SOURCES:
        return None
    stacks = run.stacks(rank)
    rows = stacks.columns
    steps = run.global_step[run.judged_steps]
    if not len(rows) or not len(steps):
        return None
    order = np.argsort(steps)
    place = np.minimum(np.searchsorted(steps, rows[:, 0], sorter=order), len(steps) - 1)
    column = np.where(steps[order][place] == rows[:, 0], order[place], -1)
    column[behind_last_step(run, rows)] = -1
    if run.noted.work is None or not run.noted.work.zeroed_bytes:
        rows = _as_before_zero_grad(stacks, rows, column >= 0)
    sampled_us = float(rows[column >= 0, 6].sum())
    lengths = run.values("step_ms")[run.ranks.index(rank)]
    if not sampled_us > 0 or not np.isfinite(lengths).any():
        return None
    ms = np.asarray(rows[:, 6] * (float(np.nanmean(lengths)) / sampled_us), dtype=np.float64)
    return Samples(stacks, column, _as_long(ms, column, lengths, steps), rows)


def behind_last_step(run: Run, rows: Ints) -> Flags:
    """Of samples: no step ends the time behind the last one, in which the program may save and close for
    long."""
    is_last = rows[:, 0] == run.whole.global_step.max()
    result: Flags = is_last & (rows[:, 1] == PLACES.index("behind_body"))
    return result


def _as_before_zero_grad(stacks: Stacks, rows: Ints, is_judged: Flags) -> Ints:
    """With samples in zero_grad(), where it has nothing to fill, as most of those in the line before it: they
    wait up to 5 ms for Python's lock, which zero_grad() is often the first to let go of."""
    is_rest = rows[:, 2] == STACK_PHASES.index("rest")
    nodes_of: dict[Function, dict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
    late: dict[int, StackFrame] = {}
    for node, rest in {*zip(rows[is_judged, 5].tolist(), is_rest[is_judged].tolist(), strict=True)}:
        num = int((is_judged & (rows[:, 5] == node)).sum())
        path = stacks.path(node)
        at = innermost(path)
        if at is not None and rest and any(frame.function == ZERO_GRAD for frame in path):
            late[node] = at
        for frame in (one for one in path if one.is_program and node not in late):
            nodes_of[frame.function_id][frame.line][node if rest else -1] += num
    moved = rows.copy()
    for node, at in late.items():
        lines = nodes_of[at.function_id]
        before = lines[max((line for line in lines if line < at.line), default=0)].most_common(1)
        if before and before[0][0] >= 0 and before[0][1] > 1:
            moved[rows[:, 5] == node, 5] = before[0][0]
    return moved


def _as_long(ms: Floats, column: Ints, lengths: Floats, steps: Ints) -> Floats:
    """Samples of slow steps and of usual ones with the parts of the run that these are: the lengths of all
    steps are known, and of few samples one more or less falls into a rare long step. As they were without
    slow steps, or without samples of them."""
    known = np.isfinite(lengths)
    slow = occasions(lengths[known], steps[known])
    if slow is None:
        return ms
    is_slow = np.zeros(len(lengths), dtype=bool)
    is_slow[known] = slow.is_slow
    weighed = ms.copy()
    for of_steps in (is_slow, known & ~is_slow):
        which = (column >= 0) & of_steps[column]
        if which.sum() < FEWEST:
            return ms
        weighed[which] *= float(lengths[of_steps].sum()) / len(lengths[known]) / float(ms[which].sum())
    return weighed


@once_of_run
def timed_samples_of(run: Run, rank: int, *more: StackPhase) -> Samples | None:
    """As samples_of; backward passes, optimizers and all else take the parts of the mean step that the host's
    spans show. Spans are exact and samples few, and where threads contend for cores more samples come while
    the thread waits for those of a backward pass. As sampled, without spans or without samples of a part.
    more: phases of which the same holds where they have samples; a part may lack one by chance then."""
    samples, whole = samples_of(run, rank), run.host_parts.get(f"{PREFIX}step")
    if samples is None or whole is None:
        return samples
    row = run.ranks.index(rank)
    step_ms = whole[row, run.judged_steps]
    is_timed = np.isfinite(step_ms)
    ms, left, share_left = samples.ms.copy(), np.ones(len(samples.ms), dtype=bool), 1.0
    total = float(ms[samples.is_judged].sum())
    phases: tuple[StackPhase, ...] = (*TIMED, *more, "rest")
    for phase in phases:
        of_phase = run.host_parts.get(f"{PREFIX}{phase}", np.zeros_like(whole))[row, run.judged_steps]
        share = float(np.nansum(of_phase[is_timed]) / step_ms[is_timed].sum()) if is_timed.any() else 0.0
        which = samples.in_phase(phase)
        if phase == "rest":  # whatever is left
            which, share = left, share_left
        sampled = float(samples.ms[samples.is_judged & which].sum()) / total
        if sampled > 0 and share > 0:
            ms[which] *= share / sampled
        elif phase not in more and max(sampled, share) > max(SMALL, bool(more) / samples.is_judged.sum()):
            return samples
        left, share_left = left & ~which, share_left - (share if sampled > 0 or not more else 0.0)
    return replace(samples, ms=ms)


def samples_of_ranks(run: Run, samples: Callable[[Run, int], Samples | None] = samples_of) -> list[Samples]:
    """Of the ranks that stand for all, those that were sampled."""
    return [one for rank in run.ranks[:MOST_RANKS] if (one := samples(run, rank)) is not None]


def timed_samples_of_all(judged: Run) -> list[Samples]:
    """Of each rank that stands for all, in its judged steps, recorded or not: the program does the same where
    its times were not taken. Empty where one of these ranks was not sampled."""
    samples = samples_of_ranks(judged.whole, timed_samples_of)
    return samples if len(samples) == len(judged.ranks[:MOST_RANKS]) else []


def heaviest(stacks: Sequence[WeightedStack]) -> CodeLine | None:
    """The innermost function of the program that most of the time is in, and its line with most of that; None
    where it is in no single one. Within functions that what is compared against never calls, of these."""
    total = sum(stack.ms for stack in stacks)
    if not total > 0:
        return None
    compared = [frame for stack in stacks if stack.ms < 0 for frame in stack.frames]
    usual = {frame.function_id for frame in compared}
    lines: list[tuple[StackFrame, list[Inside]]] = []
    for group in nested([(stack, -1) for stack in stacks], total, lambda frame: frame.is_program):
        lines.append((next(stack.frames[place] for stack, place in _by_weight(group)), group))
    if not lines:
        return None
    while any(line.function_id not in usual for line, _ in lines) and lines[-1][0].function_id in usual:
        lines.pop()
    found, inside = lines[-1]
    at_line = [(stack, place) for stack, place in inside if stack.frames[place] == found and stack.ms > 0]
    doing = max(DOING, key=lambda name: sum(stack.ms for stack, _ in at_line if stack.doing == name))
    caller = next(
        (
            outer
            for (outer, _), (inner, _) in reversed([*pairwise(lines)])
            if outer.outer_function != inner.outer_function
        ),
        None,
    )
    by_line = Counter[int]()
    for stack, place in inside:
        by_line[stack.frames[place].line] += max(stack.ms, 0.0)  # type: ignore[assignment]
    parts = ((line, ms / by_line.total()) for line, ms in by_line.most_common())
    named = [entry for entry in inside if _in_library(entry[0])]
    is_most = _ms(named) >= OF_A_FUNCTION * _ms(inside)
    named = [entry for entry in named if entry in at_line] or named  # what the line calls, where it calls any
    return CodeLine(
        file=found.file,
        line=found.line,
        function=found.outer_function,
        text=found.text,
        caller="" if caller is None else caller.text,
        calls=_called(stack for stack, _ in at_line),
        entry=_called((stack for stack, _ in named), 0) if is_most else "",
        doing=doing,
        ms=_ms(inside),
        part=min(_ms(inside) / total, 1.0),
        lines=tuple(one for one in parts if one[1] >= OF_A_LINE),
        num_samples=sum(stack.ms > 0 for stack, _ in inside),
    )


Inside = tuple[WeightedStack, int]
"""A stack, and one of its frames."""


def nested(
    inside: list[Inside], total: float, is_meant: Callable[[StackFrame], bool]
) -> Iterator[list[Inside]]:
    """Places of each of the functions that call each other behind these places, as far as most of total is in
    each: the outermost first."""
    while inside:
        groups: dict[Function, list[Inside]] = defaultdict(list)
        for stack, place in inside:
            behind = range(place + 1, len(stack.frames))
            found = next((at for at in behind if is_meant(stack.frames[at])), None)
            if found is not None:
                groups[stack.frames[found].function_id].append((stack, found))
        inside = max(groups.values(), key=_ms, default=[])
        if not inside or _ms(inside) < MOST * total:
            return
        yield inside


def _ms(group: Iterable[Inside]) -> float:
    return sum(stack.ms for stack, _ in group)


def _by_weight(group: list[Inside]) -> list[Inside]:
    """Those of the line with most time first."""
    ms: dict[StackFrame, float] = defaultdict(float)
    for stack, place in group:
        ms[stack.frames[place]] += stack.ms
    return sorted(group, key=lambda entry: -ms[entry[0].frames[entry[1]]])


def _in_library(stack: WeightedStack) -> list[StackFrame]:
    """What the innermost line of the program calls."""
    return [*takewhile(lambda frame: not frame.is_program, reversed(stack.frames))][::-1]


def _called(stacks: Iterable[WeightedStack], place: int = -1) -> str:
    """The library's function that most of them are in; place 0: which a line calls. Of libraries that hold
    Python's lock samples come late, in what torch does next in the line: these are meant where some show."""
    ms: dict[StackFrame | None, float] = defaultdict(float)
    held: dict[StackFrame | None, float] = defaultdict(float)
    for stack in stacks:
        frame = inner[place] if (inner := _in_library(stack)) else None
        ms[frame] += stack.ms
        if frame is not None and frame.file not in ("", "torch", "python"):
            held[frame] += stack.ms
    found = held if sum(held.values()) >= LATE * sum(ms.values()) else ms
    most = max(found, key=lambda frame: found[frame], default=None)
    return "" if most is None else most.text


def sampled_ms(judged: Run, file: str, function: str, lines: range | None = None) -> float:
    """Of a mean step, what the thread that trains was seen in a function of the program, or lines of it, and
    what it calls; 0 as in sampled."""
    return sum(sampled(judged, file, function, lines))


def sampled(
    judged: Run, file: str, function: str, lines: range | None = None, own: bool = False
) -> list[float]:
    """The same of each sample; [] where too few tell, and of one that holds the loop: it calls backward() or
    the optimizer. own: without what these call of the program."""
    samples = samples_of_ranks(judged.whole)
    found = []
    for one in samples:
        is_loops = one.in_phase("backward", "optimizer")[one.is_judged]
        for stack, is_loop in zip(one.chosen(one.is_judged), is_loops, strict=True):
            if any(
                frame.function_id == (file, function) and (lines is None or frame.line in lines)
                for frame in ([*filter(None, [innermost(stack.frames)])] if own else stack.frames)
            ):
                if is_loop:
                    return []
                found.append(stack.ms / len(samples))
    return found if len(found) >= FEWEST else []


def in_modules(judged: Run, slow_steps: Ints, usual_steps: Ints) -> float:
    """Part of what the first rank was seen in for longer in slow steps than in usual ones, by their numbers,
    that is in a module."""
    whole = judged.whole
    samples = samples_of(whole, judged.ranks[0])
    if samples is None or not len(slow_steps) or not len(usual_steps):
        return 0.0
    steps = whole.global_step[whole.judged_steps][samples.column]

    def more_ms(which: Flags) -> float:
        slow, usual = (
            float(samples.ms[which & np.isin(steps, some)].sum()) / len(some)
            for some in (slow_steps, usual_steps)
        )
        return max(slow - usual, 0.0)

    return more_ms(samples.is_judged & samples.in_phase("forward")) / max(more_ms(samples.is_judged), 1e-9)
